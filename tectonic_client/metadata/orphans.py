"""Inodes without a name: noted when the last name goes, reclaimed in bounded transactions.

The record of an orphan names the session that is to reclaim it. A client that has the file open and
finds that another one removed it takes it over (`take_over`), and hands it back when it closes it
(`release`); so it stays while somebody has it open. Once its reclaiming has begun (RECLAIMING)
nobody can take it over any more: some of its extents may be gone.

A directory may be orphaned with all that is in it (a deleted checkpoint, an abandoned attempt):
reclaiming it takes its entries out, which orphans its children in turn. Functions over a
transaction.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final

from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import BRIEF_BATCH_ROWS, RECLAIM_BATCH_ROWS
from tectonic_client.metadata import files, keys, quotas, sessions, tails
from tectonic_client.metadata.inodes import read_inode, read_inodes, write_inode
from tectonic_client.metadata.names import delete_entry, is_empty, list_entries
from tectonic_client.records import FileType, InodeFlag, InodeRecord, OrphanRecord

RECLAIMING: Final = 2**64 - 1
"""Session of an orphan of which a part may be gone."""


def write_orphan(tx: Transaction, inode: int, session_id: int) -> None:
    """Note that the inode has no name and is to be reclaimed, by `session_id` if that lives."""
    tx.put(keys.orphan(inode), OrphanRecord(session_id).encode())


def is_last_name(record: InodeRecord) -> bool:
    """Whether losing a name leaves the inode without any."""
    return record.is_directory or record.nlink <= 1


def erase(tx: Transaction, inode: int, record: InodeRecord) -> bool:
    """Remove an inode whose last name goes and that nobody has open, without an orphan's way.

    Only if that is little to do (see BRIEF_BATCH_ROWS), else nothing is done.
    """
    if record.is_directory and not is_empty(tx, inode):
        return False
    may_have_extents = record.size or record.flags & InodeFlag.TAIL
    if may_have_extents and record.file_type is FileType.REGULAR:
        if files.count_extents(tx, inode, BRIEF_BATCH_ROWS) == BRIEF_BATCH_ROWS:
            return False
        files.drop_extents(tx, inode, BRIEF_BATCH_ROWS)
    if record.flags & InodeFlag.QUOTA:
        quotas.account(tx, inode, replace(record, nlink=0))
    _forget(tx, inode, record)
    return True


def drop_name(
    tx: Transaction, inode: int, record: InodeRecord, session_id: int, now_ns: int
) -> InodeRecord:
    """The inode lost a name (a directory its only one); without links it is an orphan now."""
    nlink = 0 if record.is_directory else max(record.nlink - 1, 0)
    record = replace(record, nlink=nlink, ctime_ns=now_ns)
    write_inode(tx, inode, record)
    if nlink == 0:
        write_orphan(tx, inode, session_id)
    return record


def read_holder(tx: ReadTransaction, inode: int) -> int | None:
    """The session that is to reclaim an orphan, 0 or RECLAIMING; None where it is none."""
    row = tx.get(keys.orphan(inode))
    return None if row is None else OrphanRecord.decode(row).session


def is_whole(tx: ReadTransaction, inode: int) -> bool:
    """Whether an inode without links can still be read."""
    return read_holder(tx, inode) not in (None, RECLAIMING)


def find_removed(tx: ReadTransaction, inodes: Sequence[int], known: Container[int]) -> list[int]:
    """Those of the inodes, open here, that have no name and nobody to keep them.

    Of those that are `known` to be removed somebody does who holds them and lives.
    """
    rows = tx.get_many([keys.attributes(inode) for inode in inodes])
    pairs = zip(inodes, rows, strict=True)
    removed = [i for i, row in pairs if row is None or not InodeRecord.decode(row).nlink]
    holders = {inode: read_holder(tx, inode) for inode in removed}
    living = sessions.living(tx, {holder for holder in holders.values() if holder})
    return [i for i, holder in holders.items() if i not in known or holder not in living]


def take_over(tx: Transaction, inode: int, session_id: int) -> bool:
    """Keep an orphan for a session that has it open; False where it is (partly) gone."""
    sessions.require_session(tx, session_id)
    if not is_whole(tx, inode):
        return False
    write_orphan(tx, inode, session_id)
    return True


def release(tx: Transaction, inode: int, session_id: int) -> None:
    """The session has the orphan open no more: others may, and take it over."""
    if read_holder(tx, inode) == session_id:
        write_orphan(tx, inode, 0)


def reclaim(
    tx: Transaction, inode: int, session_id: int, rows: int = RECLAIM_BATCH_ROWS
) -> tuple[bool, list[int]]:
    """Remove a batch of what an orphan consists of: at most about `rows` entries or extents.

    Returns whether there is nothing left to do, and the orphans that this made. It is not reclaimed
    where another session that lives has taken it over.
    """
    holder = read_holder(tx, inode)
    if holder is None or (holder != session_id and sessions.living(tx, [holder])):
        return True, []
    record = read_inode(tx, inode)
    if record.nlink:
        # A hidden directory whose owner died: from now on nobody adds to it or publishes it.
        write_inode(tx, inode, replace(record, nlink=0))
    entries = list_entries(tx, inode, 0, rows)
    children = list({entry.record.inode: None for entry in entries})
    records = dict(zip(children, read_inodes(tx, children), strict=True))
    for entry in entries:
        delete_entry(tx, inode, entry.name)
        child = entry.record.inode
        records[child] = drop_name(tx, child, records[child], session_id, tx.now_ns())
    orphans = [child for child, left in records.items() if not left.nlink]
    if entries or not files.drop_extents(tx, inode, rows):
        write_orphan(tx, inode, RECLAIMING)
        return False, orphans
    _forget(tx, inode, record)
    tx.delete(keys.orphan(inode))
    return True, []


def _forget(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """Remove all records of an inode, a directory's quota too."""
    _forget_quota(tx, inode, record)
    tails.forget(tx, inode, record)
    prefix = keys.group(keys.FILE, inode)
    tx.delete_range(prefix, keys.prefix_end(prefix))


def _forget_quota(tx: Transaction, inode: int, record: InodeRecord) -> None:
    quota = quotas.quota_of(tx, inode, record)
    limits = None if quota is None else quotas.read_quota(tx, quota)
    if quota is not None and limits is not None and limits.directory == inode:
        quotas.delete_quota(tx, quota)
