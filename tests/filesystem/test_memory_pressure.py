"""Many open files and little memory: no deadlock, no leak, never more than the pool has."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio

from tectonic_client.filesystem.core import FileSystem
from tectonic_client.limits import MiB
from tectonic_client.records import Codec
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import (
    FormatOptions,
    Volume,
    VolumeOptions,
    format_volume,
    open_volume,
)
from tests.filesystem.faultrig import OWNER
from tests.leaks import assert_no_leaks, clean

FILES = 24
MAX_FILE_BYTES = 6 * MiB


class OneFile:
    """A task that writes and reads one file, and knows what must be in it."""

    def __init__(self, fs: FileSystem, name: bytes, rng: random.Random) -> None:
        self._fs = fs
        self._name = name
        self._rng = rng
        self._content = bytearray()

    async def run(self, steps: int, *, cancelling: bool) -> None:
        _, handle = await self._fs.create(ROOT_INODE, self._name, 0o644, OWNER, os.O_RDWR)
        operations = [self._write, self._append, self._append, self._read, self._scan, self._flush]
        for _ in range(steps):
            operation = self._rng.choice(operations)
            if cancelling and operation != self._write and operation != self._append:
                with trio.move_on_after(self._rng.random() * 0.01):
                    await operation(handle)
            else:
                await operation(handle)
        await self._fs.release(handle)
        assert await self._all() == self._content

    async def _write(self, handle: int) -> None:
        offset = self._rng.randrange(len(self._content) + 1)
        await self._put(handle, offset)

    async def _append(self, handle: int) -> None:
        if len(self._content) < MAX_FILE_BYTES:
            await self._put(handle, len(self._content))

    async def _put(self, handle: int, offset: int) -> None:
        size = self._rng.choice([100, 70_000, 1 * MiB, 3 * MiB])
        # Half of it compresses, and no two pieces are alike.
        data = self._rng.randbytes(16) * (size // 32) + self._rng.randbytes(size // 2)
        await self._fs.write(handle, offset, data)
        self._content[offset : offset + len(data)] = data

    async def _read(self, handle: int) -> None:
        offset = self._rng.randrange(len(self._content) + 1)
        size = self._rng.choice([1, 5_000, 1 * MiB])
        found = bytes(await self._fs.read(handle, offset, size))
        assert found == self._content[offset : offset + size]

    async def _scan(self, handle: int) -> None:
        """Read on for a while as a sequential reader does."""
        offset, step = self._rng.randrange(len(self._content) + 1), 128 * 1024
        for start in range(offset, min(offset + 3 * MiB, len(self._content)), step):
            found = bytes(await self._fs.read(handle, start, step))
            assert found == self._content[start : start + step]

    async def _flush(self, handle: int) -> None:
        await self._fs.flush(handle)

    async def _all(self) -> bytes:
        inode = (await self._fs.lookup(ROOT_INODE, self._name)).inode
        handle = await self._fs.open(inode, os.O_RDONLY)
        parts = []
        while part := bytes(await self._fs.read(handle, sum(map(len, parts)), 1 * MiB)):
            parts.append(part)
        await self._fs.release(handle)
        return b"".join(parts)


@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize(
    ("chunk_bytes", "steps"),
    [(8 * MiB, 25), (1 * MiB, 25), pytest.param(8 * MiB, 300, marks=pytest.mark.stress)],
)
def test_many_files_share_little_memory(
    tmp_path: Path, rng: random.Random, chunk_bytes: int, steps: int, codec: Codec, cancelling: bool
) -> None:
    """Random writers and readers of many open files all finish, with the right bytes."""
    url = f"memory://{tmp_path}"
    options = FormatOptions(
        name="tight", stores=(f"{url}-0", f"{url}-1"), chunk_bytes=chunk_bytes,
        block_bytes=4 * chunk_bytes, codec=codec,
    )  # fmt: skip
    format_volume(url, options)

    async def main() -> None:
        with trio.fail_after(100):
            async with open_volume(url, VolumeOptions(memory_limit_bytes=64 * MiB)) as volume:
                async with trio.open_nursery() as nursery:
                    for number in range(FILES):
                        seed = random.Random(f"{rng.random()}")
                        task = OneFile(volume.filesystem, b"%d" % number, seed)
                        nursery.start_soon(lambda t=task: t.run(steps, cancelling=cancelling))
                assert volume.pool.capacity_bytes == 32 * MiB
                assert 16 * MiB < volume.pool.peak_bytes <= 32 * MiB
                assert not volume.pool.waiting
            assert volume.pool.used_bytes == 0, "leaked buffers"
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


class OneRegion:
    """A task that writes and reads its own region of a file that others write too."""

    def __init__(self, volume: Volume, inode: int, start: int, rng: random.Random) -> None:
        self._volume = volume
        self._inode = inode
        self.start = start
        self._rng = rng
        self.content = bytearray(REGION_BYTES)

    async def run(self, steps: int) -> None:
        fs = self._volume.filesystem
        handle = await fs.open(self._inode, os.O_RDWR)
        for _ in range(steps):
            start = self._rng.randrange(REGION_BYTES)
            end = min(start + self._rng.choice([1, 1000, 70_000, 300_000]), REGION_BYTES)
            choice = self._rng.randrange(10)
            if choice < 4:
                data = self._rng.randbytes(1) * (end - start)
                await fs.write(handle, self.start + start, data)
                self.content[start:end] = data
            elif choice < 8:
                found = bytes(await fs.read(handle, self.start + start, end - start))
                assert found == self.content[start:end]
            elif choice == 8:
                await fs.flush(handle)
            else:
                await fs.release(handle)
                handle = await fs.open(self._inode, os.O_RDWR)
        await fs.release(handle)


REGION_BYTES = 700_001


@pytest.mark.parametrize("steps", [60, pytest.param(1500, marks=pytest.mark.stress)])
def test_many_tasks_share_one_file(tmp_path: Path, rng: random.Random, steps: int) -> None:
    """Tasks of two clients in regions of their own: each always reads what it wrote, and in the
    end the file has what each wrote."""
    url = f"memory://{tmp_path}"
    format_volume(url, FormatOptions("shared", (f"{url}-0",), 2 * MiB, 1 * MiB))

    async def main() -> None:
        options = VolumeOptions(memory_limit_bytes=64 * MiB)
        async with open_volume(url, options) as one, open_volume(url, options) as two:
            _, handle = await one.filesystem.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            inode = (await one.filesystem.lookup(ROOT_INODE, b"f")).inode
            tasks = [
                OneRegion(volume, inode, number * REGION_BYTES, random.Random(f"{rng.random()}"))
                for number, volume in enumerate([one, two] * 6)
            ]
            await one.filesystem.setattr(inode, AttributeChanges(size=12 * REGION_BYTES))
            await one.filesystem.release(handle)
            async with trio.open_nursery() as nursery:
                for task in tasks:
                    nursery.start_soon(task.run, steps)
        assert one.pool.used_bytes == two.pool.used_bytes == 0, "leaked buffers"
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            handle = await volume.filesystem.open(inode, os.O_RDONLY)
            for task in tasks:
                found = bytes(await volume.filesystem.read(handle, task.start, REGION_BYTES))
                assert found == task.content
            await volume.filesystem.release(handle)

    async def bounded() -> None:
        with trio.fail_after(100):
            await main()

    trio.run(bounded)
