"""Calls between the processes of one machine: a byte written into a file wakes who watches it.

The kernel's inotify(7) tells of each write at once and costs nothing while there is none. The file
holds nothing; it is made when first needed and stays. Calls travel as far as the file is the same
inode: not between machines.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

from tectonic_client.errors import MetadataUnavailable
from tectonic_client.sharing import open_beside

_IN_MODIFY: Final = 0x2
_READ_BYTES: Final = 4096
"""Room for many events; the kernel merges equal ones that follow each other."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class WakeFileListener:
    """Hears the writes into `path` (see `kv.port.Listener`). Raises MetadataUnavailable."""

    def __init__(self, path: str) -> None:
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), path)
        try:
            _make(path)
            name = ctypes.c_char_p(os.fsencode(path))
            _checked(_libc.inotify_add_watch(self._descriptor, name, _IN_MODIFY), path)
        except MetadataUnavailable:
            self.close()
            raise

    def fileno(self) -> int:
        return self._descriptor

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._descriptor, _READ_BYTES):
                pass

    def close(self) -> None:
        os.close(self._descriptor)


class WakeFile:
    """Calls those who listen to `path`. The descriptor is opened by the first call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None

    def call(self) -> None:
        """Wake all listeners. Raises MetadataUnavailable."""
        try:
            if self._descriptor is None:
                self._descriptor = open_beside(self._path, os.O_WRONLY, 0o644)
            os.pwrite(self._descriptor, b"\0", 0)
        except OSError as error:
            raise MetadataUnavailable(f"{self._path}: {error.strerror}") from error

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _make(path: str) -> None:
    try:
        os.close(open_beside(path, os.O_RDONLY, 0o644))
    except OSError as error:
        raise MetadataUnavailable(f"{path}: {error.strerror}") from error


def _checked(result: int, path: str) -> int:
    if result < 0:
        raise MetadataUnavailable(f"watching {path}: {os.strerror(ctypes.get_errno())}")
    return result
