"""Reads blocks: every byte that leaves here was compared with its checksum.

A read takes a slot of the store, pool memory for the checksum units that it touches, and a worker
thread, which fetches, verifies and, if need be, decompresses them (`blocks.fetch`) and hands them
on while they are in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import trio

from tectonic_client.blocks.buffers import Buffer, BufferPool
from tectonic_client.blocks.calls import Slot
from tectonic_client.blocks.fetch import ChunkFetcher, ChunkRange
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.encoding.chunk import padded
from tectonic_client.limits import CHECKSUM_UNIT_BYTES, MAX_RUN_BYTES
from tectonic_client.records import BlockRecord

Consumer = Callable[[memoryview], None]


class Part(NamedTuple):
    """Content bytes of a chunk from `start` on, and where they go (any memory)."""

    start: int
    target: memoryview

    @property
    def end(self) -> int:
        """Where they end in the chunk."""
        return self.start + len(self.target)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts in order, those together that are fetched at once."""
    runs: list[list[Part]] = []
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        near = runs and part.start - end <= CHECKSUM_UNIT_BYTES
        if near and part.end - runs[-1][0].start <= MAX_RUN_BYTES:
            runs[-1].append(part)
        else:
            runs.append([part])
        end = max(end, part.end) if near else part.end
    return runs


class VerifiedRange:
    """Checked content of a chunk in pool memory."""

    __slots__ = ("_buffer", "view")

    def __init__(self, buffer: Buffer, view: memoryview) -> None:
        self._buffer = buffer
        self.view = view

    def release(self) -> None:
        """Give the memory back."""
        self.view = memoryview(b"")
        self._buffer.release()


class BlockReader:
    """Reads blocks of one volume. Used from the event loop only.

    Every method raises CorruptChunk, ChunkMissing, StoreUnavailable, FormatTooNew, naming block,
    chunk, store and `context` (the file), and CorruptRecord where the range is not in the block.
    """

    def __init__(self, volume_uuid: bytes, stores: StoreSet, pool: BufferPool) -> None:
        self._stores = stores
        self._pool = pool
        self._fetcher = ChunkFetcher(volume_uuid)

    async def read_into(
        self, block_id: int, record: BlockRecord, offset: int, target: memoryview,
        *, context: str = "",
    ) -> None:  # fmt: skip
        """Fill `target` (any memory) with block bytes from `offset` on.

        When it raises, `target` holds no byte that failed its check.
        """

        async def copy(index: int, start: int, part: memoryview) -> None:
            await self.read_scatter(
                block_id, record, index, start, start + len(part),
                lambda view: copy_bytes(part, view), context=context,
            )  # fmt: skip

        with unwrapped_groups():
            async with trio.open_nursery() as nursery:
                for index, start, part in _by_chunk(offset, target, record.chunk_bytes):
                    nursery.start_soon(copy, index, start, part)

    async def read_scatter(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int,
        consume: Consumer, *, context: str = "",
    ) -> None:  # fmt: skip
        """Call `consume` with the verified content bytes [start, end) of a chunk.

        It runs in the worker thread that verified them; the memory is only valid during the call.
        """
        wanted = ChunkRange(ChunkKey(block_id, index), record, start, end, context)
        loaded = await self._load(wanted, consume)
        loaded.release()

    async def read_parts(
        self, block_id: int, record: BlockRecord, index: int, parts: Sequence[Part],
        *, context: str = "",
    ) -> None:  # fmt: skip
        """Fill the targets of many parts of a chunk, in one call of the store's thread.

        Parts that lie near each other are fetched together. When it raises, no target holds a byte
        that failed its check.
        """
        key = ChunkKey(block_id, index)
        runs = [
            (ChunkRange(key, record, run[0].start, max(part.end for part in run), context), run)
            for run in _runs(parts)
        ]
        for wanted, _ in runs:
            wanted.check()
        async with self._stores.reading(record.places[index].store_id) as slot:
            sizes = [self._fetcher.room([wanted for wanted, _ in runs])]
            if runs[0][0].compressed:
                sizes = [
                    max(self._fetcher.compressed_bytes(wanted) for wanted, _ in runs),
                    max(padded(wanted.end - wanted.start) for wanted, _ in runs),
                ]
            buffers = await self._pool.acquire_all(sizes)
            memory = [buffer.memory for buffer in buffers]

            def work(store: ChunkStore) -> None:
                for wanted, run in runs:
                    view = self._fetcher.fetch(wanted, store, memory)
                    for part in run:
                        start = part.start - wanted.start
                        copy_bytes(part.target, view[start : start + len(part.target)])

            try:
                await slot.call(work, tuple(buffers))
            finally:
                for buffer in buffers:
                    buffer.release()

    async def read_chunk_range(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int,
        *, context: str = "",
    ) -> VerifiedRange:  # fmt: skip
        """The verified content bytes [start, end) of a chunk, in pool memory until released."""
        wanted = ChunkRange(ChunkKey(block_id, index), record, start, end, context)
        return await self._load(wanted, _keep)

    async def _load(self, wanted: ChunkRange, consume: Consumer) -> VerifiedRange:
        wanted.check()
        store_id = wanted.record.places[wanted.key.chunk].store_id
        async with self._stores.reading(store_id) as slot:
            if wanted.compressed:
                return await self._load_compressed(wanted, slot, consume)
            return await self._load_plain(wanted, slot, consume)

    async def _load_plain(
        self, wanted: ChunkRange, slot: Slot, consume: Consumer
    ) -> VerifiedRange:  # fmt: skip
        buffer = await self._pool.acquire(self._fetcher.plain_bytes(wanted))

        def work(store: ChunkStore) -> memoryview:
            view = self._fetcher.fetch_plain(wanted, store, buffer.memory)
            consume(view)
            return view

        try:
            return VerifiedRange(buffer, await slot.call(work, (buffer,)))
        except BaseException:
            buffer.release()
            raise

    async def _load_compressed(
        self, wanted: ChunkRange, slot: Slot, consume: Consumer
    ) -> VerifiedRange:  # fmt: skip
        length = wanted.end - wanted.start
        sizes = (self._fetcher.compressed_bytes(wanted), padded(length))
        payload, content = await self._pool.acquire_all(sizes)

        def work(store: ChunkStore) -> memoryview:
            view = content.memory[:length]
            self._fetcher.fetch_compressed(wanted, store, payload.memory, view)
            consume(view)
            return view

        with payload:
            try:
                return VerifiedRange(content, await slot.call(work, (payload, content)))
            except BaseException:
                content.release()
                raise


def _keep(_: memoryview) -> None:
    """For ranges that stay in pool memory."""


def _by_chunk(
    offset: int, target: memoryview, chunk_bytes: int
) -> Iterator[tuple[int, int, memoryview]]:
    """(chunk, offset in it, part of the target) of a range of a block."""
    done = 0
    while done < len(target):
        index, start = divmod(offset + done, chunk_bytes)
        count = min(len(target) - done, chunk_bytes - start)
        yield index, start, target[done : done + count]
        done += count


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """memcpy; numpy releases the GIL for it, a slice assignment does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
