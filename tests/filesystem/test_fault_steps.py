"""Every public operation with every kind of fault at each of its steps.

Each scenario is a program that checks its errors and tries again. Whatever fails and when: errors
are of the tree, what was acknowledged is there at the end, and the next client leaves nothing over.
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import trio
import trio.testing

from tectonic_client.errors import (
    Exists,
    MetadataUnavailable,
    NoSpace,
    NotEmpty,
    NotFound,
    StoreUnavailable,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import (
    KINDS,
    MAX_STEPS,
    OWNER,
    Faults,
    Kind,
    Scenario,
    end_sessions_left_by_this_process,
    failing_client,
    insist,
    load_file,
    load_tree,
    new_volume,
    store_file,
    try_each_step,
)
from tests.leaks import assert_no_leaks, clean

OLD = bytes(range(256)) * 900
"""Content of the file that is there before, in several blocks."""

NEW = bytes(reversed(range(256))) * 700


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


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_an_operation_survives_a_fault_at_each_step(scenario: Scenario, kind: Kind) -> None:
    """With the fault at step 1, 2, ... of the program: nothing acknowledged is lost or leaked."""
    trio.run(try_each_step, scenario, kind)


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
