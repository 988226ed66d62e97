"""A file system that stores nothing: what FUSE itself costs with our request sizes and open flags.

Files are a name and a size, directories a dict of names; writes are counted and dropped, reads
give zeros from one piece of memory. Run as a process, `python -m bench.nullfs DIRECTORY`: it says
`ready` on stdout and serves until its standard input closes, so it never outlives who started it.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from fusefs.allocator import keep_freed_memory
from tectonic_client.limits import FUSE_READ_AHEAD_BYTES, FUSE_REQUEST_BYTES, KiB, MiB

_TASKS: Final = 16
"""As many requests in flight as a mount with the default memory limit allows."""

_CACHED_S: Final = 1.0
"""How long the kernel may trust names and attributes: as a mount's default."""

_KEPT_MEMORY_BYTES: Final = 32 * MiB


class NullOperations(pyfuse3.Operations):  # type: ignore[misc]  # pyfuse3 publishes no types
    """Files and directories in memory. Called by pyfuse3 on the trio loop."""

    def __init__(self) -> None:
        super().__init__()
        self._directories: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self._sizes: dict[int, int] = {}
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        """Of each open directory, by its handle."""
        self._new_inodes = itertools.count(pyfuse3.ROOT_INODE + 1)
        self._new_handles = itertools.count(1)
        self._zeros = memoryview(bytes(FUSE_REQUEST_BYTES))

    def _entry(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFREG | 0o600
        if inode in self._directories:
            entry.st_mode = stat.S_IFDIR | 0o700
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_size = self._sizes.get(inode, 0)
        entry.st_blksize = FUSE_REQUEST_BYTES
        entry.entry_timeout = entry.attr_timeout = _CACHED_S
        return entry

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """A file or directory that was created."""
        inode = self._directories[parent_inode].get(name)
        if inode is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._entry(inode)

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Type and size."""
        return self._entry(inode)

    async def setattr(
        self, inode: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields,
        fh: int | None, ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:  # fmt: skip
        """Truncation; other changes are ignored."""
        if fields.update_size:
            self._sizes[inode] = attr.st_size
        return self._entry(inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """A new file; its inode is its handle."""
        inode = self._directories[parent_inode][name] = next(self._new_inodes)
        self._sizes[inode] = 0
        return _file_info(inode, flags), self._entry(inode)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """A file that was created."""
        return _file_info(inode, flags)

    async def read(self, fh: int, off: int, size: int) -> memoryview:
        """Zeros up to the file's end."""
        return self._zeros[: max(0, min(size, self._sizes[fh] - off))]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Count the bytes."""
        self._sizes[fh] = max(self._sizes[fh], off + len(buf))
        return len(buf)

    async def flush(self, fh: int) -> None:
        """Nothing is pending."""

    async def fsync(self, fh: int, datasync: bool) -> None:
        """Nothing is pending."""

    async def release(self, fh: int) -> None:
        """Nothing is kept for an open file."""

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Forget a file."""
        del self._sizes[self._directories[parent_inode].pop(name)]

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """A new directory."""
        inode = self._directories[parent_inode][name] = next(self._new_inodes)
        self._directories[inode] = {}
        return self._entry(inode)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Forget an empty directory."""
        if self._directories[self._directories[parent_inode][name]]:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        del self._directories[self._directories[parent_inode].pop(name)]

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """What the directory holds now is what this handle lists."""
        handle = next(self._new_handles)
        self._listings[handle] = list(self._directories[inode].items())
        return handle

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Entries with attributes until the reply is full."""
        listing = self._listings[fh]
        for position in range(start_id, len(listing)):
            name, inode = listing[position]
            if not pyfuse3.readdir_reply(token, name, self._entry(inode), position + 1):
                return

    async def releasedir(self, fh: int) -> None:
        """The directory was closed."""
        del self._listings[fh]


def _file_info(inode: int, flags: int) -> pyfuse3.FileInfo:
    # As our mount: what is only written bypasses the page cache, what is read goes through it.
    return pyfuse3.FileInfo(fh=inode, direct_io=flags & os.O_ACCMODE == os.O_WRONLY)


async def _serve(directory: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, _announce, directory)
        nursery.start_soon(_stop_with_owner)
        await pyfuse3.main(min_tasks=_TASKS, max_tasks=_TASKS)
        nursery.cancel_scope.cancel()


def _announce(directory: str) -> None:
    """Say that the mount answers, from a thread: the loop serves the question."""
    device = os.stat(directory).st_dev
    read_ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    # Only root may set it; then it is set for our mounts too.
    if os.access(read_ahead, os.W_OK):
        read_ahead.write_text(str(FUSE_READ_AHEAD_BYTES // KiB))
    print("ready", flush=True)


async def _stop_with_owner() -> None:
    await trio.lowlevel.wait_readable(sys.stdin.fileno())
    pyfuse3.terminate()


def main() -> None:
    """Mount and serve."""
    directory = sys.argv[1]
    keep_freed_memory(_KEPT_MEMORY_BYTES)
    pyfuse3.init(NullOperations(), directory, {"default_permissions", "fsname=tectonicfs-null"})
    try:
        # An interrupt is the owner's affair: it closes our standard input.
        trio.run(_serve, directory, restrict_keyboard_interrupt_to_checkpoints=True)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
