"""System calls as data, and a runner that makes them below a directory and notes what came back.

The same calls made below two directories must give the same notes: values where they succeed, errno
where they fail. What legitimately differs (inode numbers, sizes of directories, the clock) is not
noted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class Runner:
    """Makes calls below `root`. Open files are kept in numbered slots."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: dict[int, int] = {}

    def run(self, call: Call) -> tuple[str, Any]:
        """("ok", value) or ("error", name of the errno)."""
        method: Callable[..., Any] = getattr(self, f"do_{call.name}")
        try:
            return "ok", method(*call.arguments)
        except OSError as error:
            return "error", errno.errorcode[error.errno or 0]

    def close_all(self) -> None:
        """Give the slots free."""
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
                found.append((relative, self._facts(os.lstat(path)), content))
        return sorted(found, key=lambda row: row[0])

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path)

    @staticmethod
    def _facts(found: os.stat_result) -> tuple[int, ...]:
        size = -1 if stat.S_ISDIR(found.st_mode) else found.st_size
        return (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, size)

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
        return os.pwrite(self._slot(slot), pattern(offset + length, length), offset)

    def do_write(self, slot: int, length: int) -> tuple[int, int]:
        descriptor = self._slot(slot)
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

    def do_rename(self, old: str, new: str, flags: int) -> None:
        names = os.fsencode(self._path(old)), os.fsencode(self._path(new))
        if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

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
