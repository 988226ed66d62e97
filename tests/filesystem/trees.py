"""The same path operations on a host directory and on a tectonicfs FileSystem.

Each operation returns a comparable value or the errno it failed with.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from fusefs.errors import errno_of
from tectonic_client.errors import InvalidArgument, TectonicError
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.types import AttributeChanges, Attributes, Owner

Outcome = object
OWNER = Owner(os.getuid(), os.getgid())


def _stat_view(mode: int, nlink: int, size: int) -> tuple[int, int, int]:
    """What both sides must agree on; a directory's size is its file system's own business."""
    is_directory = mode & 0o170000 == 0o040000
    return mode, nlink, 0 if is_directory else size


class HostTree:
    """The oracle: a directory of the host."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)

    def run(self, operation: str, *arguments: object) -> Outcome:
        """Result of the operation, or its errno."""
        try:
            return getattr(self, operation)(*arguments)
        except OSError as error:
            return f"errno {errno.errorcode[error.errno or 0]}"

    def _at(self, path: bytes) -> bytes:
        return self._root + path

    def create(self, path: bytes, mode: int) -> None:
        descriptor = os.open(self._at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        os.fchmod(descriptor, mode)
        os.close(descriptor)

    def write(self, path: bytes, offset: int, data: bytes) -> int:
        descriptor = os.open(self._at(path), os.O_WRONLY)
        try:
            return os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)

    def append(self, path: bytes, data: bytes) -> int:
        descriptor = os.open(self._at(path), os.O_WRONLY | os.O_APPEND)
        try:
            return os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        descriptor = os.open(self._at(path), os.O_RDONLY)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def truncate(self, path: bytes, size: int) -> None:
        os.truncate(self._at(path), size)

    def mkdir(self, path: bytes, mode: int) -> None:
        os.mkdir(self._at(path))
        os.chmod(self._at(path), mode)

    def rmdir(self, path: bytes) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: bytes) -> None:
        os.unlink(self._at(path))

    def rename(self, old: bytes, new: bytes) -> None:
        os.rename(self._at(old), self._at(new))

    def link(self, old: bytes, new: bytes) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: bytes) -> bytes:
        return os.readlink(self._at(path))

    def chmod(self, path: bytes, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        os.utime(self._at(path), ns=(atime_ns, mtime_ns))
        found = os.stat(self._at(path))
        return found.st_atime_ns, found.st_mtime_ns

    def listdir(self, path: bytes) -> list[bytes]:
        return sorted(os.listdir(self._at(path)))

    def stat(self, path: bytes) -> tuple[int, int, int]:
        found = os.lstat(self._at(path))
        return _stat_view(found.st_mode, found.st_nlink, found.st_size)


class VolumeTree:
    """The subject: walks paths the way the kernel does and calls FileSystem."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._fs = filesystem

    async def run(self, operation: str, *arguments: object) -> Outcome:
        """Result of the operation, or its errno."""
        method: Callable[..., Awaitable[Outcome]] = getattr(self, operation)
        try:
            return await method(*arguments)
        except TectonicError as error:
            return f"errno {errno.errorcode[errno_of(error, operation)]}"

    async def _parent(self, path: bytes) -> tuple[int, bytes]:
        *directories, name = path.split(b"/")[1:]
        inode = await self._fs.resolve(b"/" + b"/".join(directories))
        await self._fs.lookup(inode, b".")
        return inode, name

    async def _existing(self, path: bytes) -> Attributes:
        return await self._fs.getattr(await self._fs.resolve(path))

    async def create(self, path: bytes, mode: int) -> None:
        parent, name = await self._parent(path)
        _, handle = await self._fs.create(parent, name, mode, OWNER, os.O_WRONLY | os.O_EXCL)
        await self._fs.flush(handle)
        await self._fs.release(handle)

    async def _with_file(
        self, path: bytes, flags: int, action: Callable[[int], Awaitable[Outcome]]
    ) -> Outcome:
        handle = await self._fs.open(await self._fs.resolve(path), flags)
        try:
            return await action(handle)
        finally:
            await self._fs.flush(handle)
            await self._fs.release(handle)

    async def write(self, path: bytes, offset: int, data: bytes) -> Outcome:
        return await self._with_file(
            path, os.O_WRONLY, lambda handle: self._fs.write(handle, offset, data)
        )

    async def append(self, path: bytes, data: bytes) -> Outcome:
        flags = os.O_WRONLY | os.O_APPEND
        return await self._with_file(path, flags, lambda handle: self._fs.write(handle, 0, data))

    async def read(self, path: bytes, offset: int, size: int) -> Outcome:
        async def get(handle: int) -> bytes:
            return bytes(await self._fs.read(handle, offset, size))

        return await self._with_file(path, os.O_RDONLY, get)

    async def truncate(self, path: bytes, size: int) -> None:
        inode = await self._fs.resolve(path)
        await self._fs.setattr(inode, AttributeChanges(size=size))

    async def mkdir(self, path: bytes, mode: int) -> None:
        parent, name = await self._parent(path)
        await self._fs.mkdir(parent, name, mode, OWNER)

    async def rmdir(self, path: bytes) -> None:
        await self._fs.rmdir(*await self._parent(path))

    async def unlink(self, path: bytes) -> None:
        await self._fs.unlink(*await self._parent(path))

    async def rename(self, old: bytes, new: bytes) -> None:
        await self._fs.rename(*await self._parent(old), *await self._parent(new))

    async def link(self, old: bytes, new: bytes) -> None:
        inode = await self._fs.resolve(old, follow=False)
        await self._fs.link(inode, *await self._parent(new))

    async def symlink(self, target: bytes, path: bytes) -> None:
        parent, name = await self._parent(path)
        await self._fs.symlink(parent, name, target, OWNER)

    async def readlink(self, path: bytes) -> bytes:
        inode = await self._fs.resolve(path, follow=False)
        if (await self._fs.getattr(inode)).mode & 0o170000 != 0o120000:
            # The kernel answers this itself (readlink(2): not a symbolic link).
            raise InvalidArgument("not a link")
        return await self._fs.readlink(inode)

    async def chmod(self, path: bytes, mode: int) -> None:
        inode = await self._fs.resolve(path)
        await self._fs.setattr(inode, AttributeChanges(mode=mode))

    async def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        inode = await self._fs.resolve(path)
        changes = AttributeChanges(atime_ns=atime_ns, mtime_ns=mtime_ns)
        await self._fs.setattr(inode, changes)
        found = await self._fs.getattr(inode)
        return found.atime_ns, found.mtime_ns

    async def listdir(self, path: bytes) -> list[bytes]:
        handle = await self._fs.opendir(await self._fs.resolve(path))
        names, cookie = [], 0
        while page := await self._fs.readdir(handle, cookie, 3):
            names += [entry.name for entry in page]
            cookie = page[-1].cookie
        await self._fs.releasedir(handle)
        return sorted(names)

    async def stat(self, path: bytes) -> tuple[int, int, int]:
        found = await self._fs.getattr(await self._fs.resolve(path, follow=False))
        return _stat_view(found.mode, found.nlink, found.size)
