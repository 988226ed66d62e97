"""The one place that large memory comes from: aligned, pre-touched, bounded.

The pool reserves its address space at once, in one mapping, and touches it slab by slab (a slab
has the size of the largest class) when it is first needed. What was touched is kept and reused, the
last piece given back first, so that no request pays for page faults and a small client stays small.
A slab is divided by halving (buddy allocation), so a small file does not hold a chunk's worth.
Waiting is first come, first served: a large request is not starved by small ones.

The mapping asks for huge pages: the kernel then pins 4 pages instead of 2048 for a chunk of 8 MiB,
which made O_DIRECT 1.5 to 2.5 times as fast for a tenth of the CPU time. It is not copied to
children of a fork: a child must not use it, and copy-on-write under a running O_DIRECT read could
hand the read's bytes to the wrong process (open(2), NOTES).

`acquire` and `try_acquire` belong to the event loop; the rest may be called by any thread. A buffer
that a thread uses is lent to it: releasing it then takes effect when the thread is done.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

import trio

from tectonic_client.activity import MEMORY, Waiting
from tectonic_client.errors import BadOption
from tectonic_client.limits import CHUNK_HEADER_BYTES, MIN_BUFFER_BYTES
from tectonic_client.metrics import Meter

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: fault in all pages at once; Python's mmap module does not name it."""


class Buffer:
    """Memory on loan. A context manager; using `memory` after `release` is a bug."""

    __slots__ = ("_holders", "_order", "_owned", "_pool", "_position", "memory", "size_bytes")

    def __init__(self, pool: BufferPool, position: int, order: int, memory: memoryview) -> None:
        self._pool = pool
        self._position = position
        self._order = order
        self._owned = True
        self._holders = 1
        self.memory = memory
        """Writable bytes, aligned to ALIGNMENT_BYTES, exactly as many as were asked for."""
        self.size_bytes = len(memory)

    @property
    def lent(self) -> bool:
        """Whether somebody beside the owner uses the memory."""
        return self._holders > self._owned

    def release(self) -> None:
        """Give the memory back, as soon as nobody uses it. Raises RuntimeError the second time."""
        if not self._owned:
            raise RuntimeError("buffer released twice")
        self._owned = False
        self.memory = memoryview(b"")
        self._let_go()

    def lend(self) -> None:
        """Somebody else uses the memory, too: until `take_back` the pool does not reuse it."""
        with self._pool._lock:
            self._holders += 1

    def take_back(self) -> None:
        """The other end of `lend`."""
        self._let_go()

    def _let_go(self) -> None:
        with self._pool._lock:
            self._holders -= 1
            unused = not self._holders
        if unused:
            self._pool._give_back(self._position, self._order)

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
    """At most `capacity_bytes` of buffers of up to `largest_bytes` each.

    The capacity is rounded down to whole slabs. Raises ValueError where it holds none, BadOption
    where the system does not grant that much address space.
    """

    def __init__(self, capacity_bytes: int, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._orders = _order_of(largest_bytes)
        self._slab_bytes = MIN_BUFFER_BYTES << self._orders
        self.capacity_bytes = capacity_bytes // self._slab_bytes * self._slab_bytes
        """Most that can be handed out at once."""
        if not self.capacity_bytes:
            raise ValueError(f"{capacity_bytes} bytes hold no slab of {self._slab_bytes} bytes")
        self._mapping = _reserve(self.capacity_bytes)
        self._memory = memoryview(self._mapping)
        # Per order, the positions of free pieces, in units of MIN_BUFFER_BYTES.
        self._free: list[dict[int, None]] = [{} for _ in range(self._orders + 1)]
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.on_pressure: Callable[[], None] | None = None
        """Called on the event loop whenever an acquire has to wait."""
        self.touched_bytes = 0
        """Memory taken from the system so far."""
        self.used_bytes = 0
        """Memory handed out, each buffer rounded up to its class."""
        self.peak_bytes = 0
        """The largest that `used_bytes` ever was."""
        self.waits = Meter()
        """Of acquires that had to wait."""

    @property
    def waiting(self) -> int:
        """How many wait for memory."""
        return len(self._waiters)

    # --- taking -------------------------------------------------------------------------------

    async def acquire(self, size_bytes: int) -> Buffer:
        """A buffer of exactly this size, waiting in line for it.

        Raises ValueError above the pool's largest size.
        """
        (buffer,) = await self.acquire_all((size_bytes,))
        return buffer

    async def acquire_all(self, sizes: Sequence[int]) -> list[Buffer]:
        """Several buffers at once: nobody waits for one while holding another.

        Raises ValueError where one is too large, or the pool could never hold all of them.
        """
        self._check(sizes)
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
        with Waiting(MEMORY, self.waits):
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
            # Those behind may need less than this one did.
            self._serve_waiters()
            raise
        assert waiter.buffers is not None
        return waiter.buffers

    def try_acquire(self, size_bytes: int) -> Buffer | None:
        """A buffer if there is one free now and nobody waits, else None.

        Raises ValueError above the pool's largest size.
        """
        self._check((size_bytes,))
        with self._lock:
            buffers = None if self._waiters else self._take_all((size_bytes,))
        return buffers[0] if buffers else None

    def _check(self, sizes: Sequence[int]) -> None:
        if self._closed:
            raise RuntimeError("the buffer pool is closed")
        for size_bytes in sizes:
            if not 0 < size_bytes <= self._largest_bytes:
                raise ValueError(f"buffer of {size_bytes} bytes, at most {self._largest_bytes}")
        total = sum(MIN_BUFFER_BYTES << _order_of(size_bytes) for size_bytes in sizes)
        if total > self.capacity_bytes:
            raise ValueError(f"buffers of {total} bytes, the pool has {self.capacity_bytes}")

    def _take_all(self, sizes: Sequence[int]) -> list[Buffer] | None:
        taken: list[tuple[int, int]] = []
        for size_bytes in sizes:
            order = _order_of(size_bytes)
            position = self._take(order)
            if position is None:
                for earlier in taken:
                    self._put_back(*earlier)
                return None
            taken.append((position, order))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return [
            Buffer(self, position, order, self._view(position, size_bytes))
            for (position, order), size_bytes in zip(taken, sizes, strict=True)
        ]

    def _view(self, position: int, size_bytes: int) -> memoryview:
        start = position * MIN_BUFFER_BYTES
        return self._memory[start : start + size_bytes]

    def _take(self, order: int) -> int | None:
        """Position of a piece of this order: the smallest that is free, halved as needed."""
        for larger in range(order, self._orders + 1):
            if self._free[larger]:
                break
        else:
            if self.touched_bytes == self.capacity_bytes:
                return None
            larger = self._orders
            self._touch_slab()
        position, _ = self._free[larger].popitem()
        while larger > order:
            larger -= 1
            self._free[larger][position + (1 << larger)] = None
        self.used_bytes += MIN_BUFFER_BYTES << order
        return position

    def _touch_slab(self) -> None:
        start, end = self.touched_bytes, self.touched_bytes + self._slab_bytes
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE, start, self._slab_bytes)
        except OSError:
            # An older kernel: one write per page does the same.
            self._mapping[start : end : mmap.PAGESIZE] = bytes(self._slab_bytes // mmap.PAGESIZE)
        self.touched_bytes = end
        self._free[self._orders][start // MIN_BUFFER_BYTES] = None

    # --- giving back --------------------------------------------------------------------------

    def _give_back(self, position: int, order: int) -> None:
        with self._lock:
            self._put_back(position, order)
        self._serve_waiters()

    def _put_back(self, position: int, order: int) -> None:
        """Join the piece with its free buddies, as far as that goes."""
        self.used_bytes -= MIN_BUFFER_BYTES << order
        while order < self._orders:
            buddy = position ^ (1 << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            position &= ~(1 << order)
            order += 1
        self._free[order][position] = None

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
            with suppress(trio.RunFinishedError):  # cancelled meanwhile: it gave them back itself
                first.token.run_sync_soon(first.ready.set)

    def close(self) -> None:
        """Let go of everything. Raises RuntimeError while buffers are out."""
        if self.used_bytes:
            raise RuntimeError(f"{self.used_bytes} bytes of buffers were not given back")
        self._closed = True
        self._memory.release()
        with suppress(BufferError):  # a view that somebody kept holds the mapping until it goes
            self._mapping.close()


def _order_of(size_bytes: int) -> int:
    """The smallest order whose pieces, MIN_BUFFER_BYTES << order, hold this much."""
    return (max(-(-size_bytes // MIN_BUFFER_BYTES), 1) - 1).bit_length()


def _reserve(size_bytes: int) -> mmap.mmap:
    """Address space of which nothing is touched yet."""
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BadOption(
            f"cannot reserve {size_bytes} bytes of memory ({error.strerror}):"
            " lower the memory limit"
        ) from error
    mapping.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


_pages = threading.local()


def header_page() -> memoryview:
    """An aligned page of the calling thread's own, for the chunk header at hand."""
    page: memoryview | None = getattr(_pages, "page", None)
    if page is None:
        # Shared memory (mmap's default) is never copied on write: see above about forks.
        page = _pages.page = memoryview(mmap.mmap(-1, CHUNK_HEADER_BYTES))
    return page
