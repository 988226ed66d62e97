"""The file layer: extents of an inode, and what publishing, cutting and reclaiming them means.

Extents in the KV never overlap. A write adds extents over the old ones, which are trimmed, split or
removed in the same transaction; the blocks they used are released by the bytes they lost.
Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tectonic_client import extents as arithmetic
from tectonic_client.errors import CorruptRecord
from tectonic_client.extents import Extent, OverlayPlan
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_FILE_BYTES, SPARSE_FACTOR
from tectonic_client.metadata import blocks, keys
from tectonic_client.records import BlockRecord, ExtentRecord


def _decode(key: bytes, value: bytes) -> Extent:
    offset = keys.parse_extent(key)
    length, block_id, block_offset = ExtentRecord.fields(value)
    if not 0 < length <= MAX_FILE_BYTES - offset:
        raise CorruptRecord(f"an extent of {length} bytes is said to begin at file offset {offset}")
    return Extent(offset, length, block_id, block_offset)


def read_extents(
    tx: ReadTransaction, inode: int, start: int = 0, end: int = MAX_FILE_BYTES
) -> list[Extent]:
    """Extents that touch the file bytes start <= x < end, in order."""
    return read_page(tx, inode, start, None, end)[0]


def read_page(
    tx: ReadTransaction, inode: int, start: int, limit: int | None, end: int = MAX_FILE_BYTES
) -> tuple[list[Extent], int | None]:
    """As `read_extents`, at most `limit` and one more, and where to go on (None at the end)."""
    first, here = keys.extents(inode)[0], keys.extent(inode, start)
    before = tx.scan(first, here, limit=1, reverse=True) if start else []
    rows = tx.scan(here, keys.extent(inode, end), limit=limit)
    found = [_decode(*row) for row in (*before, *rows)]
    more = len(rows) == limit
    return [e for e in found if e.end > start], found[-1].file_offset + 1 if more else None


def publish(
    tx: Transaction,
    inode: int,
    new_blocks: Mapping[int, BlockRecord],
    new_extents: Sequence[Extent],
) -> None:
    """Lay `new_extents` (sorted, not overlapping) over the file; their new blocks become real.

    The chunks of `new_blocks` must be durable. Each of them must be used by some extent.
    """
    for block_id, record in new_blocks.items():
        blocks.write_block(tx, block_id, record)
    used: dict[int, int] = {}
    for extent in new_extents:
        used[extent.block_id] = used.get(extent.block_id, 0) + extent.length
    for block_id in new_blocks:
        blocks.own_new(tx, block_id, inode, used.pop(block_id))
    blocks.acquire(tx, inode, used)
    if new_extents:
        existing = _touched(tx, inode, new_extents)
        _apply(tx, inode, arithmetic.overlay(existing, new_extents))


def _touched(tx: ReadTransaction, inode: int, new: Sequence[Extent]) -> list[Extent]:
    """What the file has where these extents are to lie, and at most about as much besides.

    In two round trips, unless few are strewn over a file of many: then in two for each.
    """
    limit = SPARSE_FACTOR * (len(new) + 1)
    found, position = read_page(tx, inode, new[0].file_offset, limit, new[-1].end)
    if position is None:
        return found
    parts = [read_extents(tx, inode, extent.file_offset, extent.end) for extent in new]
    return list({extent.file_offset: extent for part in parts for extent in part}.values())


def cut(tx: Transaction, inode: int, size: int, end: int = MAX_FILE_BYTES) -> None:
    """Remove all file bytes from `size` on; of extents that begin at `end` or behind, none."""
    _apply(tx, inode, arithmetic.truncate(read_extents(tx, inode, size, end), size))


def _apply(tx: Transaction, inode: int, plan: OverlayPlan) -> None:
    for offset in plan.deleted_offsets:
        tx.delete(keys.extent(inode, offset))
    for extent in plan.written:
        record = ExtentRecord(extent.length, extent.block_id, extent.block_offset)
        tx.put(keys.extent(inode, extent.file_offset), record.encode())
    blocks.release(tx, inode, plan.released)


def count_extents(tx: ReadTransaction, inode: int, limit: int, start: int = 0) -> int:
    """How many extents a file has from `start` on; no more than `limit` are counted."""
    return len(tx.scan(keys.extent(inode, start), keys.extents(inode)[1], limit=limit))


def copy_extents(
    tx: Transaction, source: int, target: int, start: int, end: int, limit: int, dead: range
) -> int | None:
    """Let `target` use what `source` has in start <= x < end, of which it must have nothing yet.

    Those that begin at one of the offsets `dead` are left out (see `tails`). At most `limit`
    extents that begin there are copied; returns where to go on, None at the end.
    """
    rows = tx.scan(keys.extent(source, start), keys.extent(source, end), limit=limit)
    used: dict[int, int] = {}
    for row in rows:
        extent = _decode(*row)
        if extent.file_offset in dead:
            continue
        length = min(extent.length, end - extent.file_offset)
        record = ExtentRecord(length, extent.block_id, extent.block_offset)
        tx.put(keys.extent(target, extent.file_offset), record.encode())
        used[extent.block_id] = used.get(extent.block_id, 0) + length
    blocks.acquire(tx, target, used)
    return keys.parse_extent(rows[-1][0]) + 1 if len(rows) == limit else None


def drop_extents(tx: Transaction, inode: int, limit: int) -> bool:
    """Remove at most `limit` of an inode's extents; True once none is left."""
    return drop_between(tx, inode, 0, MAX_FILE_BYTES, limit) is None


def drop_between(tx: Transaction, inode: int, start: int, end: int, limit: int) -> int | None:
    """Remove at most `limit` of the extents that begin in start <= x < end.

    Returns the end of the last one removed if there may be more, else None.
    """
    rows = tx.scan(keys.extent(inode, start), keys.extent(inode, end), limit=limit)
    extents = [_decode(*row) for row in rows]
    released: dict[int, int] = {}
    for extent in extents:
        released[extent.block_id] = released.get(extent.block_id, 0) + extent.length
        tx.delete(keys.extent(inode, extent.file_offset))
    blocks.release(tx, inode, released)
    return extents[-1].end if len(rows) == limit else None
