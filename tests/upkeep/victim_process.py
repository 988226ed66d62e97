"""A client process that is killed or stopped: at a step of its own choosing, or by its parent.

Each of its tasks tells the parent of every operation before it begins (`"try", task, files`) and
when it was acknowledged (`"ok", task, files`), `files` being the task's files after it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection

import trio

from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.errors import SessionLost
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.port import KV
from tectonic_client.metadata import sessions
from tectonic_client.metadata.sessions import Host
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import VolumeOptions, open_volume
from tests.filesystem.faultrig import OWNER

Files = dict[bytes, bytes]


class Fuse:
    """Ends the process by SIGKILL at the n-th step (0: never)."""

    def __init__(self, n: int) -> None:
        self._left = n

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def options(self) -> VolumeOptions:
        """How to open the client so that its calls are steps."""
        return VolumeOptions(
            client="victim",
            wrap_kv=lambda kv: _FusedKV(kv, self),  # type: ignore[arg-type,return-value]
            wrap_store=lambda store: _FusedStore(store, self),  # type: ignore[arg-type,return-value]
        )


class _FusedKV:
    """Steps before and after each transaction."""

    reads_may_block = False

    def __init__(self, inner: KV, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse
        self.read = inner.read

    def transact(self, fn: Callable[[object], object], *, durable: bool = False) -> object:
        self._fuse.step()
        result = self._inner.transact(fn, durable=durable)
        self._fuse.step()
        return result


class _FusedStore:
    """Steps before, in the middle of and after each put, before and after each delete."""

    def __init__(self, inner: ChunkStore, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self._fuse.step()
        if self._fuse._left == 1:
            self._inner.put(key, parts[:1])
        self._fuse.step()
        self._inner.put(key, parts)
        self._fuse.step()

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        doomed = list(keys)
        self._fuse.step()
        self._inner.delete(doomed[:1])
        self._fuse.step()
        self._inner.delete(doomed)
        self._fuse.step()


class _Program:
    """Does things to files whose content it knows."""

    def __init__(self, fs: FileSystem, parent: Connection, prefix: bytes, files: Files) -> None:
        self._fs = fs
        self._parent = parent
        self._prefix = prefix
        self.files = files

    async def write(self, name: bytes, offset: int, data: bytes, *, sync: bool) -> None:
        before = self.files.get(name, b"").ljust(offset, b"\0")
        self._begin({name: before[:offset] + data + before[offset + len(data) :]})
        if name not in self.files:
            _, handle = await self._fs.create(
                ROOT_INODE, self._prefix + name, 0o644, OWNER, os.O_RDWR
            )
        else:
            handle = await self._fs.open(await self._inode(name), os.O_RDWR)
        for start in range(0, len(data), 60_000):
            await self._fs.write(handle, offset + start, data[start : start + 60_000])
        if sync:
            await self._fs.fsync(handle)
        await self._fs.release(handle)
        self._end()

    async def truncate(self, name: bytes, size: int) -> None:
        self._begin({name: self.files[name][:size].ljust(size, b"\0")})
        await self._fs.setattr(await self._inode(name), AttributeChanges(size=size))
        self._end()

    async def rename(self, old: bytes, new: bytes) -> None:
        self._begin({new: self.files[old], old: None})
        await self._fs.rename(ROOT_INODE, self._prefix + old, ROOT_INODE, self._prefix + new)
        self._end()

    async def unlink(self, name: bytes) -> None:
        self._begin({name: None})
        await self._fs.unlink(ROOT_INODE, self._prefix + name)
        self._end()

    async def _inode(self, name: bytes) -> int:
        return (await self._fs.lookup(ROOT_INODE, self._prefix + name)).inode

    def _begin(self, changes: dict[bytes, bytes | None]) -> None:
        self._next = {**self.files}
        for name, content in changes.items():
            if content is None:
                del self._next[name]
            else:
                self._next[name] = content
        self._tell("try", self._next)

    def _end(self) -> None:
        self.files = self._next
        self._tell("ok", self.files)

    def _tell(self, what: str, files: Files) -> None:
        told = {self._prefix + name: data for name, data in files.items()}
        self._parent.send((what, self._prefix, told))


def run_fixed_program(url: str, parent: Connection, fuse_steps: int) -> None:
    """A bit of everything, with a fuse."""

    async def main() -> None:
        async with open_volume(url, Fuse(fuse_steps).options()) as volume:
            program = _Program(volume.filesystem, parent, b"", {})
            await program.write(b"a", 0, bytes(range(256)) * 600, sync=False)
            await program.write(b"b", 0, b"b" * 100, sync=True)
            await program.write(b"a", 70_000, b"over" * 30_000, sync=True)
            await program.truncate(b"a", 100_000)
            await program.rename(b"b", b"a")
            await volume.tasks.reclaim_orphans()
            await volume.cleaner.delete_dead_blocks(wait_for_readers=False)
            await program.write(b"c", 5, b"c" * 200_000, sync=False)
            await program.unlink(b"c")
        parent.send(("closed", b"", program.files))

    trio.run(main)


def run_until_killed(url: str, parent: Connection, seed: str, tasks: int) -> None:
    """Several tasks at random, each on files of its own, for ever."""

    async def task(fs: FileSystem, number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        program = _Program(fs, parent, b"%d-" % number, {})
        while True:
            name = rng.choice([b"a", b"b", b"c"])
            if name not in program.files or rng.random() < 0.5:
                data = bytes((rng.randrange(256),)) * rng.choice([10, 5_000, 200_000])
                await program.write(
                    name, rng.choice([0, 500, 70_000]), data, sync=rng.random() < 0.3
                )
            elif rng.random() < 0.3:
                await program.truncate(name, rng.choice([0, 100, 90_000]))
            elif rng.random() < 0.5:
                await program.rename(name, rng.choice(list({b"a", b"b", b"c"} - {name})))
            else:
                await program.unlink(name)

    async def main() -> None:
        async with open_volume(url) as volume, trio.open_nursery() as nursery:
            for number in range(tasks):
                nursery.start_soon(task, volume.filesystem, number)

    trio.run(main)


def run_of_another_host(url: str, parent: Connection) -> None:
    """Publish `kept`, write on without flushing, wait for the parent's word, flush, tell."""
    sessions.this_host = lambda: Host("elsewhere", "elsewhere")  # type: ignore[assignment]

    async def main() -> str:
        try:
            async with open_volume(url) as volume:
                fs = volume.filesystem
                _, handle = await fs.create(ROOT_INODE, b"kept", 0o644, OWNER, os.O_RDWR)
                await fs.write(handle, 0, b"kept" * 50_000)
                await fs.fsync(handle)
                await fs.write(handle, 0, b"lost" * 50_000)
                parent.send("ready")
                # Blocks the loop, heartbeat included, as the stop does.
                assert parent.recv() == "go on"
                try:
                    await fs.flush(handle)
                except SessionLost:
                    return "lost"
        except SessionLost:
            return "lost only when closing"
        return "flushed"

    parent.send(trio.run(main))
