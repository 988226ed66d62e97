"""Inode records, and the rows of a directory that many clients change at once.

Creating an entry changes its directory's times. Were they in the inode's record, thousands of
creators would conflict on it; so each change goes to one of PARENT_TIME_LANES rows chosen by the
session, as a blind write, and readers take the newest. Subdirectory counts (link counts of
directories) are spread alike. Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tectonic_client.errors import NotDirectory, StaleHandle
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import DECODED_INODES, PARENT_TIME_LANES
from tectonic_client.metadata import keys, quotas
from tectonic_client.records import (
    InodeFlag,
    InodeRecord,
    ParentTimesRecord,
    SubdirectoriesRecord,
    SymlinkRecord,
)
from tectonic_client.types import Attributes


def lane_of(session_id: int) -> int:
    """The lane that a session writes."""
    return session_id % PARENT_TIME_LANES


def read_inode(tx: ReadTransaction, inode: int) -> InodeRecord:
    """The inode's record. Raises StaleHandle when there is none (any more)."""
    return _decode(inode, tx.get(keys.attributes(inode)))


def read_inodes(tx: ReadTransaction, inodes: Sequence[int]) -> list[InodeRecord]:
    """Their records, in one round trip. Raises StaleHandle where one is gone."""
    rows = tx.get_many([keys.attributes(inode) for inode in inodes])
    return [_decode(inode, data) for inode, data in zip(inodes, rows, strict=True)]


_decoded = lru_cache(DECODED_INODES)(InodeRecord.decode)
"""The same bytes are the same record: a directory's is read again with each of its entries."""


def _decode(inode: int, data: bytes | None) -> InodeRecord:
    if data is None:
        raise StaleHandle(f"inode {inode} does not exist any more")
    return _decoded(data)


def read_directory(tx: ReadTransaction, inode: int) -> InodeRecord:
    """As read_inode; raises NotDirectory for anything else."""
    return decode_directory(inode, tx.get(keys.attributes(inode)))


def decode_directory(inode: int, data: bytes | None) -> InodeRecord:
    """The record that was read under the inode's key. Raises StaleHandle, NotDirectory."""
    record = _decode(inode, data)
    if not record.is_directory:
        raise NotDirectory(f"inode {inode} is not a directory")
    return record


def write_inode(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """Set the inode's record, and count what that changes for its quota."""
    if record.flags & InodeFlag.QUOTA:
        quotas.account(tx, inode, record)
    tx.put(keys.attributes(inode), record.encode())


def attributes_of(inode: int, record: InodeRecord) -> Attributes:
    """What stat tells of anything but a directory."""
    return Attributes(
        inode=inode,
        mode=record.mode,
        nlink=record.nlink,
        uid=record.uid,
        gid=record.gid,
        rdev=record.rdev,
        size=record.size,
        atime_ns=record.atime_ns,
        mtime_ns=record.mtime_ns,
        ctime_ns=record.ctime_ns,
        pushes=bool(record.flags & InodeFlag.PUSH),
    )


def read_attributes(tx: ReadTransaction, inode: int) -> Attributes:
    """What stat tells. Raises StaleHandle."""
    record = read_inode(tx, inode)
    if not record.is_directory:
        return attributes_of(inode, record)
    return _directory_attributes(tx, inode, record)


def _directory_attributes(tx: ReadTransaction, inode: int, record: InodeRecord) -> Attributes:
    changed_ns, subdirectories = 0, 0
    start = keys.parent_times(inode, 0)
    end = keys.subdirectories(inode, PARENT_TIME_LANES)
    for key, value in tx.scan(start, end):
        if key < keys.subdirectories(inode, 0):
            changed_ns = max(changed_ns, ParentTimesRecord.decode(value).changed_ns)
        else:
            subdirectories += SubdirectoriesRecord.decode(value).count
    return Attributes(
        inode=inode,
        mode=record.mode,
        nlink=2 + subdirectories if record.nlink else 0,
        uid=record.uid,
        gid=record.gid,
        rdev=0,
        size=record.size,
        atime_ns=record.atime_ns,
        mtime_ns=max(record.mtime_ns, changed_ns),
        ctime_ns=max(record.ctime_ns, changed_ns),
        pushes=bool(record.flags & InodeFlag.PUSH),
    )


def touch_directory(tx: Transaction, inode: int, session_id: int, now_ns: int) -> None:
    """An entry of the directory changed."""
    lane = keys.parent_times(inode, lane_of(session_id))
    tx.put(lane, ParentTimesRecord(now_ns).encode())


def forget_directory_times(tx: Transaction, inode: int) -> None:
    """The record's own times count alone from now on: utimens may set a time back."""
    start = keys.parent_times(inode, 0)
    tx.delete_range(start, keys.parent_times(inode, PARENT_TIME_LANES))


def count_subdirectory(tx: Transaction, inode: int, session_id: int, change: int) -> None:
    """A subdirectory came (+1) or went (-1)."""
    key = keys.subdirectories(inode, lane_of(session_id))
    data = tx.get(key)
    count = 0 if data is None else SubdirectoriesRecord.decode(data).count
    tx.put(key, SubdirectoriesRecord(count + change).encode())


def read_symlink(tx: ReadTransaction, inode: int) -> bytes:
    """Target of a symbolic link. Raises StaleHandle."""
    data = tx.get(keys.symlink(inode))
    if data is None:
        raise StaleHandle(f"symbolic link {inode} does not exist any more")
    return SymlinkRecord.decode(data).target


def write_symlink(tx: Transaction, inode: int, target: bytes) -> None:
    """Set the target of a new symbolic link."""
    tx.put(keys.symlink(inode), SymlinkRecord(target).encode())


def copy_extras(tx: Transaction, source: int, target: int) -> None:
    """Give a new inode the symbolic link's target and the extended attributes of another."""
    start, new = keys.group(keys.FILE, source), keys.group(keys.FILE, target)
    for key, value in tx.scan(start + keys.SYMLINK, start + keys.EXTENT):
        tx.put(new + key[len(start) :], value)
