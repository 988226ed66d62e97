"""The cleaner: whatever it meets and wherever it fails, nothing is left over or missing."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from tectonic_client import background
from tectonic_client.checkpoint.rundirectory import RunDirectory
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.chunkstore.wrappers import Fail, Fault
from tectonic_client.errors import CorruptRecord, StoreUnavailable
from tectonic_client.filesystem.namespace import Actor, detach_tree
from tectonic_client.kv.port import Transaction
from tectonic_client.metadata import keys, scans, sessions
from tectonic_client.metadata.changes import Changes
from tectonic_client.types import ROOT_INODE
from tectonic_client.upkeep import leftovers
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import (
    KINDS,
    OWNER,
    Faults,
    Kind,
    failing_client,
    insist,
    load_file,
    new_volume,
    store_file,
)
from tests.leaks import assert_no_leaks, clean, find_leaks

__all__ = ["any_engine"]

MAX_STEPS = 80
KEPT = bytes(range(256)) * 1000


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few rows per transaction and page that a small mess takes several of each."""
    monkeypatch.setattr(leftovers, "BRIEF_BATCH_ROWS", 2)
    monkeypatch.setattr(leftovers, "RECLAIM_BATCH_ROWS", 3)
    for module in (scans, sessions, leftovers):
        monkeypatch.setattr(module, "SCAN_PAGE_ROWS", 2)


async def _declare_dead(volume: Volume) -> None:
    """From now on the client's process seems to be gone."""

    def change(tx: Transaction) -> None:
        record = sessions.read_session(tx, volume.session_id)
        assert record is not None
        record = replace(record, pid_started_ticks=record.pid_started_ticks + 1)
        tx.put(keys.session(volume.session_id), record.encode())

    await volume.kv.transact(change)


async def _leave_chunks(volume: Volume) -> None:
    """Chunks that nothing names, whole and torn, in several leases."""
    page = memoryview(mmap.mmap(-1, 8192))  # aligned, as O_DIRECT wants it
    for _ in range(3):
        volume.ids._ids = iter(range(0))  # the next id takes a new lease
        for index in range(3):
            block_id = await volume.ids.next_id()
            store = volume.stores.get(index % len(volume.stores.ids()))
            store.put(ChunkKey(block_id, index), [page[: 4096 * (1 + index % 2)]])


@asynccontextmanager
async def _mess(url: str) -> AsyncIterator[None]:
    """What a dead client left: chunks, an unlinked open file of many extents, a removed tree, dead
    blocks; beside a file of it that must stay."""
    async with open_volume(url) as victim:
        fs = victim.filesystem
        await store_file(fs, b"kept", KEPT)
        _, handle = await fs.create(ROOT_INODE, b"open", 0o644, OWNER, os.O_RDWR)
        for offset in (0, 40_000, 20_000, 10_000, 60_000):
            await fs.write(handle, offset, bytes(15_000))
            await fs.flush(handle)
        await fs.unlink(ROOT_INODE, b"open")
        tree = await fs.mkdir(ROOT_INODE, b"tree", 0o755, OWNER)
        for name in (b"1", b"2", b"3"):
            below = await fs.mkdir(tree.inode, name, 0o755, OWNER)
            await fs.symlink(below.inode, b"link", b"x", OWNER)
        await store_file(fs, b"second", KEPT[:70_000])
        second = (await fs.lookup(ROOT_INODE, b"second")).inode
        await fs.rename(ROOT_INODE, b"second", tree.inode, b"second")
        await victim.kv.transact(lambda tx: _detach(tx, victim.session_id))
        assert (await fs.getattr(second)).nlink == 1
        await _leave_chunks(victim)
        await _declare_dead(victim)
        yield


def _detach(tx: Transaction, session_id: int) -> None:
    """Take `tree` out of the root as deleting a checkpoint does, and reclaim nothing of it."""
    detach_tree(tx, ROOT_INODE, b"tree", Actor(session_id, 1, Changes()))


async def _check(volume: Volume) -> None:
    await assert_no_leaks(volume)
    assert await load_file(volume.filesystem, b"kept") == KEPT
    handle = await volume.filesystem.opendir(ROOT_INODE)
    assert [entry.name for entry in await volume.filesystem.readdir(handle, 0)] == [b"kept"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cleaning_up_survives_a_fault_at_each_step(kind: Kind, small_steps: None) -> None:
    """Whatever fails and when: the next try finishes, with all gone that must go."""

    async def attempt(n: int) -> bool:
        url, faults = new_volume(stores=2), Faults()
        # The cleaner first: its background tasks clean up what they find at its start.
        async with failing_client(url, faults) as volume, _mess(url):
            assert len(await find_leaks(volume)) > 5, "there is nothing to clean up"
            kind.plan(faults, n)
            await insist(lambda: clean(volume))
            came = not faults.pending
            faults.clear()
            await clean(volume)
            await _check(volume)
        async with open_volume(url) as volume:
            await _check(volume)
        return came

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            with trio.fail_after(20):
                try:
                    if not await attempt(n):
                        return
                except BaseException as error:
                    error.add_note(f"the fault was at step {n}")
                    raise
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(100):
            await body()

    trio.run(main)


def test_several_cleaners_at_once(any_engine: NewVolume, small_steps: None) -> None:
    """Clients that clean up after the same dead one at once get along."""

    async def main() -> None:
        url = any_engine()
        async with (
            open_volume(url) as one,
            open_volume(url) as two,
            open_volume(url) as three,
            _mess(url),
        ):
            async with trio.open_nursery() as nursery:
                for volume in (one, two, three):
                    nursery.start_soon(clean, volume)
            await _check(two)

    _run(main)


def test_a_client_that_opens_cleans_up_by_itself(
    any_engine: NewVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask for it: a client's background tasks do all of it when it opens."""
    # Whoever made the mess has just looked.
    monkeypatch.setattr(background, "CLEANUP_AT_START_S", 0.0)

    async def main() -> None:
        url = any_engine()
        async with _mess(url), open_volume(url) as volume:
            while problems := await find_leaks(volume):
                # Dead blocks stay while a client that lives may read them.
                if all("is dead and was not deleted" in problem for problem in problems):
                    break
            await volume.cleaner.delete_dead_blocks(wait_for_readers=False)
            await _check(volume)

    _run(main)


def test_leftovers_behind_many_of_the_living_are_found(small_steps: None) -> None:
    """Leases and orphans of the dead are found behind pages of those of the living."""

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as alive, open_volume(url) as volume:
            fs = alive.filesystem
            handles = []
            for number in range(7):
                name = b"%d" % number
                _, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
                await fs.unlink(ROOT_INODE, name)
                handles.append(handle)
                alive.ids._ids = iter(range(0))
            async with _mess(url):
                await clean(volume)
                problems = await find_leaks(volume)
                assert len(problems) == 2 * len(handles), problems  # orphans, without a name
            for handle in handles:
                await fs.write(handle, 0, b"x" * 100)
                assert bytes(await fs.read(handle, 0, 200)) == b"x" * 100
                await fs.release(handle)
            await alive.tasks.reclaim_orphans()
            await clean(volume)
            await _check(volume)

    _run(main)


def test_a_corrupt_orphan_does_not_keep_others(small_steps: None) -> None:
    """What cannot be reclaimed is told, and everything else goes."""

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as volume:
            async with _mess(url):
                rows = await volume.kv.read(
                    lambda tx: tx.scan(keys.ORPHAN, keys.prefix_end(keys.ORPHAN))
                )
                corrupt = keys.parse_group(rows[0][0])
                key = keys.attributes(corrupt)
                good = await volume.kv.read(lambda tx: tx.get(key))
                assert good is not None
                await volume.kv.transact(lambda tx: tx.put(key, b"damaged " + good[8:]))
                with pytest.raises(CorruptRecord, match=f"inode {corrupt}"):
                    await clean(volume)
                left = await volume.kv.read(
                    lambda tx: tx.scan(keys.ORPHAN, keys.prefix_end(keys.ORPHAN))
                )
                assert [keys.parse_group(key) for key, _ in left] == [corrupt]
                await volume.kv.transact(lambda tx: tx.put(key, good))
                await clean(volume)
            await _check(volume)

    _run(main)


def test_a_client_does_not_clean_up_what_it_uses_itself() -> None:
    """Neither its hidden directories, nor files that it has open, nor ids that it has leased."""

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as volume:
            fs = volume.filesystem
            hidden = await volume.ids.next_id()
            directory = RunDirectory(ROOT_INODE, volume.session_id)
            await volume.kv.transact(lambda tx: directory.create_hidden(tx, hidden))
            _, handle = await fs.create(ROOT_INODE, b"open", 0o644, OWNER, os.O_RDWR)
            await fs.write(handle, 0, b"open")
            await fs.flush(handle)
            await fs.unlink(ROOT_INODE, b"open")
            lease = volume.ids.leases[0]
            store = volume.stores.get(0)
            in_flight = ChunkKey(await volume.ids.next_id(), 0)
            store.put(in_flight, [memoryview(bytes(4096))])
            await clean(volume)
            async with open_volume(url) as other:
                await clean(other)
            assert stat.S_ISDIR((await fs.getattr(hidden)).mode)
            assert (await fs.getattr(hidden)).nlink == 2
            assert bytes(await fs.read(handle, 0, 10)) == b"open"
            assert in_flight in [info.key for info in store.list(0, 2**63)]
            assert await volume.kv.read(lambda tx: tx.get(keys.lease(lease))) is not None
            await fs.release(handle)
            store.delete([in_flight])
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)

    _run(main)


def test_dead_blocks_of_a_store_that_fails_hold_up_no_others(small_steps: None) -> None:
    """However many there are, the blocks of other stores give their space back, and those of that
    store as soon as it works again."""

    async def main() -> None:
        url, faults = new_volume(stores=2), Faults()
        async with open_volume(url, faults.options()) as volume:
            for number in range(12):
                await store_file(volume.filesystem, b"%d" % number, b"x" * 1000)
            faults.stores[0].plan(Fault("delete", Fail(StoreUnavailable("injected")), times=None))
            for number in range(12):
                await volume.filesystem.unlink(ROOT_INODE, b"%d" % number)
            await volume.tasks.reclaim_orphans()
            with pytest.raises(StoreUnavailable, match="injected"):
                await volume.cleaner.delete_dead_blocks()
            assert list(faults.stores[0].list(0, 2**63))
            assert not list(faults.stores[1].list(0, 2**63))
            faults.stores[0].clear()
            await clean(volume)
            await assert_no_leaks(volume)

    _run(main)
