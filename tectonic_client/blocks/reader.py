"""Reads blocks: every byte that leaves here was compared with its checksum.

A read fetches the checksum units that it touches into pool memory, verifies and, if need be,
decompresses them, and hands them on in the same worker thread. Chunk headers come along when a read
begins near the chunk's start; else they are read once and kept (bounded).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np
import trio

from tectonic_client.blocks.buffers import Buffer, BufferPool, header_page
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.encoding.checksum import first_bad_unit
from tectonic_client.encoding.chunk import ChunkHeader, padded
from tectonic_client.encoding.compression import decompress_range
from tectonic_client.errors import ChunkMissing, CorruptChunk
from tectonic_client.limits import (
    CHECKSUM_UNIT_BYTES,
    CHUNK_HEADER_BYTES,
    MAX_CACHED_CHUNK_HEADERS,
)
from tectonic_client.records import BlockRecord


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


@dataclass(frozen=True, slots=True)
class _Request:
    """Content bytes [start, end) of one chunk, and who asks (for messages)."""

    key: ChunkKey
    record: BlockRecord
    start: int
    end: int
    context: str

    @property
    def content_bytes(self) -> int:
        """Content of the whole chunk."""
        begin = self.key.chunk * self.record.chunk_bytes
        return min(self.record.chunk_bytes, self.record.length - begin)


class BlockReader:
    """Reads blocks of one volume. Used from the event loop only."""

    def __init__(self, volume_uuid: bytes, stores: StoreSet, pool: BufferPool) -> None:
        self._volume_uuid = volume_uuid
        self._stores = stores
        self._pool = pool
        self._headers: OrderedDict[ChunkKey, ChunkHeader] = OrderedDict()
        self._headers_lock = Lock()

    # --- what callers use ---------------------------------------------------------------------

    async def read_into(
        self, block_id: int, record: BlockRecord, offset: int, target: memoryview,
        *, context: str = "",
    ) -> None:  # fmt: skip
        """Fill `target` (any memory) with block bytes from `offset` on.

        Raises CorruptChunk, ChunkMissing, StoreUnavailable, naming block, chunk, store and
        `context`; `target` then holds no byte that failed its check.
        """
        with unwrapped_groups():
            async with trio.open_nursery() as nursery:
                for index, start, part in _by_chunk(offset, target, record.chunk_bytes):
                    nursery.start_soon(
                        self._copy_range, block_id, record, index, start, part, context
                    )

    async def _copy_range(
        self, block_id: int, record: BlockRecord, index: int, start: int, part: memoryview,
        context: str,
    ) -> None:  # fmt: skip
        await self.read_scatter(
            block_id, record, index, start, start + len(part),
            lambda view: copy_bytes(part, view), context=context,
        )  # fmt: skip

    async def read_scatter(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int,
        consume: Callable[[memoryview], None], *, context: str = "",
    ) -> None:  # fmt: skip
        """Call `consume` with the verified content bytes [start, end) of a chunk.

        It runs in the worker thread that verified them; the memory is only valid during the call.
        """
        loaded = await self._load(block_id, record, index, start, end, context, consume)
        loaded.release()

    async def read_chunk_range(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int,
        *, context: str = "",
    ) -> VerifiedRange:  # fmt: skip
        """The verified content bytes [start, end) of a chunk, in pool memory until released."""
        return await self._load(block_id, record, index, start, end, context, None)

    # --- one chunk ----------------------------------------------------------------------------

    async def _load(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int, context: str,
        consume: Callable[[memoryview], None] | None,
    ) -> VerifiedRange:  # fmt: skip
        request = _Request(ChunkKey(block_id, index), record, start, end, context)
        store = self._stores.get(record.places[index].store_id)
        stored_bytes = record.places[index].stored_bytes
        if stored_bytes != request.content_bytes:
            return await self._load_compressed(request, store, consume)
        first = start // CHECKSUM_UNIT_BYTES * CHECKSUM_UNIT_BYTES
        last = min(-(-end // CHECKSUM_UNIT_BYTES) * CHECKSUM_UNIT_BYTES, stored_bytes)
        buffer = await self._pool.acquire(padded(last - first))

        def work() -> memoryview:
            self._fetch(request, store, first, last, buffer.memory)
            view = buffer.memory[start - first : end - first]
            if consume is not None:
                consume(view)
            return view

        return VerifiedRange(buffer, await self._guard(buffer, work))

    async def _load_compressed(
        self, request: _Request, store: ChunkStore, consume: Callable[[memoryview], None] | None
    ) -> VerifiedRange:
        """Compressed chunks are read whole and decompressed into a second buffer."""
        stored_bytes = request.record.places[request.key.chunk].stored_bytes
        sizes = (padded(stored_bytes), padded(request.end - request.start))
        payload, content = await self._pool.acquire_all(sizes)

        def work() -> memoryview:
            self._fetch(request, store, 0, stored_bytes, payload.memory)
            view = content.memory[: request.end - request.start]
            stored = payload.memory[:stored_bytes]
            try:
                decompress_range(stored, request.content_bytes, request.start, view)
            except CorruptChunk as error:
                raise self._bad(request, store, str(error)) from error
            if consume is not None:
                consume(view)
            return view

        with payload:
            return VerifiedRange(content, await self._guard(content, work))

    async def _guard(self, buffer: Buffer, work: Callable[[], memoryview]) -> memoryview:
        try:
            return await self._stores.read(work)
        except BaseException:
            buffer.release()
            raise

    # --- in the worker thread -----------------------------------------------------------------

    def _fetch(
        self, request: _Request, store: ChunkStore, first: int, last: int, target: memoryview
    ) -> None:
        """Read payload bytes [first, last) into `target` and compare their checksums."""
        header = self._header(request, store)
        wanted = padded(last - first)
        got = store.get_into(request.key, CHUNK_HEADER_BYTES + first, target[:wanted])
        if got < last - first:
            raise self._bad(request, store, f"{got} of {last - first} bytes at {first} are there")
        unit = first // CHECKSUM_UNIT_BYTES
        end_unit = -(-last // CHECKSUM_UNIT_BYTES)
        expected = header.checksums[4 * unit : 4 * end_unit]
        bad = first_bad_unit(target[: last - first], expected)
        if bad is not None:
            self._forget(request.key)
            raise self._bad(request, store, f"checksum of unit {unit + bad} does not match")

    def _header(self, request: _Request, store: ChunkStore) -> ChunkHeader:
        with self._headers_lock:
            header = self._headers.get(request.key)
        if header is not None:
            return header
        page = header_page()
        try:
            if store.get_into(request.key, 0, page) < CHUNK_HEADER_BYTES:
                raise CorruptChunk("shorter than its header")
            header = ChunkHeader.decode(page)
            header.check(self._volume_uuid, request.key.block_id, request.key.chunk)
            self._compare(request, header)
        except (CorruptChunk, ChunkMissing) as error:
            kind = type(error)
            raise kind(self._describe(request, store, str(error))) from error
        with self._headers_lock:
            self._headers[request.key] = header
            while len(self._headers) > MAX_CACHED_CHUNK_HEADERS:
                self._headers.popitem(last=False)
        return header

    @staticmethod
    def _compare(request: _Request, header: ChunkHeader) -> None:
        """The header must say what the block's record says."""
        stored = request.record.places[request.key.chunk].stored_bytes
        if (header.payload_bytes, header.content_bytes) != (stored, request.content_bytes):
            raise CorruptChunk(
                f"its header announces {header.payload_bytes} bytes for {header.content_bytes},"
                f" the block's record {stored} for {request.content_bytes}"
            )

    def _forget(self, key: ChunkKey) -> None:
        with self._headers_lock:
            self._headers.pop(key, None)

    def _bad(self, request: _Request, store: ChunkStore, problem: str) -> CorruptChunk:
        return CorruptChunk(self._describe(request, store, problem))

    @staticmethod
    def _describe(request: _Request, store: ChunkStore, problem: str) -> str:
        where = f"block {request.key.block_id:016x} chunk {request.key.chunk} in {store.name}"
        prefix = f"{request.context}: " if request.context else ""
        return f"{prefix}{where}: {problem}"


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
