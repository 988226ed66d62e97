"""Files of many extents are cut in bounded transactions, and what was cut never comes back."""

from __future__ import annotations

import os
import random

import pytest
import trio

from tectonic_client.background import Signals
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.metadata import files, keys, tails
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import (
    KINDS,
    OWNER,
    Kind,
    Scenario,
    insist,
    load_file,
    new_volume,
    store_file,
    try_each_step,
)
from tests.leaks import assert_no_leaks, clean

BATCH_ROWS = 3
"""Extents per transaction in these tests, so that small files have many batches."""

STEP = 100
"""Distance of the extents of a scattered file; half of each is a hole."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of extents is many."""
    monkeypatch.setattr(tails, "RECLAIM_BATCH_ROWS", BATCH_ROWS)


@pytest.fixture
def nobody_reclaims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails stay until a test reclaims them."""
    monkeypatch.setattr(Signals, "tail_left", lambda self, inode: None)


async def _scattered(fs: FileSystem, name: bytes, count: int) -> tuple[int, bytes]:
    """A file of so many extents, in any order in its blocks; its inode and content."""
    attributes, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
    content = bytearray((count - 1) * STEP + STEP // 2)
    for number in random.Random(count).sample(range(count), count):
        data = bytes([number % 255 + 1]) * (STEP // 2)
        content[number * STEP : number * STEP + len(data)] = data
        await fs.write(handle, number * STEP, data)
    await fs.release(handle)
    return attributes.inode, bytes(content)


async def _size(fs: FileSystem, inode: int, size: int) -> None:
    await fs.setattr(inode, AttributeChanges(size=size))


async def _stored(volume: Volume, inode: int) -> int:
    return await volume.kv.read(lambda tx: files.count_extents(tx, inode, 10_000))


async def _has_tail(volume: Volume, inode: int) -> bool:
    return await volume.kv.read(lambda tx: tx.get(keys.tail(inode))) is not None


async def _put(fs: FileSystem, inode: int, offset: int, data: bytes) -> None:
    handle = await fs.open(inode, os.O_RDWR)
    await fs.write(handle, offset, data)
    await fs.release(handle)


@pytest.mark.usefixtures("nobody_reclaims")
def test_what_was_cut_stays_away_before_it_is_reclaimed() -> None:
    """Cut down and grown again, the file reads as zeros there: for this client's open handle, for
    another client, in a clone, and after the next client has cleaned up."""

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as volume, open_volume(url) as other:
            fs = volume.filesystem
            inode, content = await _scattered(fs, b"f", 40)
            handle = await fs.open(inode, os.O_RDWR)
            await _size(fs, inode, 1020)
            assert await _has_tail(volume, inode)
            assert await _stored(volume, inode) == 40
            await _size(fs, inode, len(content))
            expected = content[:1020] + bytes(len(content) - 1020)
            assert bytes(await fs.read(handle, 0, 10_000)) == expected
            assert await load_file(fs, b"f") == expected
            assert await load_file(other.filesystem, b"f") == expected
            await other.filesystem.clone(inode, ROOT_INODE, b"clone")
            assert await load_file(fs, b"clone") == expected
            await fs.release(handle)
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"f") == expected
            assert await load_file(volume.filesystem, b"clone") == expected

    trio.run(main)


@pytest.mark.usefixtures("nobody_reclaims")
def test_few_extents_are_cut_at_once() -> None:
    """Where no more than a batch lies behind the new end, one transaction does it all."""

    async def main() -> None:
        async with open_volume(new_volume()) as volume:
            inode, _ = await _scattered(volume.filesystem, b"f", 10)
            await _size(volume.filesystem, inode, (10 - BATCH_ROWS) * STEP - 10)
            assert not await _has_tail(volume, inode)
            assert await _stored(volume, inode) == 10 - BATCH_ROWS
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(main)


def test_a_tail_is_reclaimed_without_being_asked() -> None:
    """The client that cut a file removes what it cut off, and the blocks that die of it."""

    async def main() -> None:
        async with open_volume(new_volume()) as volume:
            inode, content = await _scattered(volume.filesystem, b"f", 50)
            await _size(volume.filesystem, inode, 1000)
            with trio.fail_after(10):
                while await _has_tail(volume, inode):
                    await trio.testing.wait_all_tasks_blocked()
            assert await _stored(volume, inode) == 10
            await clean(volume)
            await assert_no_leaks(volume)
            assert await load_file(volume.filesystem, b"f") == content[:1000]

    trio.run(main)


@pytest.mark.usefixtures("nobody_reclaims")
def test_writing_where_a_tail_lies() -> None:
    """New bytes where cut ones are stored, at their front, in their middle or behind them, also by
    a client that does not know of the cut: they count, and nothing else does."""

    async def main() -> None:
        for offset in (0, 990, 1770, 3920, 5000):
            url = new_volume()
            async with open_volume(url) as volume, open_volume(url) as other:
                inode, content = await _scattered(volume.filesystem, b"f", 40)
                unaware = await other.filesystem.open(inode, os.O_RDWR)
                await _size(volume.filesystem, inode, 1020)
                await other.filesystem.write(unaware, offset, b"x" * 130)
                await other.filesystem.release(unaware)
                model = bytearray(max(1020, offset + 130))
                model[:1020] = content[:1020]
                model[offset : offset + 130] = b"x" * 130
                assert await load_file(volume.filesystem, b"f") == bytes(model)
                await _size(volume.filesystem, inode, 6000)
                model.extend(bytes(6000 - len(model)))
                assert await load_file(volume.filesystem, b"f") == bytes(model)
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


@pytest.mark.usefixtures("nobody_reclaims")
def test_a_removed_file_takes_its_tail_along() -> None:
    """Neither records nor chunks are left of a file that is removed before its tail is."""

    async def main() -> None:
        async with open_volume(new_volume()) as volume:
            for name, left in ((b"many", 10), (b"few", 0)):
                inode, _ = await _scattered(volume.filesystem, name, 20)
                await _size(volume.filesystem, inode, left * STEP)
                await volume.filesystem.unlink(ROOT_INODE, name)
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(main)


@pytest.mark.usefixtures("nobody_reclaims")
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_cuts_and_writes(seed: int) -> None:
    """Writing, cutting, growing, reclaiming a little and reading by two clients, in any order, is
    what the same does to a bytearray."""

    async def main() -> None:
        url, rng, model = new_volume(), random.Random(seed), bytearray()
        async with open_volume(url) as one, open_volume(url) as two:
            attributes, handle = await one.filesystem.create(
                ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR
            )
            await one.filesystem.release(handle)
            inode = attributes.inode
            for _ in range(120):
                fs = rng.choice((one, two)).filesystem
                match rng.randrange(6):
                    case 0 | 1:
                        for _ in range(rng.choice((1, 12))):
                            offset, data = rng.randrange(3000), rng.randbytes(rng.randint(1, 60))
                            await _put(fs, inode, offset, data)
                            model.extend(bytes(max(0, offset - len(model))))
                            model[offset : offset + len(data)] = data
                    case 2:
                        size = rng.randrange(len(model) + 1)
                        await _size(fs, inode, size)
                        del model[size:]
                    case 3:
                        size = rng.randrange(4000)
                        await _size(fs, inode, size)
                        del model[size:]
                        model.extend(bytes(size - len(model)))
                    case 4:
                        await one.kv.transact(lambda tx: tails.reclaim(tx, inode))
                    case _:
                        assert await load_file(fs, b"f", 700) == bytes(model)
            assert await load_file(one.filesystem, b"f") == bytes(model)
            await clean(one)
            await assert_no_leaks(one)
            assert await load_file(two.filesystem, b"f") == bytes(model)

    trio.run(main)


BEFORE = bytes(range(256)) * 40


async def _cut_many(volume: Volume) -> None:
    """Scatter a file, cut it, grow it, write into what was cut, cut again, each until it works."""
    fs = volume.filesystem

    async def inode() -> int:
        return (await fs.lookup(ROOT_INODE, b"old")).inode

    async def size(to: int) -> None:
        await insist(lambda: _sized(to))

    async def _sized(to: int) -> None:
        await _size(fs, await inode(), to)

    async def scatter() -> None:
        handle = await fs.open(await inode(), os.O_RDWR)
        try:
            for offset in range(0, 1000, STEP):
                await fs.write(handle, offset, BEFORE[offset : offset + 50])
                await fs.flush(handle)
        finally:
            await fs.release(handle)

    await insist(scatter)
    await size(120)
    await size(1000)
    await store_file(fs, b"old", b"new", offset=400)
    await size(800)
    await size(60)
    await size(200)
    await insist(volume.tasks.reclaim_tails)


AFTER = BEFORE[:60] + bytes(140)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cutting_survives_a_fault_at_each_step(kind: Kind) -> None:
    """Whatever fails and when: what was cut stays away, and the next client leaves nothing over."""
    scenario = Scenario(_cut_many, {b"old": BEFORE}, {b"old": AFTER})
    trio.run(lambda: try_each_step(scenario, kind, max_steps=200))
