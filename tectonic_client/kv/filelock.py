"""A fair lock between the processes of one machine, on bytes of a file.

SQLite's own write lock is correct but deals badly with contention: a waiter sleeps and polls, for
up to 100 ms, and one process that writes all the time starves the others for seconds. This lock
decides whose turn it is; it protects nothing by itself. The kernel wakes its waiters at once.

Whoever wants the lock first takes byte 0 (the gate), then byte 1 (the lock), then leaves the gate.
The kernel wakes waiters but hands nothing over, so without the gate a holder that lets go and asks
again would mostly win. With it, a waiter has the whole time that the lock is held to wake up and
step into the gate, and from there cannot be overtaken. Byte 2 is a lock of its own that is only
ever tried.

The locks belong to the open file description (F_OFD_SETLKW, fcntl(2)): they also work between two
instances in one process, and the kernel drops them when the process dies. A forked child would
share them and keep them alive, so the child closes its copies at once.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from tectonic_client.sharing import open_beside


def _flock(kind: int, byte: int) -> bytes:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid (must be 0), padded by "0q".
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)


_TAKE_GATE: Final = _flock(fcntl.F_WRLCK, 0)
_LEAVE_GATE: Final = _flock(fcntl.F_UNLCK, 0)
_TAKE_LOCK: Final = _flock(fcntl.F_WRLCK, 1)
_LEAVE_LOCK: Final = _flock(fcntl.F_UNLCK, 1)
_TAKE_SIDE_LOCK: Final = _flock(fcntl.F_WRLCK, 2)
_LEAVE_SIDE_LOCK: Final = _flock(fcntl.F_UNLCK, 2)


class FairFileLock:
    """`with lock:` waits without a bound, GIL released. One thread at a time may use an instance.

    Raises OSError where `path` cannot be opened or created.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = open_beside(path, os.O_RDWR, 0o644)
        _open_locks.add(self)

    def __enter__(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW, _TAKE_GATE)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW, _TAKE_LOCK)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LEAVE_GATE)

    def try_enter(self) -> bool:
        """Take the lock if nobody has it or waits for it; True: leave it by `leave`."""
        if not self._try(_TAKE_GATE):
            return False
        try:
            return self._try(_TAKE_LOCK)
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LEAVE_GATE)

    @contextmanager
    def side_lock(self) -> Iterator[bool]:
        """Another lock, on a third byte, that nobody waits for: True where it was taken."""
        taken = self._try(_TAKE_SIDE_LOCK)
        try:
            yield taken
        finally:
            if taken:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LEAVE_SIDE_LOCK)

    def _try(self, flock: bytes) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, flock)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody has it (fcntl(2))
            return False
        return True

    def leave(self) -> None:
        """Give back what `try_enter` took."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LEAVE_LOCK)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def close(self) -> None:
        _open_locks.discard(self)
        os.close(self._descriptor)


_open_locks: weakref.WeakSet[FairFileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
