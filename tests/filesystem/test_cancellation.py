"""Operations that are cancelled at each of their awaits: nothing dirty is lost, no buffer leaks."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import trio

from tectonic_client.errors import NoSpace
from tectonic_client.limits import MiB
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.faultrig import (
    CHUNK_BYTES,
    OWNER,
    Faults,
    failing_client,
    load_file,
    new_volume,
)
from tests.leaks import assert_no_leaks, clean

MAX_AWAITS = 300
"""More than any operation here has."""

FIRST = bytes(range(256)) * 1200
SECOND = bytes(reversed(range(256))) * 1000


class CancelAtAwait(trio.abc.Instrument):
    """Cancels `scope` when `task` waits for the n-th time."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, n: int) -> None:
        self._task = task
        self._scope = scope
        self._left = n

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()

    @property
    def came(self) -> bool:
        """Whether the task waited that often."""
        return self._left <= 0


async def cancelled_at(n: int, work: Callable[[], Awaitable[object]]) -> tuple[bool, bool]:
    """Run `work`, cancelled at its n-th await: (whether it waited that often, whether it ended)."""
    with trio.CancelScope() as scope:
        instrument = CancelAtAwait(trio.lowlevel.current_task(), scope, n)
        trio.lowlevel.add_instrument(instrument)
        try:
            await work()
            finished = True
        except trio.Cancelled:
            finished = False
            raise
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.came, finished


@dataclass(slots=True)
class Setting:
    """A file with published and with dirty bytes, open."""

    volume: Volume
    handle: int
    inode: int

    async def write(self) -> object:
        return await self.volume.filesystem.write(self.handle, 1000, SECOND)

    async def flush(self) -> object:
        return await self.volume.filesystem.flush(self.handle)

    async def fsync(self) -> object:
        return await self.volume.filesystem.fsync(self.handle)

    async def read(self) -> object:
        await self.flush()  # else all may still be in memory, and nothing waits
        for offset in range(0, len(FIRST), 50_000):
            await self.volume.filesystem.read(self.handle, offset, 50_000)
        return None

    async def release(self) -> object:
        await self.volume.filesystem.release(self.handle)
        return None

    async def truncate(self) -> object:
        return await self.volume.filesystem.setattr(self.inode, AttributeChanges(size=500))

    async def open_and_create(self) -> object:
        fs = self.volume.filesystem
        other = await fs.open(self.inode, os.O_RDWR)
        await fs.release(other)
        _, new = await fs.create(ROOT_INODE, b"new", 0o644, OWNER, os.O_RDWR)
        try:
            await fs.write(new, 0, SECOND)  # else all may be done at once, and nothing waits
        finally:
            await fs.release(new)
        return None


FLUSHED = FIRST
WRITTEN = FIRST[:1000] + SECOND + FIRST[1000 + len(SECOND) :]


@pytest.mark.parametrize(
    ("operation", "outcomes"),
    [
        (Setting.write, (FLUSHED, WRITTEN)),
        (Setting.flush, (FLUSHED,)),
        (Setting.fsync, (FLUSHED,)),
        (Setting.read, (FLUSHED,)),
        (Setting.release, (FLUSHED,)),
        (Setting.truncate, (FLUSHED, FIRST[:500])),
        (Setting.open_and_create, (FLUSHED,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_cancelled_operation_loses_and_leaks_nothing(
    operation: Callable[[Setting], Awaitable[object]], outcomes: tuple[bytes, ...]
) -> None:
    """Cancelled at await 1, 2, ...: earlier writes are there, the operation happened or did not."""

    async def attempt(n: int) -> bool:
        url = new_volume()
        async with open_volume(url) as volume:
            fs = volume.filesystem
            attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            await fs.write(handle, 0, FIRST[:200_000])
            await fs.flush(handle)
            # Blocks that nothing uses any more when they are flushed, and others.
            await fs.write(handle, 0, bytes(len(FIRST)))
            await fs.write(handle, 0, FIRST)
            setting = Setting(volume, handle, attributes.inode)
            came, _ = await cancelled_at(n, lambda: operation(setting))
            if operation is not Setting.release:
                await fs.release(handle)
            assert len(fs._handles) == 0
            assert await load_file(fs, b"f") in outcomes
        assert volume.pool.used_bytes == 0, "leaked buffers"
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"f") in outcomes
        return came

    _at_each_await(attempt)


def test_giving_up_lost_bytes_can_be_cancelled() -> None:
    """Cancelled anywhere in operations that find the store full: what was flushed stays whole."""

    async def attempt(n: int) -> bool:
        url, faults = new_volume(), Faults()
        async with failing_client(url, faults) as volume:
            fs = volume.filesystem
            _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            await fs.write(handle, 0, FIRST)
            await fs.flush(handle)
            faults.stores[0].limit_space(2 * CHUNK_BYTES + 8192)

            async def work() -> None:
                for operation in (
                    lambda: fs.write(handle, 0, SECOND),
                    lambda: fs.flush(handle),
                    lambda: fs.write(handle, 0, SECOND),
                    lambda: fs.fsync(handle),
                ):
                    with suppress(NoSpace):
                        await operation()

            came, _ = await cancelled_at(n, work)
            with suppress(NoSpace):
                await fs.flush(handle)
            assert await load_file(fs, b"f") == FIRST
            faults.clear()
            await fs.write(handle, 0, SECOND)
            await fs.release(handle)
        assert volume.pool.used_bytes == 0, "leaked buffers"
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"f") == SECOND + FIRST[len(SECOND) :]
        return came

    _at_each_await(attempt)


def _at_each_await(attempt: Callable[[int], Awaitable[bool]]) -> None:
    async def main() -> None:
        for n in range(1, MAX_AWAITS):
            with trio.fail_after(20):
                try:
                    if not await attempt(n):
                        assert n > 1
                        return
                except BaseException as error:
                    error.add_note(f"cancelled at await {n}")
                    raise
        raise AssertionError(f"more than {MAX_AWAITS} awaits")

    trio.run(main)


def test_a_cancelled_client_flushes_what_was_written() -> None:
    """A client that is cancelled anywhere keeps every write that had returned."""

    async def attempt(n: int) -> bool:
        url, written = new_volume(), bytearray()

        async def work() -> None:
            async with open_volume(url) as volume:
                fs = volume.filesystem
                _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
                for offset in range(0, len(FIRST), 60_000):
                    part = FIRST[offset : offset + 60_000]
                    await fs.write(handle, offset, part)
                    written.extend(part)
                await fs.flush(handle)

        came, _ = await cancelled_at(n, work)
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            if written:
                assert await load_file(volume.filesystem, b"f") == written
        return came

    _at_each_await(attempt)


def test_writers_that_wait_for_memory_can_be_cancelled() -> None:
    """Cancelled while the pool is used up: others go on, and all memory comes back."""

    async def main() -> None:
        url = new_volume(chunk_bytes=8 * MiB)
        async with open_volume(url, VolumeOptions(memory_limit_bytes=64 * MiB)) as volume:
            fs, pool = volume.filesystem, volume.pool
            hoard = [await pool.acquire(8 * MiB) for _ in range(pool.capacity_bytes // (8 * MiB))]
            _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            with trio.move_on_after(0.05) as scope:
                await fs.write(handle, 0, FIRST)
            assert scope.cancelled_caught
            hoard.pop().release()
            with trio.fail_after(20):
                await fs.write(handle, 5, FIRST)
                await fs.flush(handle)
            for buffer in hoard:
                buffer.release()
            await fs.release(handle)
            assert await load_file(fs, b"f") == bytes(5) + FIRST
            await assert_no_leaks(volume)
        assert pool.used_bytes == 0

    trio.run(main)


def test_a_leftover_of_a_cancelled_write_gives_its_memory_to_others() -> None:
    """A write that is cancelled half-way holds no buffer that nobody would flush."""

    async def attempt(n: int) -> bool:
        url = new_volume()
        async with open_volume(url) as volume:
            fs = volume.filesystem
            _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            data = bytes(3 * CHUNK_BYTES + 5)
            came, finished = await cancelled_at(n, lambda: fs.write(handle, 0, data))
            if not finished:
                assert volume.pool.used_bytes == 0
            await fs.release(handle)
        return came

    _at_each_await(attempt)
