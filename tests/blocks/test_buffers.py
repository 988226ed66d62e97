"""The buffer pool: its allocator against a model, its queue, its threads, its memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from array import array
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tectonic_client.blocks import buffers
from tectonic_client.blocks.buffers import Buffer, BufferPool
from tectonic_client.errors import BadOption
from tectonic_client.limits import ALIGNMENT_BYTES, MIN_BUFFER_BYTES, KiB, MiB

LARGEST_BYTES = 512 * KiB
SLABS = 3
CAPACITY_BYTES = SLABS * LARGEST_BYTES
DEADLINE_S = 20


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def make_pool(slabs: int = SLABS) -> BufferPool:
    return BufferPool(slabs * LARGEST_BYTES, LARGEST_BYTES)


def take(pool: BufferPool, size_bytes: int) -> Buffer:
    buffer = pool.try_acquire(size_bytes)
    assert buffer is not None
    return buffer


def take_everything(pool: BufferPool) -> list[Buffer]:
    return [take(pool, LARGEST_BYTES) for _ in range(pool.capacity_bytes // LARGEST_BYTES)]


# --- the allocator ----------------------------------------------------------------------------


class _Model:
    """Which units are taken; a piece is free if an aligned run of its class is."""

    def __init__(self, units: int) -> None:
        self._taken = [False] * units

    def fits(self, units: int) -> bool:
        starts = range(0, len(self._taken), units)
        return any(not any(self._taken[start : start + units]) for start in starts)

    def mark(self, first: int, units: int, *, taken: bool) -> None:
        for unit in range(first, first + units):
            assert self._taken[unit] is not taken, "pieces overlap"
            self._taken[unit] = taken


def _units(size_bytes: int) -> int:
    units = 1
    while units * MIN_BUFFER_BYTES < size_bytes:
        units *= 2
    return units


@given(
    st.lists(
        st.one_of(
            st.integers(min_value=1, max_value=LARGEST_BYTES),
            st.builds(lambda index: -index, st.integers(min_value=0, max_value=100)),
        ),
        max_size=80,
    )
)
def test_allocator_against_model(steps: list[int]) -> None:
    """A buffer is given exactly if an aligned run is free; none overlap; all join at the end."""
    pool = make_pool()
    model = _Model(CAPACITY_BYTES // MIN_BUFFER_BYTES)
    held: list[tuple[Buffer, int, int]] = []
    first_buffer = take(pool, LARGEST_BYTES)
    base = address(first_buffer.memory)
    first_buffer.release()

    def give_back(index: int) -> None:
        buffer, first, units = held.pop(index)
        buffer.release()
        model.mark(first, units, taken=False)

    for step in steps:
        if step > 0:
            fits = model.fits(_units(step))
            buffer = pool.try_acquire(step)
            assert (buffer is not None) == fits
            if buffer is not None:
                assert buffer.size_bytes == len(buffer.memory) == step
                first, rest = divmod(address(buffer.memory) - base, MIN_BUFFER_BYTES)
                assert rest == 0
                model.mark(first, _units(step), taken=True)
                held.append((buffer, first, _units(step)))
        elif held:
            give_back(-step % len(held))
        assert pool.used_bytes == sum(units for _, _, units in held) * MIN_BUFFER_BYTES
        assert pool.used_bytes <= pool.peak_bytes <= pool.touched_bytes <= CAPACITY_BYTES
    while held:
        give_back(0)
    for buffer in take_everything(pool):
        buffer.release()
    pool.close()


@pytest.mark.parametrize("size_bytes", [1, 4097, MIN_BUFFER_BYTES, LARGEST_BYTES - 1])
def test_memory_is_exact_aligned_and_writable(size_bytes: int) -> None:
    """A buffer has the length asked for, begins at a page, and keeps what is written to it."""
    with take(make_pool(), size_bytes) as buffer:
        assert len(buffer.memory) == buffer.size_bytes == size_bytes
        assert buffer.memory.format == "B"
        assert not buffer.memory.readonly
        assert address(buffer.memory) % ALIGNMENT_BYTES == 0
        buffer.memory[:] = b"\xa5" * size_bytes
        assert bytes(buffer.memory) == b"\xa5" * size_bytes


def test_any_largest_size() -> None:
    """The largest size need not be a power of two; its class counts against the capacity."""
    pool = BufferPool(5 * MiB, 3 * 256 * KiB)
    assert pool.capacity_bytes == 5 * MiB
    with take(pool, 3 * 256 * KiB) as buffer:
        assert len(buffer.memory) == 3 * 256 * KiB
        assert pool.used_bytes == MiB


def test_capacity_is_never_exceeded() -> None:
    """A capacity between multiples of the slab is rounded down, one below a slab refused."""
    assert BufferPool(2 * LARGEST_BYTES - 1, LARGEST_BYTES).capacity_bytes == LARGEST_BYTES
    with pytest.raises(ValueError, match="hold no slab"):
        BufferPool(LARGEST_BYTES - 1, LARGEST_BYTES)


def test_memory_that_cannot_be_reserved() -> None:
    """More memory than the system can grant is one clear error when the pool is made."""
    with pytest.raises(BadOption, match="lower the memory limit"):
        BufferPool(1 << 60, LARGEST_BYTES)


def test_impossible_sizes() -> None:
    """What could never be given is refused at once instead of waiting forever."""

    async def main() -> None:
        pool = make_pool(slabs=1)
        for size_bytes in (0, -1, LARGEST_BYTES + 1):
            with pytest.raises(ValueError, match="at most"):
                await pool.acquire(size_bytes)
            with pytest.raises(ValueError, match="at most"):
                pool.try_acquire(size_bytes)
        with pytest.raises(ValueError, match="the pool has"):
            await pool.acquire_all((LARGEST_BYTES, 1))

    trio.run(main)


def test_double_release() -> None:
    """Giving a buffer back twice is reported and does not free it twice."""
    pool = make_pool()
    buffer = take(pool, 1)
    buffer.release()
    with pytest.raises(RuntimeError, match="twice"):
        buffer.release()
    assert pool.used_bytes == 0
    assert len(buffer.memory) == 0


def test_close() -> None:
    """The pool refuses to close over a buffer that is out, and to give any once closed."""
    pool = make_pool()
    buffer = take(pool, 1)
    with pytest.raises(RuntimeError, match="not given back"):
        pool.close()
    buffer.release()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.try_acquire(1)


# --- memory -----------------------------------------------------------------------------------


def _mapping_flags(view: memoryview) -> set[str]:
    """What the kernel says about the mapping that holds `view` (proc_pid_smaps(5))."""
    wanted, inside = address(view), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            inside = start <= wanted < end
        elif inside and fields[0] == "VmFlags:":
            return set(fields[1:])
    raise AssertionError("no such mapping")


def _resident_bytes(start: int, size: int) -> int:
    """How much of a range of addresses has memory (proc_pid_pagemap(5)).

    The mapping's own figure would not do: the kernel joins neighbours into one.
    """
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        entries = array("Q", pagemap.read(size // mmap.PAGESIZE * 8))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


@pytest.mark.parametrize("kernel", ["current", "older"])
def test_slabs_are_touched_when_first_needed(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A slab is resident as soon as it is used, and no other is, also without MADV_POPULATE."""
    if kernel == "older":
        monkeypatch.setattr(buffers, "_MADV_POPULATE_WRITE", 9999)
    slab_bytes = 4 * MiB
    pool = BufferPool(8 * slab_bytes, slab_bytes)
    assert pool.touched_bytes == 0
    with take(pool, slab_bytes) as buffer:
        assert pool.touched_bytes == slab_bytes
        slab = address(buffer.memory)
        assert _resident_bytes(slab, slab_bytes) == slab_bytes
        # A huge page may reach over the slab's end.
        assert _resident_bytes(slab + slab_bytes, slab_bytes) < 2 * MiB


def test_a_small_client_stays_small() -> None:
    """What was given back last is given out next; no new slab while a touched one has room."""
    pool = make_pool()
    with take(pool, LARGEST_BYTES) as first, take(pool, LARGEST_BYTES) as second:
        addresses = [address(first.memory), address(second.memory)]
    for _ in range(10):
        with take(pool, LARGEST_BYTES) as buffer:
            assert address(buffer.memory) == addresses[0]
        with take(pool, MIN_BUFFER_BYTES), take(pool, LARGEST_BYTES // 2):
            pass
    assert pool.touched_bytes == 2 * LARGEST_BYTES
    assert pool.peak_bytes == 2 * LARGEST_BYTES


def test_a_fork_does_not_copy_the_pool() -> None:
    """Children do not get the memory: no copy-on-write under O_DIRECT reads (VmFlags: dc)."""
    with take(make_pool(), 1) as buffer:
        assert "dc" in _mapping_flags(buffer.memory)


# --- waiting ----------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    """A large request that waits is not overtaken by small ones, which would fit."""

    async def main() -> None:
        pool = make_pool()
        *kept, part = take_everything(pool)
        part.release()
        small = take(pool, MIN_BUFFER_BYTES)
        order: list[str] = []

        async def want(name: str, size_bytes: int) -> None:
            buffer = await pool.acquire(size_bytes)
            order.append(name)
            buffer.release()

        async with trio.open_nursery() as nursery:
            for name, size_bytes in (
                ("first", LARGEST_BYTES),
                ("small", 1),
                ("last", LARGEST_BYTES),
            ):
                nursery.start_soon(want, name, size_bytes)
                await wait_all_tasks_blocked()
            assert pool.waiting
            assert pool.try_acquire(1) is None, "overtook those who wait"
            assert order == []
            small.release()
        assert order == ["first", "small", "last"]
        assert not pool.waiting
        for buffer in kept:
            buffer.release()
        pool.close()

    trio.run(main)


def test_several_at_once_or_none() -> None:
    """acquire_all holds nothing while it waits, so two of them cannot wait for each other."""

    async def main() -> None:
        pool = make_pool(slabs=2)
        both = take_everything(pool)
        async with trio.open_nursery() as nursery:
            got: list[list[Buffer]] = []

            async def want() -> None:
                got.append(await pool.acquire_all((LARGEST_BYTES, LARGEST_BYTES)))

            nursery.start_soon(want)
            await wait_all_tasks_blocked()
            both.pop().release()
            await wait_all_tasks_blocked()
            assert not got
            assert pool.used_bytes == LARGEST_BYTES
            both.pop().release()
        assert pool.used_bytes == 2 * LARGEST_BYTES == pool.peak_bytes
        for buffer in got[0]:
            buffer.release()
        pool.close()

    trio.run(main)


def test_pressure_is_told_where_memory_can_be_freed() -> None:
    """on_pressure runs on the loop's thread for each acquire that waits, and may free memory."""

    async def main() -> None:
        pool = make_pool()
        idle = take_everything(pool)
        threads: list[int] = []

        def give() -> None:
            threads.append(threading.get_ident())
            idle.pop().release()

        pool.on_pressure = give
        with trio.fail_after(DEADLINE_S):
            first = await pool.acquire(LARGEST_BYTES)
            second = await pool.acquire(LARGEST_BYTES)
        assert threads == [threading.get_ident()] * 2
        second.release()
        (await pool.acquire(1)).release()
        assert len(threads) == 2, "called though nobody had to wait"
        first.release()

    trio.run(main)


async def _hold_briefly(
    pool: BufferPool, size_bytes: int, got: trio.Event, scope: trio.CancelScope
) -> None:
    with scope, await pool.acquire(size_bytes):
        got.set()


def test_cancelled_waiter_leaks_nothing() -> None:
    """A waiter that is cancelled leaves the line; those behind it get what it blocked."""

    async def main() -> None:
        pool = make_pool(slabs=1)
        small = take(pool, MIN_BUFFER_BYTES)
        cancelled, served, scope = trio.Event(), trio.Event(), trio.CancelScope()
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_hold_briefly, pool, LARGEST_BYTES, cancelled, scope)
                await wait_all_tasks_blocked()
                nursery.start_soon(_hold_briefly, pool, 1, served, trio.CancelScope())
                await wait_all_tasks_blocked()
                assert not served.is_set()
                scope.cancel()
        assert served.is_set()
        assert not cancelled.is_set()
        small.release()
        assert pool.used_bytes == 0
        assert not pool.waiting
        pool.close()

    trio.run(main)


def test_cancelled_while_it_is_served() -> None:
    """A waiter that is cancelled as its buffer arrives gives it to the next in line."""

    async def main() -> None:
        pool = make_pool(slabs=1)
        (everything,) = take_everything(pool)
        cancelled, served, scope = trio.Event(), trio.Event(), trio.CancelScope()
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_hold_briefly, pool, LARGEST_BYTES, cancelled, scope)
                await wait_all_tasks_blocked()
                nursery.start_soon(_hold_briefly, pool, LARGEST_BYTES, served, trio.CancelScope())
                await wait_all_tasks_blocked()
                scope.cancel()
                everything.release()  # before the cancelled task runs: the buffer is its own now
                assert pool.used_bytes == LARGEST_BYTES
        assert served.is_set()
        assert not cancelled.is_set()
        pool.close()

    trio.run(main)


def test_release_after_the_loop_ended() -> None:
    """A thread that outlives the loop can still give its buffer back."""
    pool = make_pool(slabs=1)

    async def main() -> Buffer:
        buffer = await pool.acquire(LARGEST_BYTES)
        with trio.move_on_after(0):
            await pool.acquire(1)
        return buffer

    thread = threading.Thread(target=trio.run(main).release)
    thread.start()
    thread.join(DEADLINE_S)
    assert pool.used_bytes == 0
    pool.close()


class _EndedLoop:
    def run_sync_soon(self, call: object) -> None:
        raise trio.RunFinishedError


def test_release_to_a_waiter_whose_loop_just_ended() -> None:
    """A thread that serves a waiter at the moment its loop ends does not see that as an error."""

    async def main() -> None:
        pool = make_pool(slabs=1)
        (everything,) = take_everything(pool)
        got, scope = trio.Event(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hold_briefly, pool, 1, got, scope)
            await wait_all_tasks_blocked()
            pool._waiters[0].token = _EndedLoop()  # type: ignore[assignment]
            everything.release()
            scope.cancel()
        pool.close()

    trio.run(main)


def test_release_from_threads() -> None:
    """Tasks and threads share a small pool: nobody waits forever, no two hold the same memory."""
    tasks, rounds = 12, 15

    def use(buffer: Buffer, mark: int) -> None:
        buffer.memory[:] = bytes([mark]) * buffer.size_bytes
        assert bytes(buffer.memory) == bytes([mark]) * buffer.size_bytes
        buffer.release()

    async def main() -> None:
        pool = make_pool()

        async def work(mark: int) -> None:
            for number in range(rounds):
                size_bytes = 1 + (mark * 7919 + number * 104729) % LARGEST_BYTES
                buffer = await pool.acquire(size_bytes)
                await trio.to_thread.run_sync(use, buffer, mark)

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for mark in range(tasks):
                    nursery.start_soon(work, mark)
        assert pool.used_bytes == 0
        assert pool.peak_bytes <= CAPACITY_BYTES
        for buffer in take_everything(pool):
            buffer.release()
        pool.close()

    trio.run(main)
