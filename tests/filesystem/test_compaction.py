"""Compaction: the same bytes in fewer extents, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from tectonic_client import background
from tectonic_client.errors import TectonicError
from tectonic_client.filesystem.compaction import Compactor
from tectonic_client.metadata import files as file_layer
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import (
    CHUNK_BYTES,
    KINDS,
    OWNER,
    Faults,
    Kind,
    end_sessions_left_by_this_process,
    failing_client,
    load_file,
    new_volume,
)
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine"]

SIZE = 4 * CHUNK_BYTES + CHUNK_BYTES // 2
PIECE = 1000
MAX_STEPS = 60


def _on(url: str, work: Callable[[Volume], Awaitable[None]]) -> None:
    """Run `work` with a client; another one then finds nothing wrong or left over."""

    async def main() -> None:
        with trio.fail_after(120):
            async with open_volume(url) as volume:
                await work(volume)
            await _audit(url)

    trio.run(main)


async def _audit(url: str) -> None:
    async with open_volume(url) as volume:
        await end_sessions_left_by_this_process(volume)
        await clean(volume)
        await assert_no_leaks(volume)


async def _scatter(volume: Volume, seed: int = 1, *, name: bytes = b"f") -> tuple[int, bytearray]:
    """A file that was written in order and then at random in small pieces; its content."""
    fs, dice = volume.filesystem, random.Random(seed)
    content = bytearray(dice.randbytes(SIZE))
    attributes, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
    await fs.write(handle, 0, content)
    for _ in range(200):
        offset, piece = dice.randrange(SIZE - PIECE), dice.randbytes(PIECE)
        await fs.write(handle, offset, piece)
        content[offset : offset + PIECE] = piece
    await fs.flush(handle)
    await fs.release(handle)
    return attributes.inode, content


async def _extents(volume: Volume, inode: int) -> int:
    return len(await volume.kv.read(lambda tx: file_layer.read_extents(tx, inode)))


def _compactor(volume: Volume) -> Compactor:
    return volume.tasks.compactor


def test_the_same_bytes_in_fewer_extents(any_engine: NewVolume) -> None:
    """Nothing that a program can see changes; what the file used before is freed."""

    async def work(volume: Volume) -> None:
        inode, content = await _scatter(volume)
        before = await volume.filesystem.getattr(inode)
        assert await _extents(volume, inode) > 200
        assert await _compactor(volume).compact(inode) == 5
        assert await _extents(volume, inode) == 5
        assert await load_file(volume.filesystem, b"f") == content
        assert await volume.filesystem.getattr(inode) == before
        assert await _compactor(volume).compact(inode) == 0
        async with open_volume(volume.url) as other:
            assert await load_file(other.filesystem, b"f") == content

    _on(any_engine(), work)


def test_it_begins_by_itself_when_the_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the last flush, not before; a file in few extents is not touched."""
    monkeypatch.setattr(background, "COMPACT_QUIET_S", 0.2)

    async def work(volume: Volume) -> None:
        inode, content = await _scatter(volume)
        assert await _extents(volume, inode) > 200
        while await _extents(volume, inode) > 5:
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(0.01)  # the time that is waited for passes on the real clock
        assert await load_file(volume.filesystem, b"f") == content

    _on(new_volume(), work)


def test_holes_stay() -> None:
    """A sparse file gets no larger: only stretches without holes are copied."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        expected = bytearray(SIZE)
        for number in list(range(0, 60, 2)) + list(range(1, 39, 2)):
            offset = number * PIECE
            await fs.write(handle, offset, bytes([number + 1]) * PIECE)
            expected[offset : offset + PIECE] = bytes([number + 1]) * PIECE
        await fs.setattr(attributes.inode, AttributeChanges(size=SIZE))
        await fs.release(handle)
        assert await _compactor(volume).compact(attributes.inode) == 1
        assert await load_file(fs, b"f") == expected
        assert await _extents(volume, attributes.inode) == 1 + 10

    _on(new_volume(), work)


@pytest.mark.parametrize("seed", range(3))
def test_writers_win(seed: int) -> None:
    """While a file is compacted again and again by one client, both it and another one write,
    truncate, extend and remove: every byte is what was written last."""
    dice = random.Random(seed)

    async def work(volume: Volume) -> None:
        inode, content = await _scatter(volume, seed)
        gone, _ = await _scatter(volume, seed, name=b"gone")

        async def write(client: Volume) -> None:
            fs = client.filesystem
            for _ in range(40):
                handle = await fs.open(inode, os.O_RDWR)
                offset, piece = dice.randrange(len(content) - PIECE), dice.randbytes(PIECE)
                await fs.write(handle, offset, piece)
                content[offset : offset + PIECE] = piece
                await fs.flush(handle)
                await fs.release(handle)
                if dice.random() < 0.1:
                    size = dice.randrange(SIZE // 2, SIZE)
                    await fs.setattr(inode, AttributeChanges(size=size))
                    content[size:] = b""
                    content.extend(bytes(max(0, size - len(content))))

        async def compact() -> None:
            while True:
                await _compactor(volume).compact(inode)
                await _compactor(volume).compact(gone)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(compact)
            await write(volume)
            async with open_volume(volume.url) as other:
                await write(other)
                await other.filesystem.unlink(ROOT_INODE, b"gone")
                await write(other)
            await write(volume)
            nursery.cancel_scope.cancel()
        assert await load_file(volume.filesystem, b"f") == content

    _on(new_volume(), work)


def test_a_change_during_the_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another client writes between reading and publishing stays; the copy is dropped."""

    async def work(volume: Volume) -> None:
        inode, content = await _scatter(volume)
        transact = volume.kv.transact
        async with open_volume(volume.url) as other:

            async def changing(fn: Callable[..., object], **options: bool) -> object:
                if getattr(fn, "func", None) == _compactor(volume)._replace:
                    handle = await other.filesystem.open(inode, os.O_RDWR)
                    await other.filesystem.write(handle, 10, b"new")
                    content[10:13] = b"new"
                    await other.filesystem.release(handle)
                    monkeypatch.undo()
                return await transact(fn, **options)

            monkeypatch.setattr(volume.kv, "transact", changing)
            assert await _compactor(volume).compact(inode) == 4
            assert await load_file(volume.filesystem, b"f") == content

    _on(new_volume(), work)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compaction_survives_a_fault_at_each_step(kind: Kind) -> None:
    """The file is whole with the old or the new extents, and nothing is left over."""

    async def attempt(n: int) -> bool:
        url, faults = new_volume(), Faults()
        async with open_volume(url) as volume:
            inode, content = await _scatter(volume)
        came = True
        with suppress(TectonicError):  # closing may meet the fault too
            async with failing_client(url, faults) as volume:
                kind.plan(faults, n)
                with suppress(TectonicError):
                    await _compactor(volume).compact(inode)
                came = not faults.pending
                faults.clear()
                assert await load_file(volume.filesystem, b"f") == content
        async with open_volume(url) as volume:
            assert await load_file(volume.filesystem, b"f") == content
        await _audit(url)
        return came

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            with trio.fail_after(60):
                try:
                    if not await attempt(n):
                        return
                except BaseException as error:
                    error.add_note(f"the fault was at step {n}")
                    raise
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)
