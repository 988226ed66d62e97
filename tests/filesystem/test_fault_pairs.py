"""Faults that come together: a transaction without an answer and a full store, a lost store and a
removed file, an engine that is gone when the client closes."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from tectonic_client.chunkstore.wrappers import Fail, Fault, Hold
from tectonic_client.errors import (
    DeadlineExceeded,
    MetadataUnavailable,
    NoSpace,
    StaleHandle,
    StoreUnavailable,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import (
    CHUNK_BYTES,
    Faults,
    failing_client,
    load_file,
    load_tree,
    new_volume,
    store_file,
)
from tests.leaks import assert_no_leaks, clean

OLD = bytes(range(256)) * 900
"""Content of the file that is there before, in several blocks."""

NEW = bytes(reversed(range(256))) * 700


async def _inode(volume: Volume, name: bytes) -> int:
    return (await volume.filesystem.lookup(ROOT_INODE, name)).inode


def _run(body: Callable[[str, Faults, Volume], Awaitable[None]], **others: object) -> None:
    """Run `body` with a client that has `old`; afterwards the next client leaves nothing over."""

    async def main() -> None:
        with trio.fail_after(60):
            url, faults = new_volume(stores=2), Faults()
            async with failing_client(url, faults, **others) as volume:
                await store_file(volume.filesystem, b"old", OLD)
                await body(url, faults, volume)
                faults.clear()
            assert volume.pool.used_bytes == 0, "leaked buffers"
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


async def _open_old(volume: Volume, flags: int = os.O_RDWR) -> int:
    return await volume.filesystem.open(await _inode(volume, b"old"), flags)


@pytest.mark.parametrize("done", [False, True])
def test_bytes_in_doubt_survive_a_later_loss(done: bool) -> None:
    """A flush without an answer, then a full store: what may be published is not deleted."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        handle = await _open_old(volume)
        await fs.write(handle, 0, NEW)
        if done:
            faults.kv.lose_answer(1)
        else:
            faults.kv.fail_transaction(1, UnknownOutcome("injected"))
        with pytest.raises(UnknownOutcome):
            await fs.flush(handle)
        for store in faults.stores:
            store.limit_space(0)
        await fs.write(handle, 0, OLD[:CHUNK_BYTES])
        with pytest.raises(NoSpace):
            await fs.flush(handle)
        await fs.release(handle)
        assert await load_file(fs, b"old") == (NEW + OLD[len(NEW) :] if done else OLD)

    _run(body)


@pytest.mark.parametrize("size", [len(NEW), CHUNK_BYTES])
@pytest.mark.parametrize("done", [False, True])
def test_writing_on_after_a_flush_in_doubt(done: bool, size: int) -> None:
    """The second flush publishes what came after the first one, whether or not that took effect.

    Also where the first one ended with a whole chunk, in a block that has room for more.
    """
    first = NEW[:size]

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        handle = await _open_old(volume)
        await fs.write(handle, 0, first)
        if done:
            faults.kv.lose_answer(1)
        else:
            faults.kv.fail_transaction(1, UnknownOutcome("injected"))
        with pytest.raises(UnknownOutcome):
            await fs.flush(handle)
        await fs.write(handle, 10, b"later")
        await fs.write(handle, len(OLD), NEW)
        await fs.flush(handle)
        await fs.release(handle)
        expected = bytearray(OLD + NEW)
        expected[:size] = first
        expected[10:15] = b"later"
        assert await load_file(fs, b"old") == expected

    _run(body)


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("change", ["overwritten", "truncated", "removed"])
def test_a_flush_in_doubt_does_not_undo_what_others_did_since(change: str, forgotten: bool) -> None:
    """Trying again publishes no block that was published, replaced and deleted in between."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        handle = await _open_old(volume)
        await fs.write(handle, 0, NEW)
        faults.kv.lose_answer(1)
        with pytest.raises(UnknownOutcome):
            await fs.flush(handle)
        async with open_volume(url) as other:
            if change == "removed":
                await other.filesystem.unlink(ROOT_INODE, b"old")
                await other.tasks.reclaim_orphans()
            else:
                size = 0 if change == "truncated" else len(OLD)
                inode = await _inode(other, b"old")
                await other.filesystem.setattr(inode, AttributeChanges(size=size))
            if change == "overwritten":
                await store_file(other.filesystem, b"old", b"other" * 60_000)
            if forgotten:
                await other.cleaner.delete_dead_blocks(wait_for_readers=False)
        if change == "removed":
            with pytest.raises(StaleHandle):
                await fs.flush(handle)
        else:
            await fs.flush(handle)
        with suppress(StaleHandle):
            await fs.release(handle)
        expected = {"overwritten": {b"old": b"other" * 60_000}, "truncated": {b"old": b""}}
        async with open_volume(url) as other:
            await clean(other)
            assert await load_tree(other.filesystem) == expected.get(change, {})

    _run(body)


@pytest.mark.parametrize("done", [False, True])
def test_a_file_closed_in_doubt_is_whole_or_as_before(done: bool) -> None:
    """Where even the last try gets no answer, the next client finds out what is named."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        handle = await _open_old(volume)
        await fs.write(handle, 0, NEW)
        if done:
            faults.kv.lose_answer(1)
        else:
            faults.kv.fail_transaction(1, UnknownOutcome("injected"))
        with pytest.raises(UnknownOutcome):
            await fs.release(handle)
        assert await load_file(fs, b"old") == (NEW + OLD[len(NEW) :] if done else OLD)

    _run(body)


def test_one_lost_store_does_not_keep_others_from_freeing_space() -> None:
    """Dead blocks leave the stores that answer, and the lost one when it is back."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        lost, healthy = faults.stores
        lost.plan(Fault("delete", Fail(StoreUnavailable("injected")), times=None))
        await volume.filesystem.unlink(ROOT_INODE, b"old")
        with pytest.raises(StoreUnavailable):
            await insist_once(volume)
        assert list(healthy.inner.list(0, 2**63)) == []
        assert list(lost.inner.list(0, 2**63)) != []
        lost.clear()
        await volume.cleaner.delete_dead_blocks()
        assert list(lost.inner.list(0, 2**63)) == []

    async def insist_once(volume: Volume) -> None:
        await volume.tasks.reclaim_orphans()
        await volume.cleaner.delete_dead_blocks()

    _run(body)


def test_closing_with_a_lost_store_succeeds_when_everything_is_flushed() -> None:
    """What only cleaning up would have needed is left to the next client."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        faults.stores[0].plan(Fault("delete", Fail(StoreUnavailable("injected")), times=None))
        faults.clear = lambda: None  # type: ignore[method-assign]
        await store_file(volume.filesystem, b"new", NEW)
        await volume.filesystem.unlink(ROOT_INODE, b"old")

    _run(body)


async def _close_dirty(
    expected: type[TectonicError], url: str, faults: Faults, plan: Callable[[], None]
) -> None:
    """Close a client with unflushed bytes in `old` once `plan` has had its effect."""

    async def use() -> None:
        async with failing_client(url, faults) as volume:
            await store_file(volume.filesystem, b"old", OLD)
            await volume.filesystem.write(await _open_old(volume), 0, NEW)
            plan()

    with pytest.raises(expected):
        await use()


def test_closing_without_a_metadata_engine_says_so_and_loses_nothing_published() -> None:
    """The exit raises what kept the last flush from succeeding; the next client cleans up."""

    async def main() -> None:
        url, faults = new_volume(), Faults()
        await _close_dirty(
            MetadataUnavailable,
            url,
            faults,
            lambda: faults.kv.fail_transaction(1, MetadataUnavailable("injected")),
        )
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"old") == OLD

    trio.run(main)


def test_a_flush_that_takes_too_long_is_not_silent() -> None:
    """Closing gives up after SHUTDOWN_DEADLINE_S with an error, and leaves nothing behind."""

    async def main() -> None:
        url, faults = new_volume(), Faults()
        entered, released = threading.Event(), threading.Event()
        # The put ends by itself; the clock has passed the deadline long before.
        hold = Fault("put", Hold(entered, released, limit_s=1.0))
        await _close_dirty(DeadlineExceeded, url, faults, lambda: faults.stores[0].plan(hold))
        assert entered.is_set()
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"old") == OLD

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("done", [False, True])
def test_writing_on_after_a_truncate_in_doubt(done: bool) -> None:
    """A file that grows again reads as the metadata have it: zeros where the cut took effect.

    Also while the chunks that were cut off are still there.
    """

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        handle = await _open_old(volume)
        if done:
            faults.kv.lose_answer(1)
        else:
            faults.kv.fail_transaction(1, UnknownOutcome("injected"))
        with pytest.raises(UnknownOutcome):
            await fs.setattr(await _inode(volume, b"old"), AttributeChanges(size=0))
        for store in faults.stores:
            store.plan(Fault("delete", Fail(StoreUnavailable("injected")), times=None))
        await fs.write(handle, len(OLD), NEW)
        await fs.flush(handle)
        expected = (bytes(len(OLD)) if done else OLD) + NEW
        assert bytes(await fs.read(handle, 0, len(expected))) == expected
        await fs.release(handle)
        assert await load_file(fs, b"old") == expected

    _run(body)
