"""The one place that large memory comes from: aligned, pre-touched, bounded.

Memory comes in slabs of the largest size class, mapped when first needed, touched once, kept and
reused (the last one given back is the next one handed out), so that no request pays for page
faults. A slab is divided by halving (buddy allocation), so a small file does not hold a chunk's
worth. Waiting is first come, first served: a large request is not starved by small ones.

`acquire` and `try_acquire` belong to the event loop; `release` may be called by any thread.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

import trio

from tectonic_client.limits import CHUNK_HEADER_BYTES, MIN_BUFFER_BYTES

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: fault in all pages at once; Python's mmap module does not name it."""


class Buffer:
    """Memory on loan. A context manager; using `memory` after `release` is a bug."""

    __slots__ = ("_order", "_pool", "_position", "_slab", "memory", "size_bytes")

    def __init__(
        self, pool: BufferPool, slab: int, position: int, order: int, memory: memoryview
    ) -> None:
        self._pool: BufferPool | None = pool
        self._slab = slab
        self._position = position
        self._order = order
        self.memory = memory
        self.size_bytes = len(memory)

    def release(self) -> None:
        """Give the memory back. Raises RuntimeError the second time."""
        pool, self._pool = self._pool, None
        if pool is None:
            raise RuntimeError("buffer released twice")
        self.memory = memoryview(b"")
        pool._give_back(self._slab, self._position, self._order)

    def _undo(self) -> None:
        """Release with the pool's lock held."""
        assert self._pool is not None
        self._pool._put_back(self._slab, self._position, self._order)
        self._pool = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Waiter:
    """An acquire that waits for its turn."""

    __slots__ = ("buffers", "ready", "sizes", "token")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.ready = trio.Event()
        self.token = trio.lowlevel.current_trio_token()
        self.buffers: list[Buffer] | None = None


class BufferPool:
    """At most `capacity_bytes` of buffers of up to `largest_bytes` each (at least one slab)."""

    def __init__(self, capacity_bytes: int, largest_bytes: int) -> None:
        self._orders = max(0, (-(-largest_bytes // MIN_BUFFER_BYTES) - 1).bit_length())
        self._largest_bytes = largest_bytes
        self._slab_bytes = MIN_BUFFER_BYTES << self._orders
        self._max_slabs = max(1, capacity_bytes // self._slab_bytes)
        self._slabs: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        # Per order, the free pieces as (slab, position in units of MIN_BUFFER_BYTES).
        self._free: list[dict[tuple[int, int], None]] = [{} for _ in range(self._orders + 1)]
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self.on_pressure: Callable[[], None] | None = None
        self.capacity_bytes = self._max_slabs * self._slab_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def touched_bytes(self) -> int:
        """Memory mapped so far."""
        return len(self._slabs) * self._slab_bytes

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for memory."""
        return bool(self._waiters)

    # --- taking -------------------------------------------------------------------------------

    async def acquire(self, size_bytes: int) -> Buffer:
        """A buffer of exactly this size, waiting in line for it.

        Raises ValueError above the pool's largest size.
        """
        (buffer,) = await self.acquire_all((size_bytes,))
        return buffer

    async def acquire_all(self, sizes: Sequence[int]) -> list[Buffer]:
        """Several buffers at once: nobody waits for one while holding another."""
        for size_bytes in sizes:
            self._order_of(size_bytes)
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._lock:
            buffers = None if self._waiters else self._take_all(sizes)
            if buffers is None:
                waiter = _Waiter(sizes)
                self._waiters.append(waiter)
        if buffers is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return buffers
        if self.on_pressure is not None:
            self.on_pressure()
        return await self._wait(waiter)

    async def _wait(self, waiter: _Waiter) -> list[Buffer]:
        try:
            await waiter.ready.wait()
        except BaseException:
            with self._lock:
                if waiter.buffers is None:
                    self._waiters.remove(waiter)
            for buffer in waiter.buffers or ():
                buffer.release()
            self._serve_waiters()
            raise
        assert waiter.buffers is not None
        return waiter.buffers

    def try_acquire(self, size_bytes: int) -> Buffer | None:
        """A buffer if there is one free now and nobody waits, else None."""
        order = self._order_of(size_bytes)
        with self._lock:
            return None if self._waiters else self._take(order, size_bytes)

    def _order_of(self, size_bytes: int) -> int:
        if not 0 < size_bytes <= self._largest_bytes:
            raise ValueError(f"buffer of {size_bytes} bytes, at most {self._largest_bytes}")
        return max(0, (-(-size_bytes // MIN_BUFFER_BYTES) - 1).bit_length())

    def _take(self, order: int, size_bytes: int) -> Buffer | None:
        for larger in range(order, self._orders + 1):
            if self._free[larger]:
                break
        else:
            if len(self._slabs) == self._max_slabs:
                return None
            larger = self._orders
            self._map_slab()
        (slab, position), _ = self._free[larger].popitem()
        while larger > order:
            larger -= 1
            self._free[larger][slab, position + (1 << larger)] = None
        self.used_bytes += MIN_BUFFER_BYTES << order
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        start = position * MIN_BUFFER_BYTES
        return Buffer(self, slab, position, order, self._views[slab][start : start + size_bytes])

    def _take_all(self, sizes: Sequence[int]) -> list[Buffer] | None:
        taken: list[Buffer] = []
        for size_bytes in sizes:
            buffer = self._take(self._order_of(size_bytes), size_bytes)
            if buffer is None:
                for earlier in taken:
                    earlier._undo()
                return None
            taken.append(buffer)
        return taken

    def _map_slab(self) -> None:
        slab = mmap.mmap(-1, self._slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            slab.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            # An older kernel: one write per page does the same.
            slab[:: mmap.PAGESIZE] = bytes(self._slab_bytes // mmap.PAGESIZE)
        self._slabs.append(slab)
        self._views.append(memoryview(slab))
        self._free[self._orders][len(self._slabs) - 1, 0] = None

    # --- giving back --------------------------------------------------------------------------

    def _give_back(self, slab: int, position: int, order: int) -> None:
        with self._lock:
            self._put_back(slab, position, order)
        self._serve_waiters()

    def _put_back(self, slab: int, position: int, order: int) -> None:
        """Join the piece with its free buddies, as far as that goes."""
        self.used_bytes -= MIN_BUFFER_BYTES << order
        while order < self._orders:
            buddy = (slab, position ^ (1 << order))
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            position &= ~(1 << order)
            order += 1
        self._free[order][slab, position] = None

    def _serve_waiters(self) -> None:
        """Hand what is free to those who wait, in their order."""
        while True:
            with self._lock:
                if not self._waiters:
                    return
                first = self._waiters[0]
                first.buffers = self._take_all(first.sizes)
                if first.buffers is None:
                    return
                self._waiters.popleft()
            first.token.run_sync_soon(first.ready.set)

    def close(self) -> None:
        """Let go of everything. Raises RuntimeError while buffers are out."""
        if self.used_bytes:
            raise RuntimeError(f"{self.used_bytes} bytes of buffers were not given back")
        # Views that callers still hold keep their slab mapped.
        self._views.clear()
        self._slabs.clear()
        for free in self._free:
            free.clear()


_pages = threading.local()


def header_page() -> memoryview:
    """An aligned page of the calling thread's own, for the chunk header at hand."""
    page: memoryview | None = getattr(_pages, "page", None)
    if page is None:
        page = _pages.page = memoryview(mmap.mmap(-1, CHUNK_HEADER_BYTES))
    return page
