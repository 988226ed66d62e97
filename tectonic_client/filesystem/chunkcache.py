"""Whole chunks in memory for sequential readers: demand loading, read-ahead, eviction.

A line is a verified chunk in pool memory. Lines are shared by all readers of a client. When the
cache's share of the pool is used up or a writer needs memory, lines that were read to their end go
first, then the least recently used. Read-ahead displaces only the former: several readers would
otherwise take each other's chunks away before they were read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from tectonic_client.activity import STORE, Waiting, detach
from tectonic_client.blocks.buffers import BufferPool
from tectonic_client.blocks.reader import BlockReader, VerifiedRange
from tectonic_client.errors import TectonicError
from tectonic_client.limits import CHUNK_CACHE_SHARE
from tectonic_client.records import BlockRecord


class Line:
    """A chunk that is in memory or on its way."""

    __slots__ = ("error", "finished", "loaded", "ready", "users")

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.loaded: VerifiedRange | None = None
        self.error: TectonicError | None = None
        self.users = 0
        self.finished = False

    def part(self, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the loaded chunk."""
        assert self.loaded is not None
        self.finished = self.finished or end == len(self.loaded.view)
        return self.loaded.view[start:end]


class ChunkCache:
    """Used from the event loop only. Holds `limit_bytes` (by default and at most its share of the
    pool) and at least one chunk."""

    def __init__(
        self, reader: BlockReader, pool: BufferPool, chunk_bytes: int, nursery: trio.Nursery,
        limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._nursery = nursery
        share_bytes = int(pool.capacity_bytes * CHUNK_CACHE_SHARE)
        size_bytes = share_bytes if limit_bytes is None else min(limit_bytes, share_bytes)
        self.capacity = max(1, size_bytes // chunk_bytes)
        """Chunks that it holds."""
        self._lines: OrderedDict[tuple[int, int], Line] = OrderedDict()
        self._closed = False
        self.hits = 0
        self.misses = 0
        self.prefetches = 0

    @property
    def chunks(self) -> int:
        """Chunks in memory or on their way."""
        return len(self._lines)

    def peek(self, block_id: int, index: int, start: int, end: int) -> memoryview | None:
        """Bytes [start, end) of a chunk if it is in memory; valid until the next await."""
        line = self._lines.get((block_id, index))
        if line is None or line.loaded is None:
            return None
        self._lines.move_to_end((block_id, index))
        self.hits += 1
        return line.part(start, end)

    def has(self, block_id: int, index: int) -> bool:
        """Whether the chunk is in memory or on its way."""
        return (block_id, index) in self._lines

    async def get(
        self, block_id: int, record: BlockRecord, index: int, start: int, end: int, context: str
    ) -> memoryview:
        """Bytes [start, end) of a chunk, loading all of it if need be; valid until the next await.

        Raises what the reader raises.
        """
        line = self._lines.get((block_id, index))
        if line is None:
            self.misses += 1
            self._make_room(self.evict_one)
            line = self._start(block_id, record, index, context)
        self._lines.move_to_end((block_id, index))
        line.users += 1
        try:
            with Waiting(STORE):
                await line.ready.wait()
        finally:
            line.users -= 1
        if line.error is not None:
            raise line.error
        return line.part(start, end)

    def prefetch(self, block_id: int, record: BlockRecord, index: int, context: str) -> None:
        """Begin to load a chunk if memory allows; never waits."""
        if (block_id, index) in self._lines:
            return
        self._make_room(self._evict_finished)
        free = self._pool.capacity_bytes - self._pool.used_bytes
        if len(self._lines) < self.capacity and free >= 2 * self._chunk_bytes:
            self.prefetches += 1
            self._start(block_id, record, index, context)

    def _start(self, block_id: int, record: BlockRecord, index: int, context: str) -> Line:
        line = self._lines[block_id, index] = Line()
        self._nursery.start_soon(self._load, (block_id, index), record, context, line)
        return line

    async def _load(
        self, key: tuple[int, int], record: BlockRecord, context: str, line: Line
    ) -> None:
        detach()
        block_id, index = key
        start = index * record.chunk_bytes
        length = min(record.chunk_bytes, record.length - start)
        try:
            line.loaded = await self._reader.read_chunk_range(
                block_id, record, index, 0, length, context=context
            )
            if self._closed:
                self.clear()
        except TectonicError as error:
            line.error = error
            self._lines.pop(key, None)
        finally:
            line.ready.set()

    def _make_room(self, evict: Callable[[], bool]) -> None:
        """Evict until a further line fits the cache's share."""
        while len(self._lines) >= self.capacity and evict():
            pass

    def evict_one(self) -> bool:
        """Give back the memory of one line; False if none can go."""
        return self._evict_finished() or self._evict(lambda line: True)

    def _evict_finished(self) -> bool:
        return self._evict(lambda line: line.finished)

    def _evict(self, wanted: Callable[[Line], bool]) -> bool:
        """Evict the least recently used line that is wanted out and that nobody waits for."""
        for key, line in self._lines.items():
            if line.loaded is not None and not line.users and wanted(line):
                del self._lines[key]
                line.loaded.release()
                return True
        return False

    def clear(self) -> None:
        """Give back the memory of all lines that nobody waits for."""
        while self.evict_one():
            pass

    def close(self) -> None:
        """Give back all memory; what is still loading follows when it has ended."""
        self._closed = True
        self.clear()
