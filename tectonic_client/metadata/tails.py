"""Tails: what cutting a file of very many extents leaves, to be reclaimed in bounded transactions.

A cut sets the file's size in one transaction. Where few extents lie behind the new end they go with
it; else they stay, and the inode's tail record says that none that begins in start <= x < end
counts any more. From that commit on nobody may see them, however the file grows: readers leave them
out (`live_extents`), and whoever publishes bytes there first reclaims up to them (`is_in_the_way`).
Any client may reclaim a tail, from its front on, several at once. InodeFlag.TAIL says that there is
one, so that all other files cost no look. Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tectonic_client.errors import StaleHandle
from tectonic_client.extents import Extent
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_FILE_BYTES, RECLAIM_BATCH_ROWS
from tectonic_client.metadata import files, keys
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.records import InodeFlag, InodeRecord, TailRecord

_NOTHING: Final = range(0)


def dead_range(tx: ReadTransaction, inode: int, record: InodeRecord) -> range:
    """Extents of the inode that begin at these offsets do not count."""
    if not record.flags & InodeFlag.TAIL:
        return _NOTHING
    row = tx.get(keys.tail(inode))
    if row is None:
        return _NOTHING
    tail = TailRecord.decode(row)
    return range(tail.start, tail.end)


def live_extents(
    tx: ReadTransaction,
    inode: int,
    record: InodeRecord,
    start: int = 0,
    end: int = MAX_FILE_BYTES,
) -> list[Extent]:
    """Extents that touch the file bytes start <= x < end and count, in order."""
    return live_page(tx, inode, record, start, None, end)[0]


def live_page(
    tx: ReadTransaction,
    inode: int,
    record: InodeRecord,
    start: int,
    limit: int | None,
    end: int = MAX_FILE_BYTES,
) -> tuple[list[Extent], int | None]:
    """As `live_extents`, about `limit` of them, and where to go on (None at the end)."""
    found, position = files.read_page(tx, inode, start, limit, end)
    dead = dead_range(tx, inode, record)
    if dead:
        found = [extent for extent in found if extent.file_offset not in dead]
    return found, position


def is_in_the_way(
    tx: ReadTransaction, inode: int, record: InodeRecord, extents: Sequence[Extent]
) -> bool:
    """Whether bytes of a tail lie where these extents are to be published."""
    dead = dead_range(tx, inode, record)
    return any(extent.file_offset < dead.stop and extent.end > dead.start for extent in extents)


def cut(tx: Transaction, inode: int, record: InodeRecord, size: int) -> InodeRecord | None:
    """Take all file bytes from `size` on away; returns the record to be written.

    None, with nothing done, where an older tail is to be reclaimed first: bytes that count lie
    between it and the new end.
    """
    dead = dead_range(tx, inode, record)
    if files.count_extents(tx, inode, RECLAIM_BATCH_ROWS + 1, start=size) <= RECLAIM_BATCH_ROWS:
        files.cut(tx, inode, size)
        left = range(dead.start, min(dead.stop, size))
    elif dead and dead.stop < size:
        return None
    else:
        files.cut(tx, inode, size, end=size + 1)  # what lies across the new end
        left = range(min(dead.start, size) if dead else size, max(dead.stop, record.size))
    return replace(_put(tx, inode, record, left), size=size)


def _put(tx: Transaction, inode: int, record: InodeRecord, dead: range) -> InodeRecord:
    """Set the tail; returns the record with the flag as it must be."""
    if dead:
        tx.put(keys.tail(inode), TailRecord(dead.start, dead.stop).encode())
        return replace(record, flags=record.flags | InodeFlag.TAIL)
    if record.flags & InodeFlag.TAIL:
        tx.delete(keys.tail(inode))
    return replace(record, flags=record.flags & ~InodeFlag.TAIL)


def reclaim(tx: Transaction, inode: int, rows: int = RECLAIM_BATCH_ROWS) -> int | None:
    """Remove at most `rows` extents of a tail; where what is left begins, None for nothing."""
    row = tx.get(keys.tail(inode))
    if row is None:
        return None
    tail = TailRecord.decode(row)
    start = files.drop_between(tx, inode, tail.start, tail.end, rows)
    if start is None:
        tx.delete(keys.tail(inode))
        with suppress(StaleHandle):
            record = read_inode(tx, inode)
            write_inode(tx, inode, replace(record, flags=record.flags & ~InodeFlag.TAIL))
    else:
        tx.put(keys.tail(inode), TailRecord(start, tail.end).encode())
    return start


def forget(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """All extents of the inode are gone."""
    if record.flags & InodeFlag.TAIL:
        tx.delete(keys.tail(inode))


def unreclaimed(tx: ReadTransaction) -> list[int]:
    """Inodes that have a tail, at most a page of them."""
    page = next(scan_layer(tx, keys.TAIL), [])
    return [keys.parse_id(key) for key, _ in page]
