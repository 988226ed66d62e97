"""Writes blocks: one chunk at a time, checksummed in cache, durable when `put_chunk` returns.

A chunk's whole way (copy from the caller's memory, compression, checksums, header, put) is one
call in one worker thread, so that its bytes stay in that core's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from tectonic_client.blocks.buffers import Buffer, BufferPool, header_page
from tectonic_client.blocks.placement import rotation, store_for
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.encoding.checksum import checksums
from tectonic_client.encoding.chunk import ChunkHeader, padded
from tectonic_client.encoding.compression import compress, looks_compressible
from tectonic_client.errors import TectonicError
from tectonic_client.limits import ALIGNMENT_BYTES
from tectonic_client.records import (
    BlockRecord,
    ChunkPlace,
    Codec,
    EncodingKind,
    StoreRecord,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a volume cuts and compresses blocks; sizes in bytes."""

    block_bytes: int
    chunk_bytes: int
    codec: Codec
    level: int


@dataclass(slots=True)
class OpenBlock:
    """A block that is being written; its chunks are named by no metadata yet."""

    block_id: int
    places: dict[int, ChunkPlace] = field(default_factory=dict)
    content_bytes: dict[int, int] = field(default_factory=dict)


class BlockWriter:
    """Writes blocks of one volume. Used from the event loop only."""

    def __init__(
        self, volume_uuid: bytes, geometry: Geometry, stores: StoreSet,
        records: Iterable[StoreRecord], pool: BufferPool,
    ) -> None:  # fmt: skip
        self._volume_uuid = volume_uuid
        self.geometry = geometry
        self._stores = stores
        self._turns = rotation(records)
        self._scratch = _ScratchMemory(pool)

    def open_block(self, block_id: int) -> OpenBlock:
        """Begin a block."""
        return OpenBlock(block_id)

    async def put_chunk(
        self, block: OpenBlock, index: int, buffer: Buffer, length: int,
        *, fill: Callable[[memoryview], None] | None = None,
    ) -> None:  # fmt: skip
        """Store the first `length` bytes of `buffer` (which stays the caller's) as chunk `index`.

        The buffer's size is a multiple of ALIGNMENT_BYTES; what lies behind `length` may be
        overwritten. `fill` is called in the worker thread with the first `length` bytes before
        anything else, to put them there. Chunks may be put in any order, several at once. Raises
        NoSpace, ReadOnly, StoreUnavailable, Exists, and what `fill` raises.
        """
        assert 0 < length <= min(self.geometry.chunk_bytes, buffer.size_bytes)
        assert index not in block.places
        store_id = store_for(self._turns, block.block_id, index)
        key = ChunkKey(block.block_id, index)
        with self._scratch.put_under_way():
            async with self._stores.writing(store_id) as slot:
                scratch = await self._take_scratch(length)
                lent = (buffer,) if scratch is None else (buffer, scratch)

                def work(store: ChunkStore) -> int:
                    if fill is not None:
                        fill(buffer.memory[:length])
                    return self._store(store, key, buffer.memory, length, scratch)

                try:
                    stored = await slot.call(work, lent)
                finally:
                    if scratch is not None:
                        self._scratch.give(scratch)
        block.places[index] = ChunkPlace(store_id, stored)
        block.content_bytes[index] = length

    async def _take_scratch(self, length: int) -> Buffer | None:
        """Memory to compress into; without it the chunk is stored as it is."""
        # A chunk of one page cannot get any smaller.
        if self.geometry.codec is Codec.NONE or length <= ALIGNMENT_BYTES:
            return None
        return await self._scratch.take(padded(length))

    def _store(
        self, store: ChunkStore, key: ChunkKey, memory: memoryview, length: int,
        scratch: Buffer | None,
    ) -> int:  # fmt: skip
        """In the worker thread: compress, checksum, put; returns the payload's length."""
        payload, stored = memory, length
        if scratch is not None:
            shorter = self._compress(memory[:length], scratch.memory)
            if shorter is not None:
                payload, stored = scratch.memory, shorter
        end = padded(stored)
        payload[stored:end] = bytes(end - stored)
        header = ChunkHeader(
            self._volume_uuid, key.block_id, key.chunk, content_bytes=length,
            payload_bytes=stored, compressed=stored < length,
            checksums=checksums(payload[:stored]),
        )  # fmt: skip
        page = header_page()
        header.encode_into(page)
        store.put(key, [page, payload[:end]])
        return stored

    def _compress(self, content: memoryview, target: memoryview) -> int | None:
        if self.geometry.codec is Codec.AUTO and not looks_compressible(content):
            return None
        return compress(content, target, self.geometry.level)

    def seal(self, block: OpenBlock, length: int, created_ns: int) -> BlockRecord:
        """The record of a finished block of `length` bytes, all of whose chunks were put."""
        chunk_bytes = self.geometry.chunk_bytes
        starts = range(0, length, chunk_bytes)
        pieces = {i: min(chunk_bytes, length - start) for i, start in enumerate(starts)}
        assert block.content_bytes == pieces, "the chunks are not those of a block of this length"
        return BlockRecord(
            encoding=EncodingKind.SINGLE, data_chunks=1, parity_chunks=0,
            codec=self.geometry.codec, chunk_bytes=chunk_bytes, length=length,
            created_ns=created_ns, places=tuple(block.places[index] for index in pieces),
        )  # fmt: skip

    async def discard(self, block: OpenBlock) -> None:
        """Delete what was put of a block that will not be published.

        What cannot be deleted now is garbage under this session's lease: its end removes it.
        """
        doomed: dict[int, list[ChunkKey]] = {}
        for index, place in block.places.items():
            doomed.setdefault(place.store_id, []).append(ChunkKey(block.block_id, index))
        for store_id, chunks in doomed.items():
            try:
                await self._stores.run(store_id, partial(_delete, chunks))
            except TectonicError as error:
                _log.warning("unused block %016x stays for now: %s", block.block_id, error)
        block.places.clear()
        block.content_bytes.clear()


def _delete(chunks: list[ChunkKey], store: ChunkStore) -> None:
    store.delete(chunks)


class _ScratchMemory:
    """Buffers to compress into, passed on from put to put while any is under way.

    A put holds a buffer already, so it must not wait for others who may do the same. It may wait
    for another put's scratch, which comes back without further memory; where there is none at all
    it goes without. So a busy writer, whose pool is always used up, goes on compressing.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._spare: list[Buffer] = []
        self._in_use = 0
        self._puts = 0
        self._given = trio.lowlevel.ParkingLot()

    @contextmanager
    def put_under_way(self) -> Iterator[None]:
        """Around a put, from before it waits for its slot: spares are kept for it."""
        self._puts += 1
        try:
            yield
        finally:
            self._puts -= 1
            while len(self._spare) > self._puts:
                self._spare.pop().release()

    async def take(self, size_bytes: int) -> Buffer | None:
        """At least `size_bytes`, or None where no put has any and there is no memory."""
        while True:
            buffer = self._spare_of(size_bytes) or self._pool.try_acquire(size_bytes)
            if buffer is not None:
                self._in_use += 1
                return buffer
            if not self._in_use:
                return None
            await self._given.park()

    def _spare_of(self, size_bytes: int) -> Buffer | None:
        while self._spare:
            buffer = self._spare.pop()
            if buffer.size_bytes >= size_bytes:
                return buffer
            buffer.release()
        return None

    def give(self, buffer: Buffer) -> None:
        """Done with a buffer."""
        self._in_use -= 1
        if buffer.lent:  # to a thread that does not come back
            buffer.release()
        else:
            self._spare.append(buffer)
        self._given.unpark_all()
