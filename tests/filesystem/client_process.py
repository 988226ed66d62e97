"""A client that does random things in shared directories: a task of a test, or a process.

`python -m tests.filesystem.client_process URL SEED STEPS` prints one line when it is done.
"""

from __future__ import annotations

import os
import random
import stat
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from tectonic_client.errors import FileSystemError
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.types import ROOT_INODE, AttributeChanges, DirectoryEntry, RenameFlag
from tectonic_client.volume import VolumeOptions, open_volume
from tests.filesystem.faultrig import OWNER

NAMES = [b"a", b"b", b"c", b"d", b"e"]


class RandomClient:
    """Does random operations; their POSIX answers are fine, any other error is not."""

    def __init__(self, fs: FileSystem, rng: random.Random) -> None:
        self._fs = fs
        self._rng = rng
        self.answers: Counter[str] = Counter()

    async def run(self, steps: int) -> None:
        """So many operations."""
        operations: list[Callable[[], Awaitable[object]]] = [
            self._create, self._create, self._write, self._append, self._read, self._truncate,
            self._mkdir, self._mkdir, self._rmdir, self._unlink, self._rename, self._rename,
            self._exchange, self._link, self._symlink,
        ]  # fmt: skip
        for _ in range(steps):
            operation = self._rng.choice(operations)
            try:
                await operation()
                answer = "done"
            except FileSystemError as error:
                answer = type(error).__name__
            self.answers[f"{operation.__name__}: {answer}"] += 1

    async def _place(self) -> tuple[int, bytes]:
        """A directory, up to three deep, and any name in it."""
        directory = ROOT_INODE
        for _ in range(self._rng.randrange(4)):
            found = [e for e in await self._entries(directory) if stat.S_ISDIR(e.attributes.mode)]
            if not found:
                break
            directory = self._rng.choice(found).attributes.inode
        return directory, self._rng.choice(NAMES)

    async def _entries(self, directory: int) -> list[DirectoryEntry]:
        handle = await self._fs.opendir(directory)
        try:
            return await self._fs.readdir(handle, 0)
        finally:
            await self._fs.releasedir(handle)

    async def _existing(self) -> tuple[int, bytes]:
        """A place that was just there, if there is any; others may change it at any moment."""
        directory, name = await self._place()
        entries = await self._entries(directory)
        return directory, self._rng.choice(entries).name if entries else name

    def _data(self) -> bytes:
        return bytes((self._rng.randrange(256),)) * self._rng.choice([0, 10, 5000, 70_000, 200_000])

    async def _inode(self) -> int:
        return (await self._fs.lookup(*await self._existing())).inode

    async def _create(self) -> None:
        _, handle = await self._fs.create(*await self._place(), 0o644, OWNER, os.O_RDWR)
        try:
            await self._fs.write(handle, 0, self._data())
        finally:
            await self._fs.release(handle)

    async def _with_file(self, flags: int, use: Callable[[int], Awaitable[object]]) -> None:
        handle = await self._fs.open(await self._inode(), flags)
        try:
            await use(handle)
        finally:
            await self._fs.release(handle)

    async def _write(self) -> None:
        offset = self._rng.choice([0, 10, 65_536, 100_000])
        flags = os.O_RDWR | self._rng.choice([0, os.O_TRUNC])
        await self._with_file(flags, lambda handle: self._fs.write(handle, offset, self._data()))

    async def _append(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND
        await self._with_file(flags, lambda handle: self._fs.write(handle, 0, self._data()))

    async def _read(self) -> None:
        await self._with_file(os.O_RDONLY, lambda handle: self._fs.read(handle, 0, 400_000))

    async def _truncate(self) -> None:
        size = self._rng.choice([0, 100, 66_000])
        await self._fs.setattr(await self._inode(), AttributeChanges(size=size))

    async def _mkdir(self) -> None:
        await self._fs.mkdir(*await self._place(), 0o755, OWNER)

    async def _rmdir(self) -> None:
        await self._fs.rmdir(*await self._existing())

    async def _unlink(self) -> None:
        await self._fs.unlink(*await self._existing())

    async def _rename(self) -> None:
        await self._fs.rename(*await self._existing(), *await self._place())

    async def _exchange(self) -> None:
        places = *await self._existing(), *await self._existing()
        await self._fs.rename(*places, RenameFlag.EXCHANGE)

    async def _link(self) -> None:
        await self._fs.link(await self._inode(), *await self._place())

    async def _symlink(self) -> None:
        await self._fs.symlink(*await self._place(), b"target", OWNER)


async def random_client(url: str, seed: str, steps: int) -> Counter[str]:
    """Open the volume as a client of its own and do `steps` random operations."""
    async with open_volume(url, VolumeOptions(client=f"random {seed}")) as volume:
        client = RandomClient(volume.filesystem, random.Random(seed))
        await client.run(steps)
    assert volume.pool.used_bytes == 0
    return client.answers


def main() -> None:
    """As the module's text says."""
    url, seed, steps = sys.argv[1:]
    answers = trio.run(random_client, url, seed, int(steps))
    print("done:", answers.total(), flush=True)


if __name__ == "__main__":
    main()
