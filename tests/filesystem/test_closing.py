"""Handles of one file that come and go at once: whoever leaves last flushes, and only then."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.errors import MetadataUnavailable, NoSpace
from tectonic_client.filesystem.openinode import OpenInode
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import OWNER, Faults, failing_client, load_file, new_volume
from tests.leaks import assert_no_leaks, clean

DATA = bytes(range(256)) * 500


def _run(body: Callable[[Faults, Volume], Awaitable[None]], expected: bytes = DATA) -> None:
    """Run `body`; then the next client finds `expected` in `f`, and nothing left over."""

    async def main() -> None:
        url, faults = new_volume(), Faults()
        with trio.fail_after(60):
            async with failing_client(url, faults) as volume:
                await body(faults, volume)
                assert await load_file(volume.filesystem, b"f") == expected
            assert volume.pool.used_bytes == 0, "leaked buffers"
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)
                assert await load_file(volume.filesystem, b"f") == expected

    trio.run(main)


async def _dirty_file(volume: Volume, handles: int) -> tuple[list[int], OpenInode]:
    """A file with unflushed bytes, open so many times."""
    fs = volume.filesystem
    made, first = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
    opened = [first, *[await fs.open(made.inode, os.O_RDWR) for _ in range(handles - 1)]]
    await fs.write(first, 0, DATA)
    state = fs.files.state_of(made.inode)
    assert state is not None
    return opened, state


async def _waiting(nursery: trio.Nursery, *calls: Callable[[], Awaitable[object]]) -> None:
    """Begin these calls, one after the other, and let each go as far as it can."""

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    for call in calls:
        nursery.start_soon(run, call)
        await trio.testing.wait_all_tasks_blocked()


def test_handles_that_are_closed_at_once() -> None:
    """While the lock is held elsewhere all of them try to leave: the bytes are flushed."""

    async def body(faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        (one, two, three), state = await _dirty_file(volume, 3)
        async with trio.open_nursery() as nursery, state.lock:
            releases = [lambda h=h: fs.release(h) for h in (one, two, three)]
            await _waiting(nursery, *releases)
        assert not fs.files.is_open(state.inode)

    _run(body)


def test_a_handle_is_closed_while_an_open_is_given_up() -> None:
    """The opener was counted, so the handle was not the last; then the opener is cancelled."""

    async def body(faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        (handle,), state = await _dirty_file(volume, 1)
        async with trio.open_nursery() as openers, state.lock:
            await _waiting(openers, lambda: fs.open(state.inode, os.O_RDONLY))
            await fs.release(handle)
            openers.cancel_scope.cancel()
        assert not fs.files.is_open(state.inode)

    _run(body)


def test_a_handle_is_closed_while_the_file_is_truncated() -> None:
    """Written, truncated and closed at once: the bytes before the cut are there."""

    async def body(faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        (handle,), state = await _dirty_file(volume, 1)
        async with trio.open_nursery() as nursery, state.lock:
            await _waiting(
                nursery,
                lambda: fs.setattr(state.inode, AttributeChanges(size=1000)),
                lambda: fs.release(handle),
            )
        assert not fs.files.is_open(state.inode)

    _run(body, DATA[:1000])


def test_a_file_is_opened_while_its_last_handle_fails_to_flush() -> None:
    """The bytes that could not be published stay for the new handle, whose close tries again."""

    async def body(faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        (handle,), state = await _dirty_file(volume, 1)
        opened: list[int] = []

        async def open_it() -> None:
            opened.append(await fs.open(state.inode, os.O_RDWR))

        async def release_it() -> None:
            with pytest.raises(MetadataUnavailable):
                await fs.release(handle)

        faults.kv.fail_transaction(1, MetadataUnavailable("injected"))
        async with trio.open_nursery() as nursery, state.lock:
            await _waiting(nursery, release_it, open_it)
        assert bytes(await fs.read(opened[0], 0, 10)) == DATA[:10]
        await fs.release(opened[0])

    _run(body)


def test_closing_tells_what_was_lost_to_each_handle() -> None:
    """Bytes that a full store cost are told by the close of every handle that was open then."""

    async def body(faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        (one, two), _ = await _dirty_file(volume, 2)
        faults.stores[0].limit_space(0)
        with pytest.raises(NoSpace):
            await fs.flush(one)
        faults.clear()
        later = await fs.open((await fs.lookup(ROOT_INODE, b"f")).inode, os.O_RDWR)
        await fs.release(one)  # its flush has said it
        with pytest.raises(NoSpace):
            await fs.release(two)
        await fs.write(later, 0, DATA)
        await fs.release(later)

    _run(body)
