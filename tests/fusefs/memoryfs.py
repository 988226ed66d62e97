"""A file system in memory with the interface of `tectonic_client.filesystem.core.FileSystem`.

It serves two purposes that a real volume cannot: the speed of the door alone (writes are thrown
away), and handlers that fail in ways that no real one should (see `FAULTS`). Only what those tests
need is there; POSIX is compared on a real volume.

    python -m tests.fusefs.memoryfs DIRECTORY FSNAME [OPTIONS]   serves until unmounted or SIGTERM
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import trio

from fusefs.allocator import keep_freed_memory
from fusefs.operations import FuseOperations
from fusefs.options import parse_options
from fusefs.session import serve
from tectonic_client import errors
from tectonic_client.filesystem.follower import Follower
from tectonic_client.filesystem.namespace import Found
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.limits import MiB
from tectonic_client.recorder import Recorder
from tectonic_client.types import (
    ROOT_INODE,
    AttributeChanges,
    Attributes,
    DirectoryEntry,
    FileSystemUsage,
    Owner,
    RenameFlag,
)

_FILLS = [bytes([number]) * MiB for number in range(8)]

FIRST_COOKIE = 4


def _unexpected() -> None:
    raise ZeroDivisionError("a defect in a handler")


def _grouped() -> None:
    raise ExceptionGroup("from a nursery", [errors.NoSpace("the store is full")])


def _corrupt() -> None:
    raise errors.CorruptChunk("file /x: chunk 3 of block 7 in store 0 fails its checksum")


FAULTS: dict[bytes, Callable[[], None]] = {
    b"unexpected": _unexpected,
    b"grouped": _grouped,
    b"corrupt": _corrupt,
}
"""Looking up one of these names fails this way."""


@dataclass
class _Node:
    attributes: Attributes
    entries: dict[bytes, int] = field(default_factory=dict)
    opens: int = 0


class MemoryFileSystem:
    """Directories and names are real. Every byte of a file is the number of its opens so far, so
    that tests see what the kernel has cached."""

    def __init__(self, *, broken: bool) -> None:
        self._broken = broken
        self._nodes = {ROOT_INODE: _Node(self._new(ROOT_INODE, stat.S_IFDIR | 0o755, Owner(0, 0)))}
        self._next_inode = ROOT_INODE + 1
        self.follower = Follower(AsyncKV(MemoryKV()), 0)

    @staticmethod
    def _new(inode: int, mode: int, owner: Owner) -> Attributes:
        now = time.time_ns()
        return Attributes(inode, mode, 1, owner.uid, owner.gid, 0, 0, now, now, now)

    def _node(self, inode: int) -> _Node:
        node = self._nodes.get(inode)
        if node is None:
            raise errors.StaleHandle(f"inode {inode} is gone")
        return node

    def inode_of(self, handle: int) -> int:
        return handle

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        await trio.lowlevel.checkpoint()
        if name in FAULTS:
            FAULTS[name]()
        if name in (b".", b".."):
            return self._node(parent).attributes
        inode = self._node(parent).entries.get(name)
        if inode is None:
            if name.startswith(b"race"):
                # Another client makes it right after this look-up.
                await self.mknod(parent, name, stat.S_IFREG | 0o600, Owner(0, 0))
            raise errors.NotFound(f"no {name!r}")
        return self._node(inode).attributes

    async def find(self, parent: int, name: bytes) -> Found:
        try:
            return Found(await self.lookup(parent, name), directory_pushes=False)
        except errors.NotFound:
            return Found(None, directory_pushes=False)

    async def getattr(self, inode: int) -> Attributes:
        await trio.lowlevel.checkpoint()
        if self._broken:
            raise errors.CorruptRecord("the root's record fails its checksum")
        return self._node(inode).attributes

    async def setattr(self, inode: int, changes: AttributeChanges) -> Attributes:
        await trio.lowlevel.checkpoint()
        node = self._node(inode)
        if changes.size is not None:
            node.attributes = replace(node.attributes, size=changes.size)
        if changes.mtime_ns is not None:
            node.attributes = replace(node.attributes, mtime_ns=changes.mtime_ns)
        return node.attributes

    async def mknod(
        self, parent: int, name: bytes, mode: int, owner: Owner, rdev: int = 0
    ) -> Attributes:
        await trio.lowlevel.checkpoint()
        entries = self._node(parent).entries
        if name in entries:
            raise errors.Exists(f"{name!r} exists")
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self._nodes[inode] = _Node(self._new(inode, mode, owner))
        entries[name] = inode
        return self._nodes[inode].attributes

    async def mkdir(self, parent: int, name: bytes, mode: int, owner: Owner) -> Attributes:
        return await self.mknod(parent, name, mode | stat.S_IFDIR, owner)

    async def unlink(self, parent: int, name: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._nodes.pop(self._node(parent).entries.pop(name))

    async def rename(
        self, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes, flags: RenameFlag
    ) -> None:
        await trio.lowlevel.checkpoint()
        inode = self._node(old_parent).entries.pop(old_name)
        self._node(new_parent).entries[new_name] = inode

    async def create(
        self, parent: int, name: bytes, mode: int, owner: Owner, flags: int
    ) -> tuple[Attributes, int]:
        attributes = await self.mknod(parent, name, stat.S_IFREG | mode, owner)
        return attributes, attributes.inode

    async def open(self, inode: int, flags: int) -> int:
        await trio.lowlevel.checkpoint()
        if flags & os.O_TRUNC:
            await self.setattr(inode, AttributeChanges(size=0))
        self._node(inode).opens += 1
        return inode

    async def read(self, handle: int, offset: int, size: int) -> memoryview:
        await trio.lowlevel.checkpoint()
        node = self._node(handle)
        length = max(0, min(size, node.attributes.size - offset))
        return memoryview(_FILLS[node.opens % len(_FILLS)])[:length]

    async def clear_privileges(self, handle: int) -> int | None:
        return None

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        await trio.lowlevel.checkpoint()
        node = self._node(handle)
        size = max(node.attributes.size, offset + len(data))
        node.attributes = replace(node.attributes, size=size, mtime_ns=time.time_ns())
        return len(data)

    async def flush(self, handle: int) -> None:
        await trio.lowlevel.checkpoint()

    async def fsync(self, handle: int, *, data_only: bool = False) -> None:
        await trio.lowlevel.checkpoint()

    async def release(self, handle: int) -> None:
        await trio.lowlevel.checkpoint()

    async def opendir(self, inode: int) -> int:
        await trio.lowlevel.checkpoint()
        return inode

    async def readdir(self, handle: int, cookie: int, limit: int) -> list[DirectoryEntry]:
        await trio.lowlevel.checkpoint()
        numbered = list(enumerate(self._node(handle).entries.items(), start=FIRST_COOKIE))
        return [
            DirectoryEntry(number, name, self._node(inode).attributes)
            for number, (name, inode) in numbered
            if number > cookie
        ][:limit]

    def directory_pushes(self, handle: int) -> bool:
        return False

    async def releasedir(self, handle: int) -> None:
        await trio.lowlevel.checkpoint()

    async def fsyncdir(self, handle: int) -> None:
        await trio.lowlevel.checkpoint()

    async def statfs(self) -> FileSystemUsage:
        await trio.lowlevel.checkpoint()
        return FileSystemUsage(100 * MiB, 60 * MiB, MiB)


async def _main(directory: str, fsname: str, options: str = "") -> None:
    filesystem = MemoryFileSystem(broken=fsname == "broken")
    parsed = parse_options([options])
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        await serve(
            FuseOperations(filesystem, parsed, Recorder()),  # type: ignore[arg-type]
            fsname, directory, parsed,
            signals=signals, on_ready=lambda: print("ready", flush=True),
        )  # fmt: skip


if __name__ == "__main__":
    keep_freed_memory(32 * MiB)
    trio.run(_main, *sys.argv[1:])
