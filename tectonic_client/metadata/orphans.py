"""Inodes without a name: noted when the last name goes, reclaimed in bounded transactions.

A directory may be orphaned with all that is in it (a deleted checkpoint, an abandoned attempt):
reclaiming it takes its entries out, which orphans its children in turn. Functions over a
transaction.
"""

from __future__ import annotations

from dataclasses import replace

from tectonic_client.kv.port import Transaction
from tectonic_client.limits import RECLAIM_BATCH_ROWS
from tectonic_client.metadata import files, keys, quotas
from tectonic_client.metadata.inodes import read_inode, read_inodes, write_inode
from tectonic_client.metadata.names import delete_entry, list_entries
from tectonic_client.records import InodeRecord, OrphanRecord


def write_orphan(tx: Transaction, inode: int, session_id: int) -> None:
    """Note that the inode has no name and is to be reclaimed, by `session_id` if that lives."""
    tx.put(keys.orphan(inode), OrphanRecord(session_id).encode())


def drop_name(tx: Transaction, inode: int, session_id: int, now_ns: int) -> InodeRecord:
    """The inode lost a name (a directory its only one); without links it is an orphan now."""
    return _drop_name(tx, inode, read_inode(tx, inode), session_id, now_ns)


def _drop_name(
    tx: Transaction, inode: int, record: InodeRecord, session_id: int, now_ns: int
) -> InodeRecord:
    nlink = 0 if record.is_directory else record.nlink - 1
    record = replace(record, nlink=nlink, ctime_ns=now_ns)
    write_inode(tx, inode, record)
    if nlink == 0:
        write_orphan(tx, inode, session_id)
    return record


def reclaim(
    tx: Transaction, inode: int, session_id: int, rows: int = RECLAIM_BATCH_ROWS
) -> tuple[bool, list[int]]:
    """Remove a batch of what an orphan consists of: at most about `rows` entries or extents.

    Returns whether the inode is gone with all its records, and the orphans that this made.
    """
    if tx.get(keys.orphan(inode)) is None:
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
        records[child] = _drop_name(tx, child, records[child], session_id, tx.now_ns())
    orphans = [child for child, left in records.items() if not left.nlink]
    if entries or not files.drop_extents(tx, inode, rows):
        return False, orphans
    _forget_quota(tx, inode, record)
    prefix = keys.group(keys.FILE, inode)
    tx.delete_range(prefix, keys.prefix_end(prefix))
    tx.delete(keys.orphan(inode))
    return True, []


def _forget_quota(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """A directory's quota goes with it."""
    quota = quotas.quota_of(tx, inode, record)
    limits = None if quota is None else quotas.read_quota(tx, quota)
    if quota is not None and limits is not None and limits.directory == inode:
        quotas.delete_quota(tx, quota)
