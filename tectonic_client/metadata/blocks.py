"""The block layer's records: what a block is, who uses it, and what is left of dead ones.

Each inode that uses a block has an owner record under it that counts the bytes in use. The block
dies with its last owner: its record is replaced by a dead-block record, whose chunks are deleted
from the stores before it goes too. Under serializable isolation two owners that leave at once
cannot both overlook that the other left. Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tectonic_client.errors import ChunkMissing, CorruptRecord
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.metadata import keys
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.records import BlockRecord, DeadBlockRecord, OwnerRecord


def read_block(tx: ReadTransaction, block_id: int) -> BlockRecord:
    """The block's record. Raises ChunkMissing when the block is gone."""
    data = tx.get(keys.block(block_id))
    if data is None:
        raise _missing(block_id)
    return BlockRecord.decode(data)


def read_blocks(tx: ReadTransaction, block_ids: Sequence[int]) -> list[BlockRecord | None]:
    """Records in the order of the ids; None where a block is gone."""
    rows = tx.get_many([keys.block(block_id) for block_id in block_ids])
    return [None if data is None else BlockRecord.decode(data) for data in rows]


def named_blocks(tx: ReadTransaction, block_ids: Sequence[int]) -> set[int]:
    """Those of the blocks that were published and whose chunks are not known to be gone."""
    records = tx.get_many([keys.block(block_id) for block_id in block_ids])
    dead = tx.get_many([keys.dead_block(block_id) for block_id in block_ids])
    rows = zip(block_ids, records, dead, strict=True)
    return {block_id for block_id, record, grave in rows if record is not None or grave is not None}


def write_block(tx: Transaction, block_id: int, record: BlockRecord) -> None:
    """Publish a sealed block. Its chunks must be durable already."""
    tx.put(keys.block(block_id), record.encode())


def own_new(tx: Transaction, block_id: int, inode: int, byte_count: int) -> None:
    """`inode` is the first to use a block, and uses this much; no round trip, unlike `acquire`."""
    tx.put(keys.block_owner(block_id, inode), OwnerRecord(byte_count).encode())


def acquire(tx: Transaction, inode: int, used: Mapping[int, int]) -> None:
    """`inode` uses so many bytes more of each of these blocks."""
    live = _live_bytes(tx, list(used), inode)
    for block_id, byte_count in used.items():
        owner = OwnerRecord(live[block_id] + byte_count)
        tx.put(keys.block_owner(block_id, inode), owner.encode())


def release(tx: Transaction, inode: int, released: Mapping[int, int]) -> None:
    """`inode` uses so many bytes less of each of these blocks; the end of a block's last owner
    kills it."""
    live = _live_bytes(tx, list(released), inode)
    left = []
    for block_id, byte_count in released.items():
        rest = live[block_id] - byte_count
        if rest < 0:
            raise CorruptRecord(f"block {block_id:016x}: inode {inode} releases more than it uses")
        if rest:
            tx.put(keys.block_owner(block_id, inode), OwnerRecord(rest).encode())
        else:
            tx.delete(keys.block_owner(block_id, inode))
            left.append(block_id)
    _kill(tx, [block for block in left if not tx.scan(*keys.block_owners(block), limit=1)])


def _live_bytes(tx: ReadTransaction, block_ids: Sequence[int], inode: int) -> dict[int, int]:
    rows = tx.get_many([keys.block_owner(block_id, inode) for block_id in block_ids])
    return {
        block_id: 0 if data is None else OwnerRecord.decode(data).live_bytes
        for block_id, data in zip(block_ids, rows, strict=True)
    }


def _kill(tx: Transaction, block_ids: Sequence[int]) -> None:
    for block_id, record in zip(block_ids, read_blocks(tx, block_ids), strict=True):
        if record is None:
            raise _missing(block_id)
        stores = tuple(place.store_id for place in record.places)
        tx.put(keys.dead_block(block_id), DeadBlockRecord(tx.now_ns(), stores).encode())
        tx.delete(keys.block(block_id))


def _missing(block_id: int) -> ChunkMissing:
    return ChunkMissing(f"block {block_id:016x} does not exist any more")


def owners(tx: ReadTransaction, block_id: int) -> list[int]:
    """Inodes that use the block."""
    start, end = keys.block_owners(block_id)
    return [keys.parse_block_owner(key) for key, _ in tx.scan(start, end)]


def dead_blocks(tx: ReadTransaction) -> Iterator[tuple[int, DeadBlockRecord]]:
    """The blocks whose chunks are still to be deleted, fetched page by page."""
    for page in scan_layer(tx, keys.DEAD_BLOCK):
        for key, value in page:
            yield keys.parse_id(key), DeadBlockRecord.decode(value)


def forget_dead_blocks(tx: Transaction, block_ids: Sequence[int]) -> None:
    """The chunks of these blocks are gone from their stores."""
    for block_id in block_ids:
        tx.delete(keys.dead_block(block_id))
