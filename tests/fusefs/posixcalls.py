"""System calls as data, and a runner that makes them below a directory and notes what came back.

The same calls made below two directories must give the same notes: values where they succeed, errno
where they fail. What legitimately differs (inode numbers, sizes of directories, the clock) is not
noted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100


@dataclass(frozen=True)
class Call:
    """A system call: the name of a `Runner` method and its arguments."""

    name: str
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


def pattern(seed: int, length: int) -> bytes:
    """Bytes that tell where they come from."""
    return random.Random(seed).randbytes(length)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class _Mapping(NamedTuple):
    """A shared, writable mapping, and a descriptor that tells how long its file is by now."""

    view: mmap.mmap
    descriptor: int

    def close(self) -> None:
        self.view.close()
        os.close(self.descriptor)


class _Stretch(NamedTuple):
    """Part of a mapping that lies in its file."""

    view: mmap.mmap
    start: int
    end: int


class Runner:
    """Makes calls below `root`. Open files are kept in numbered slots; one file may be mapped."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: dict[int, int] = {}
        self._mapping: _Mapping | None = None

    def run(self, call: Call) -> tuple[str, Any]:
        """("ok", value) or ("error", name of the errno)."""
        method: Callable[..., Any] = getattr(self, f"do_{call.name}")
        try:
            return "ok", method(*call.arguments)
        except OSError as error:
            return "error", errno.errorcode[error.errno or 0]

    def close_all(self) -> None:
        """Give the slots free, and the mapping."""
        self._unmap()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def snapshot(self) -> list[tuple[Any, ...]]:
        """Everything that can be seen: names, attributes, contents, targets."""
        found: list[tuple[Any, ...]] = []
        for folder, folders, files in os.walk(self._root):
            for name in sorted(folders + files):
                path = os.path.join(folder, name)
                relative = os.path.relpath(path, self._root)
                content: object = None
                if os.path.islink(path):
                    content = os.readlink(path)
                elif os.path.isfile(path):
                    with open(path, "rb") as file:
                        content = file.read()
                found.append((relative, self._facts(os.lstat(path)), content, self._xattrs(path)))
        return sorted(found, key=lambda row: row[0])

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path)

    @staticmethod
    def _facts(found: os.stat_result) -> tuple[int, ...]:
        size = -1 if stat.S_ISDIR(found.st_mode) else found.st_size
        kind = (found.st_mode, found.st_nlink, found.st_rdev)
        return (*kind, found.st_uid, found.st_gid, size)

    @staticmethod
    def _xattrs(path: str) -> dict[str, bytes]:
        names = os.listxattr(path, follow_symlinks=False)
        return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}

    def _slot(self, slot: int) -> int:
        if slot not in self._open:
            raise OSError(errno.EBADF, "empty slot")
        return self._open[slot]

    # --- open files ---------------------------------------------------------------------------

    def do_open(self, slot: int, path: str, flags: int) -> None:
        if slot in self._open:
            os.close(self._open.pop(slot))
        # O_NONBLOCK: opening a fifo must not wait for the other end.
        self._open[slot] = os.open(self._path(path), flags | os.O_NONBLOCK, 0o640)

    def do_close(self, slot: int) -> None:
        os.close(self._slot(slot))
        del self._open[slot]

    def do_pwrite(self, slot: int, offset: int, length: int) -> int:
        return os.pwrite(self._written(slot), pattern(offset + length, length), offset)

    def _written(self, slot: int) -> int:
        """The slot's descriptor, of a file whose bits no write takes away: there the mount differs
        (fusefs/POSIX.md)."""
        descriptor = self._slot(slot)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            os.fchmod(descriptor, stat.S_IMODE(mode) & 0o1777)
        return descriptor

    def do_write(self, slot: int, length: int) -> tuple[int, int]:
        descriptor = self._written(slot)
        written = os.write(descriptor, pattern(length, length))
        return written, os.lseek(descriptor, 0, os.SEEK_CUR)

    def do_pread(self, slot: int, offset: int, length: int) -> bytes:
        return os.pread(self._slot(slot), length, offset)

    def do_seek_end(self, slot: int) -> int | None:
        descriptor = self._slot(slot)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return None  # The end of a directory is any number.
        return os.lseek(descriptor, 0, os.SEEK_END)

    def do_ftruncate(self, slot: int, size: int) -> tuple[int, ...]:
        os.ftruncate(self._slot(slot), size)
        return self._facts(os.fstat(self._slot(slot)))

    def do_fsync(self, slot: int) -> None:
        os.fsync(self._slot(slot))

    def do_fstat(self, slot: int) -> tuple[int, ...]:
        return self._facts(os.fstat(self._slot(slot)))

    def do_fchmod(self, slot: int, mode: int) -> tuple[int, ...]:
        os.fchmod(self._slot(slot), mode)
        return self._facts(os.fstat(self._slot(slot)))

    # --- the mapping --------------------------------------------------------------------------

    def do_map(self, slot: int) -> str:
        """Map the slot's file; the mapping stays when the slot is used for another file."""
        descriptor = self._slot(slot)
        self._unmap()
        found = os.fstat(descriptor)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 1  # others have no size in common
        if not size:
            return "empty"
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            return "appending"  # fusefs/POSIX.md tells why the mount refuses it
        view = mmap.mmap(descriptor, size)
        self._mapping = _Mapping(view, os.dup(descriptor))
        return "mapped"

    def do_map_write(self, offset: int, length: int) -> int:
        found = self._mapped(offset, length)
        found.view[found.start : found.end] = pattern(offset, found.end - found.start)
        return found.end

    def do_map_read(self, offset: int, length: int) -> bytes:
        found = self._mapped(offset, length)
        return found.view[found.start : found.end]

    def do_map_sync(self) -> None:
        self._mapped(0, 0).view.flush()

    def do_unmap(self) -> None:
        self._unmap()

    def _mapped(self, offset: int, length: int) -> _Stretch:
        """What of the range may be touched: behind the end of the file is SIGBUS."""
        if self._mapping is None:
            raise OSError(errno.EFAULT, "nothing is mapped")
        view, descriptor = self._mapping
        size = min(len(view), os.fstat(descriptor).st_size)
        start = min(offset, size)
        return _Stretch(view, start, min(start + length, size))

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    # --- names --------------------------------------------------------------------------------

    def do_mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def do_rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def do_unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def do_link(self, path: str, new: str) -> None:
        os.link(self._path(path), self._path(new), follow_symlinks=False)

    def do_symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._path(path))

    def do_readlink(self, path: str) -> str:
        return os.readlink(self._path(path))

    def do_mkfifo(self, path: str) -> None:
        os.mkfifo(self._path(path), 0o600)

    def do_mknod(self, path: str, mode: int, major: int, minor: int) -> tuple[int, ...]:
        os.mknod(self._path(path), mode, os.makedev(major, minor))
        return self._facts(os.lstat(self._path(path)))

    def do_rename(self, old: str, new: str, flags: int) -> None:
        names = os.fsencode(self._path(old)), os.fsencode(self._path(new))
        _checked(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags))

    def do_listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._path(path)))

    # --- attributes ---------------------------------------------------------------------------

    def do_stat(self, path: str) -> tuple[int, ...]:
        return self._facts(os.stat(self._path(path)))

    def do_lstat(self, path: str) -> tuple[int, ...]:
        return self._facts(os.lstat(self._path(path)))

    def do_truncate(self, path: str, size: int) -> None:
        os.truncate(self._path(path), size)

    def do_chmod(self, path: str, mode: int) -> tuple[int, ...]:
        os.chmod(self._path(path), mode)
        return self._facts(os.stat(self._path(path)))

    def do_chown(self, path: str, uid: int, gid: int) -> tuple[int, ...]:
        os.chown(self._path(path), uid, gid, follow_symlinks=False)
        return self._facts(os.lstat(self._path(path)))

    def do_utime(self, path: str, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        os.utime(self._path(path), ns=(atime_ns, mtime_ns), follow_symlinks=False)
        found = os.lstat(self._path(path))
        return found.st_atime_ns, found.st_mtime_ns

    # --- extended attributes ------------------------------------------------------------------

    def do_setxattr(self, path: str, name: str, length: int, flags: int, follow: bool) -> None:
        where = self._path(path)
        os.setxattr(where, name, pattern(length, length), flags, follow_symlinks=follow)

    def do_fsetxattr(self, slot: int, name: str, length: int) -> None:
        os.setxattr(self._slot(slot), name, pattern(length, length))

    def do_getxattr(self, path: str, name: str, size: int) -> tuple[int, bytes]:
        """With a buffer of `size`, whose length 0 asks for the value's."""
        buffer = ctypes.create_string_buffer(size) if size else None
        where = os.fsencode(self._path(path))
        found = _checked(_libc.lgetxattr(where, name.encode(), buffer, size))
        return found, b"" if buffer is None else buffer.raw[:found]

    def do_listxattr(self, path: str, size: int) -> tuple[int, list[bytes]]:
        """As `do_getxattr`; the order of the names is anybody's."""
        buffer = ctypes.create_string_buffer(size) if size else None
        found = _checked(_libc.llistxattr(os.fsencode(self._path(path)), buffer, size))
        return found, [] if buffer is None else sorted(buffer.raw[:found].split(b"\0"))

    def do_removexattr(self, path: str, name: str, follow: bool) -> None:
        os.removexattr(self._path(path), name, follow_symlinks=follow)
