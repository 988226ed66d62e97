"""The file layer: what publishing costs and leaves."""

from __future__ import annotations

from collections.abc import Sequence

from tectonic_client.extents import Extent
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import Transaction
from tectonic_client.metadata import blocks, files
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind

_BLOCK_BYTES = 4096


class _Counted:
    """A transaction that counts round trips of its reads."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.reads = 0
        self.put, self.delete, self.delete_range = tx.put, tx.delete, tx.delete_range
        self.now_ns = tx.now_ns

    def get(self, key: bytes) -> bytes | None:
        self.reads += 1
        return self._tx.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.reads += 1
        return self._tx.get_many(keys)

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        self.reads += 1
        return self._tx.scan(start, end, limit=limit, reverse=reverse)


def _record(block_id: int) -> BlockRecord:
    places = (ChunkPlace(0, _BLOCK_BYTES),)
    return BlockRecord(
        EncodingKind.SINGLE, 1, 0, Codec.NONE, _BLOCK_BYTES, _BLOCK_BYTES, block_id, places
    )


def _publish(kv: MemoryKV, block_ids: Sequence[int]) -> int:
    """Publish a file of these blocks; returns the round trips of its reads."""
    new_extents = [
        Extent(number * _BLOCK_BYTES, _BLOCK_BYTES, block_id, 0)
        for number, block_id in enumerate(block_ids)
    ]

    def publish(tx: Transaction) -> int:
        counted = _Counted(tx)
        files.publish(counted, 2, {i: _record(i) for i in block_ids}, new_extents)
        return counted.reads

    return kv.transact(publish)


def test_publishing_new_blocks_costs_no_round_trip_each() -> None:
    """A large file's transaction waits for a remote engine as often as a small one's."""
    assert _publish(MemoryKV(), range(1, 101)) == _publish(MemoryKV(), [1])


def test_blocks_die_with_the_bytes_that_used_them() -> None:
    """What `publish` says an inode uses is what overwriting takes away, to the byte."""
    kv = MemoryKV()
    _publish(kv, [1, 2])
    _publish(kv, [3, 4])
    assert sorted(i for i, _ in kv.read(lambda tx: list(blocks.dead_blocks(tx)))) == [1, 2]
    kv.transact(lambda tx: files.cut(tx, 2, 0))
    assert sorted(i for i, _ in kv.read(lambda tx: list(blocks.dead_blocks(tx)))) == [1, 2, 3, 4]
