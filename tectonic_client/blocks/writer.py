"""Writes blocks: one chunk at a time, checksummed in cache, durable when `put_chunk` returns.

A chunk's whole way (copy from the caller's memory, compression, checksums, header, put) is one
call in one worker thread, so that its bytes stay in that core's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from tectonic_client.blocks.buffers import Buffer, BufferPool, header_page
from tectonic_client.blocks.placement import rotation, store_for
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.encoding.checksum import checksums
from tectonic_client.encoding.chunk import ChunkHeader, padded
from tectonic_client.encoding.compression import compress, looks_compressible
from tectonic_client.errors import TectonicError
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
        self._pool = pool

    def open_block(self, block_id: int) -> OpenBlock:
        """Begin a block."""
        return OpenBlock(block_id)

    async def put_chunk(
        self, block: OpenBlock, index: int, buffer: Buffer, length: int,
        *, fill: Callable[[memoryview], None] | None = None,
    ) -> None:  # fmt: skip
        """Store the first `length` bytes of `buffer` (which stays the caller's) as chunk `index`.

        `fill` is called in the worker thread with that memory before anything else, to put the
        bytes there. Chunks may be put in any order, several at once. Raises NoSpace, ReadOnly,
        StoreUnavailable, Exists, and what `fill` raises.
        """
        assert 0 < length <= self.geometry.chunk_bytes
        store_id = store_for(self._turns, block.block_id, index)
        store = self._stores.get(store_id)
        scratch = self._scratch(length)
        key = ChunkKey(block.block_id, index)

        def work() -> int:
            content = buffer.memory[:length]
            if fill is not None:
                fill(content)
            return self._store(store, key, buffer.memory, length, scratch)

        try:
            stored = await self._stores.write(work)
        finally:
            if scratch is not None:
                scratch.release()
        block.places[index] = ChunkPlace(store_id, stored)

    def _scratch(self, length: int) -> Buffer | None:
        """Memory to compress into; without it the chunk is stored as it is.

        Never waited for: the caller holds a buffer, and waiting with one in hand can deadlock.
        """
        if self.geometry.codec is Codec.NONE:
            return None
        return self._pool.try_acquire(padded(length))

    def _store(
        self, store: ChunkStore, key: ChunkKey, memory: memoryview, length: int,
        scratch: Buffer | None,
    ) -> int:  # fmt: skip
        """In the worker thread: compress, checksum, put; returns the payload's length."""
        payload, stored, compressed = memory, length, False
        if scratch is not None:
            shorter = self._compress(memory[:length], scratch.memory)
            if shorter is not None:
                payload, stored, compressed = scratch.memory, shorter, True
        end = padded(stored)
        payload[stored:end] = bytes(end - stored)
        header = ChunkHeader(
            self._volume_uuid, key.block_id, key.chunk, length, stored, compressed,
            checksums(payload[:stored]),
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
        count = -(-length // self.geometry.chunk_bytes)
        assert sorted(block.places) == list(range(count)), "a chunk of the block is missing"
        return BlockRecord(
            encoding=EncodingKind.SINGLE, data_chunks=1, parity_chunks=0,
            codec=self.geometry.codec, chunk_bytes=self.geometry.chunk_bytes, length=length,
            created_ns=created_ns, places=tuple(block.places[index] for index in range(count)),
        )  # fmt: skip

    async def discard(self, block: OpenBlock) -> None:
        """Delete what was put of a block that will not be published.

        What cannot be deleted now is garbage under this session's lease: its end removes it.
        """
        for index, place in block.places.items():
            key = ChunkKey(block.block_id, index)
            store = self._stores.get(place.store_id)
            try:
                await self._stores.write(partial(store.delete, [key]))
            except TectonicError as error:
                _log.warning("unused chunk %s stays for now: %s", key, error)
        block.places.clear()
