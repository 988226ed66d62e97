"""The file layer: what publishing costs and leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

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


def _bytes_of(kv: MemoryKV, length: int) -> list[tuple[int, int]]:
    """For each byte of the file where it lies: block and offset in it; (0, 0) in a hole."""
    content = [(0, 0)] * length
    for extent in kv.read(lambda tx: files.read_extents(tx, 2)):
        for i in range(extent.length):
            assert content[extent.file_offset + i] == (0, 0), "extents overlap"
            content[extent.file_offset + i] = (extent.block_id, extent.block_offset + i)
    return content


@pytest.mark.parametrize("factor", [1, 2, 32])
def test_any_sequence_of_publications(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents strewn over a file lie over what was there, whichever way that is looked up, and
    each block is used by exactly the bytes that are left of it."""
    monkeypatch.setattr(files, "SPARSE_FACTOR", factor)
    rng, kv, length = random.Random(factor), MemoryKV(), 600
    model = [(0, 0)] * length
    for block_id in range(1, 200):
        starts = sorted(rng.sample(range(length - 40), rng.choice((1, 2, 12))))
        new, used = [], 0
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            size = min(rng.randint(1, 40), stop - start)
            new.append(Extent(start, size, block_id, used))
            model[start : start + size] = [(block_id, used + i) for i in range(size)]
            used += size
        kv.transact(lambda tx, b=block_id, n=new: files.publish(tx, 2, {b: _record(b)}, n))
        assert _bytes_of(kv, length) == model
    kv.transact(lambda tx: files.cut(tx, 2, 0))  # raises where the accounts are wrong
    assert len(kv.read(lambda tx: list(blocks.dead_blocks(tx)))) == 199
    assert kv.read(lambda tx: blocks.owners(tx, 199)) == []


def test_a_few_extents_do_not_read_a_large_file() -> None:
    """Writing at both ends of a file of many extents reads little of it."""
    kv = MemoryKV()
    _publish(kv, range(1, 2001))
    rows = 0

    class Reading(_Counted):
        def scan(
            self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
        ) -> list[tuple[bytes, bytes]]:
            nonlocal rows
            found = super().scan(start, end, limit=limit, reverse=reverse)
            rows += len(found)
            return found

    new = [Extent(100, 10, 9000, 0), Extent(1999 * _BLOCK_BYTES, 10, 9000, 10)]
    kv.transact(lambda tx: files.publish(Reading(tx), 2, {9000: _record(9000)}, new))
    assert rows < 150
