"""A block layer over stores in memory that can be watched, held up, made to fail and damaged."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import trio

from tectonic_client.blocks.buffers import BufferPool
from tectonic_client.blocks.reader import BlockReader, copy_bytes
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.blocks.writer import BlockWriter, Geometry, OpenBlock
from tectonic_client.chunkstore.memory import MemoryStore
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.encoding.chunk import padded
from tectonic_client.errors import TectonicError
from tectonic_client.limits import KiB
from tectonic_client.records import BlockRecord, Codec, StoreRecord, StoreState

UUID = b"volume of a test"
CHUNK_BYTES = 256 * KiB
CHUNKS_PER_BLOCK = 4
BLOCK = 0x5000
DEADLINE_S = 20


class WatchedStore(MemoryStore):
    """Notes calls; `failures[n]` is raised by the n-th put (from 0) before it stores anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.puts: list[ChunkKey] = []
        self.gets: list[tuple[ChunkKey, int, int]] = []
        self.failures: dict[int, TectonicError] = {}
        self.open = threading.Event()
        self.open.set()

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        number = len(self.puts)
        self.puts.append(key)
        assert self.open.wait(DEADLINE_S)
        if number in self.failures:
            raise self.failures[number]
        super().put(key, parts)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        self.gets.append((key, offset, len(target)))
        assert self.open.wait(DEADLINE_S)
        return super().get_into(key, offset, target)

    def keys(self) -> list[ChunkKey]:
        """What is stored."""
        return [info.key for info in self.list(0, 2**64)]

    def chunk(self, key: ChunkKey) -> bytearray:
        """A copy of a chunk as stored."""
        data = bytearray(self.head(key))
        super().get_into(key, 0, memoryview(data))
        return data

    def replace(self, key: ChunkKey, data: bytes | bytearray) -> None:
        """Damage a chunk."""
        self.delete([key])
        super().put(key, [memoryview(data)])


class Rig:
    """Pool, stores, writer and reader of one volume."""

    def __init__(
        self, codec: Codec = Codec.NONE, *, chunk_bytes: int = CHUNK_BYTES, stores: int = 1,
        buffers: int = 16, store_deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self.pool = BufferPool(buffers * chunk_bytes, chunk_bytes)
        self.watched = [WatchedStore(f"memory://store{number}") for number in range(stores)]
        self.debris: set[int] = set()
        self.stores = StoreSet(
            dict(enumerate(self.watched)), deadline_s=store_deadline_s, on_debris=self.debris.add
        )
        self.geometry = Geometry(CHUNKS_PER_BLOCK * chunk_bytes, chunk_bytes, codec, 1)
        records = [
            StoreRecord(number, StoreState.ACTIVE, 1, store.name, f"domain{number}")
            for number, store in enumerate(self.watched)
        ]
        self.writer = BlockWriter(UUID, self.geometry, self.stores, records, self.pool)
        self.reader = BlockReader(UUID, self.stores, self.pool)

    async def put(self, block: OpenBlock, index: int, content: bytes) -> None:
        """Put `content` as a chunk, in a buffer of just the size it needs."""
        with await self.pool.acquire(padded(len(content))) as buffer:
            await self.writer.put_chunk(
                block, index, buffer, len(content),
                fill=lambda memory: copy_bytes(memory, memoryview(content)),
            )  # fmt: skip

    async def write(
        self, content: bytes, block_id: int = BLOCK, order: Sequence[int] | None = None
    ) -> BlockRecord:
        """A sealed block of `content`; its chunks are put at once, begun in `order`."""
        block = self.writer.open_block(block_id)
        size = self.geometry.chunk_bytes
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        with unwrapped_groups():
            async with trio.open_nursery() as nursery:
                for index in order or range(len(pieces)):
                    nursery.start_soon(self.put, block, index, pieces[index])
        return self.writer.seal(block, len(content), created_ns=7)

    async def read(self, record: BlockRecord, start: int, end: int, block_id: int = BLOCK) -> bytes:
        """Bytes of a block, by way of memory that is not aligned."""
        memory = bytearray(end - start + 1)
        await self.reader.read_into(
            block_id, record, start, memoryview(memory)[1:], context="/some/file"
        )
        return bytes(memory[1:])


def run(test: Callable[[Rig], Awaitable[None]], rig: Rig) -> None:
    """Run an async test, with a deadline; every buffer must be back in the pool after it."""

    async def bounded() -> None:
        with trio.fail_after(DEADLINE_S):
            await test(rig)

    trio.run(bounded)
    assert rig.pool.used_bytes == 0


def text(length: int) -> bytes:
    """Bytes that compress to about half."""
    return np.random.default_rng(1).integers(97, 113, length, np.uint8).tobytes()


def noise(length: int) -> bytes:
    """Bytes that do not compress."""
    return np.random.default_rng(2).bytes(length)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    while not condition():
        await trio.lowlevel.checkpoint()
