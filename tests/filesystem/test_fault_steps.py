"""Every public operation with every kind of fault at each of its steps.

Each scenario is a program that checks its errors and tries again. Whatever fails and when: errors
are of the tree, what was acknowledged is there at the end, and the next client leaves nothing over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from tectonic_client.chunkstore.wrappers import Fail, Fault, Hold
from tectonic_client.errors import (
    DeadlineExceeded,
    Exists,
    MetadataUnavailable,
    NoSpace,
    NotEmpty,
    NotFound,
    StaleHandle,
    StoreUnavailable,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import (
    CHUNK_BYTES,
    KINDS,
    OWNER,
    Faults,
    Kind,
    end_sessions_left_by_this_process,
    failing_client,
    insist,
    load_file,
    load_tree,
    new_volume,
    store_file,
)
from tests.leaks import assert_no_leaks, clean

MAX_STEPS = 40
"""More steps than any scenario has."""

OLD = bytes(range(256)) * 900
"""Content of the file that is there before, in several blocks."""

NEW = bytes(reversed(range(256))) * 700


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is there before, what the program does, and what must be there afterwards."""

    work: Callable[[Volume], Awaitable[None]]
    before: dict[bytes, bytes]
    after: dict[bytes, bytes]

    def __str__(self) -> str:
        return self.work.__name__.strip("_")


async def _inode(volume: Volume, name: bytes) -> int:
    return (await volume.filesystem.lookup(ROOT_INODE, name)).inode


async def _create(volume: Volume) -> None:
    await store_file(volume.filesystem, b"new", NEW)


async def _overwrite(volume: Volume) -> None:
    await store_file(volume.filesystem, b"old", NEW, offset=1000)


async def _write_on_after_errors(volume: Volume) -> None:
    """A program that goes on writing to the same handle when a flush has failed."""
    fs = volume.filesystem

    async def everything() -> None:
        handle = await fs.open(await _inode(volume, b"old"), os.O_RDWR)
        failed: list[TectonicError] = []
        try:
            for offset in range(1000, 1000 + len(NEW), 40_000):
                end = min(offset + 40_000, 1000 + len(NEW))
                await fs.write(handle, offset, NEW[offset - 1000 : end - 1000])
                try:
                    await fs.flush(handle)
                except TectonicError as error:
                    failed.append(error)
            await fs.flush(handle)
        finally:
            await fs.release(handle)
        if failed:
            raise failed[0]

    await insist(everything)


async def _fsync(volume: Volume) -> None:
    fs = volume.filesystem

    async def work() -> None:
        handle = await fs.open(await _inode(volume, b"old"), os.O_RDWR)
        try:
            await fs.write(handle, len(OLD), NEW)
            await fs.fsync(handle)
            await fs.fsync(handle)
        finally:
            await fs.release(handle)

    await insist(work)


async def _close_last_handle(volume: Volume) -> None:
    """Nothing but the release flushes."""
    fs = volume.filesystem

    async def work() -> None:
        handle = await fs.open(await _inode(volume, b"old"), os.O_WRONLY)
        try:
            await fs.write(handle, 1000, NEW)
        finally:
            await fs.release(handle)

    await insist(work)


async def _truncate(volume: Volume) -> None:
    fs, inode = volume.filesystem, await insist_inode(volume, b"old")
    for size in (100_000, 150_000, 0, 70_000, 10):
        await insist(lambda size=size: fs.setattr(inode, AttributeChanges(size=size)))


async def insist_inode(volume: Volume, name: bytes) -> int:
    """The inode behind a name, however often looking fails."""
    found: list[int] = []

    async def look() -> None:
        found.append(await _inode(volume, name))

    await insist(look)
    return found[-1]


async def _truncate_open_file(volume: Volume) -> None:
    fs = volume.filesystem

    async def work() -> None:
        inode = await _inode(volume, b"old")
        handle = await fs.open(inode, os.O_RDWR)
        try:
            await fs.write(handle, 0, NEW)
            await fs.setattr(inode, AttributeChanges(size=1000))
            assert bytes(await fs.read(handle, 0, 5000)) == NEW[:1000]
            await fs.write(handle, 2000, b"end")
            assert bytes(await fs.read(handle, 990, 2000)) == NEW[990:1000] + bytes(1000) + b"end"
            await fs.flush(handle)
        finally:
            await fs.release(handle)

    await insist(work)


async def _open_with_truncation(volume: Volume) -> None:
    fs = volume.filesystem

    async def work() -> None:
        inode = await _inode(volume, b"old")
        handle = await fs.open(inode, os.O_WRONLY | os.O_TRUNC)
        try:
            await fs.write(handle, 0, NEW)
            await fs.flush(handle)
        finally:
            await fs.release(handle)

    await insist(work)


async def _unlink(volume: Volume) -> None:
    await insist(lambda: volume.filesystem.unlink(ROOT_INODE, b"old"), done=NotFound)
    await insist(volume.tasks.reclaim_orphans)
    await insist(volume.cleaner.delete_dead_blocks)


async def _unlink_open_file(volume: Volume) -> None:
    """Unlinked while open: readable and writable until closed, then gone."""
    fs = volume.filesystem
    handles: list[int] = []

    async def open_it() -> None:
        handles.append(await fs.open(await _inode(volume, b"old"), os.O_RDWR))

    async def use() -> None:
        await fs.write(handles[0], 0, b"unseen" * 20_000)
        await fs.flush(handles[0])

    await insist(open_it)
    await insist(lambda: fs.unlink(ROOT_INODE, b"old"), done=NotFound)
    await insist(use)
    await insist(lambda: fs.read(handles[0], 130_000, 10))
    with suppress(MetadataUnavailable, NoSpace, StoreUnavailable, UnknownOutcome):
        await fs.release(handles[0])
    await insist(volume.tasks.reclaim_orphans)


async def _rename_over(volume: Volume) -> None:
    fs = volume.filesystem
    await store_file(fs, b"new", NEW)
    await insist(lambda: fs.rename(ROOT_INODE, b"new", ROOT_INODE, b"old"), done=NotFound)
    await insist(volume.tasks.reclaim_orphans)


async def _directories(volume: Volume) -> None:
    fs = volume.filesystem
    await insist(lambda: fs.mkdir(ROOT_INODE, b"a", 0o755, OWNER), done=Exists)
    await insist(lambda: fs.mkdir(ROOT_INODE, b"b", 0o755, OWNER), done=Exists)
    first = await insist_inode(volume, b"a")
    second = await insist_inode(volume, b"b")
    old = await insist_inode(volume, b"old")
    await insist(lambda: fs.symlink(first, b"s", b"target", OWNER), done=Exists)
    await insist(lambda: fs.link(old, first, b"f"), done=Exists)
    await insist(lambda: fs.rename(ROOT_INODE, b"a", second, b"moved"), done=NotFound)
    with pytest.raises((NotEmpty, TectonicError)):
        await fs.rmdir(second, b"moved")
    for name in (b"s", b"f"):
        await insist(lambda name=name: fs.unlink(first, name), done=NotFound)
    await insist(lambda: fs.rmdir(second, b"moved"), done=NotFound)
    await insist(lambda: fs.rmdir(ROOT_INODE, b"b"), done=NotFound)


async def _read(volume: Volume) -> None:
    fs = volume.filesystem

    async def work() -> None:
        assert await load_file(fs, b"old", 10_000) == OLD
        assert await load_file(fs, b"old", 200_000) == OLD

    await insist(work)


BEFORE = {b"old": OLD}
SCENARIOS = [
    Scenario(_create, BEFORE, {b"old": OLD, b"new": NEW}),
    Scenario(_overwrite, BEFORE, {b"old": OLD[:1000] + NEW + OLD[1000 + len(NEW) :]}),
    Scenario(_write_on_after_errors, BEFORE, {b"old": OLD[:1000] + NEW + OLD[1000 + len(NEW) :]}),
    Scenario(_fsync, BEFORE, {b"old": OLD + NEW}),
    Scenario(_close_last_handle, BEFORE, {b"old": OLD[:1000] + NEW + OLD[1000 + len(NEW) :]}),
    Scenario(_truncate, BEFORE, {b"old": bytes(10)}),
    Scenario(_truncate_open_file, BEFORE, {b"old": NEW[:1000] + bytes(1000) + b"end"}),
    Scenario(_open_with_truncation, BEFORE, {b"old": NEW}),
    Scenario(_unlink, BEFORE, {}),
    Scenario(_unlink_open_file, BEFORE, {}),
    Scenario(_rename_over, BEFORE, {b"old": NEW}),
    Scenario(_directories, BEFORE, BEFORE),
    Scenario(_read, BEFORE, BEFORE),
]


async def _try(scenario: Scenario, kind: Kind, n: int) -> bool:
    """Run the scenario with the fault at its n-th step; False if it has fewer steps."""
    url = new_volume()
    async with open_volume(url) as volume:
        for name, data in scenario.before.items():
            await store_file(volume.filesystem, name, data)
    faults = Faults()
    try:
        async with failing_client(url, faults) as volume:
            kind.plan(faults, n)
            await scenario.work(volume)
            # What the program was told must be there, before anybody cleans up.
            reached = not faults.pending
            faults.clear()
            assert await load_tree(volume.filesystem) == scenario.after
    except TectonicError as error:
        raise AssertionError(f"closing failed: {error!r}") from error
    assert volume.pool.used_bytes == 0, "leaked buffers"
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)
        assert await load_tree(volume.filesystem) == scenario.after
    return reached


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_an_operation_survives_a_fault_at_each_step(scenario: Scenario, kind: Kind) -> None:
    """With the fault at step 1, 2, ... of the program: nothing acknowledged is lost or leaked."""

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            with trio.fail_after(20):
                try:
                    if not await _try(scenario, kind, n):
                        return
                except BaseException as error:
                    error.add_note(f"the fault was at step {n}")
                    raise
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_closing_a_client_survives_a_fault_at_each_step(kind: Kind) -> None:
    """Unflushed files, one of them removed, a dead block: without an error all is published, with
    one each file is as it was or as it was written; the next client leaves nothing over."""

    async def close(url: str, faults: Faults, n: int) -> bool:
        async with failing_client(url, faults) as volume:
            fs = volume.filesystem
            for name in (b"one", b"two", b"removed"):
                await store_file(fs, name, OLD)
            for name in (b"one", b"two", b"removed"):
                handle = await fs.open(await _inode(volume, name), os.O_RDWR)
                await fs.write(handle, 1000, NEW)
            await fs.unlink(ROOT_INODE, b"removed")
            await fs.setattr(await _inode(volume, b"two"), AttributeChanges(size=len(OLD)))
            kind.plan(faults, n)
        return not faults.pending

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            url, faults, came = new_volume(), Faults(), True
            error: TectonicError | None = None
            try:
                came = await close(url, faults, n)
            except TectonicError as raised:
                error = raised
            assert error is None or "injected" in str(error)
            async with open_volume(url) as volume:
                await end_sessions_left_by_this_process(volume)
                await clean(volume)
                await assert_no_leaks(volume)
                found = await load_tree(volume.filesystem)
            written = OLD[:1000] + NEW + OLD[1000 + len(NEW) :]
            assert found.keys() == {b"one", b"two"}
            assert found[b"two"] == written
            assert found[b"one"] == written or (error is not None and found[b"one"] == OLD)
            if not came:
                return
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)


# --- faults that come together ----------------------------------------------------------------


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
