"""One file per mount that tells who serves it, locked by the daemon for as long as it lives.

The lock is the truth about life: the kernel drops it when the process ends, however it ends, and
nobody can mistake another process with the same id for the daemon. The daemon writes how it ended
into the file before it goes; whoever holds the file open and finds no such word knows that the
daemon died without flushing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from tectonic_client.errors import MountError
from tectonic_client.limits import DAEMON_EXIT_S

CLEAN: Final = "clean"

_LOCK_TRIES: Final = 10
_LOCK_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class DaemonState:
    """What a mount's file says. `outcome`: None while it runs, CLEAN, or an error.

    `volume` is the metadata URL without its password. `mounted`: the mount has answered once.
    """

    pid: int
    directory: str
    volume: str | None = None
    log_file: str | None = None
    outcome: str | None = None
    mounted: bool = True


def _candidates(user_id: int) -> list[str]:
    """Directories that may hold the files of a user's mounts, the preferred one first.

    The environment is not asked: `umount` may run with another one than `mount` did.
    """
    preferred = "/run" if user_id == 0 else f"/run/user/{user_id}"
    return [f"{preferred}/tectonicfs", f"/tmp/tectonicfs-{user_id}"]


def _own_directory() -> str:
    user_id = os.getuid()
    for path in _candidates(user_id):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            found = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user_id and os.access(path, os.W_OK):
            return path
    raise MountError(f"no directory for the mount's state: cannot write {_candidates(user_id)}")


def _file_name(directory: str) -> str:
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:32] + ".json"


def _socket_beside(path: str) -> str:
    return path.removesuffix(".json") + ".sock"


# --- the daemon's side ------------------------------------------------------------------------


class Claim:
    """The daemon's own file, locked."""

    def __init__(self, descriptor: int, path: str, state: DaemonState) -> None:
        self._descriptor = descriptor
        self._path = path
        self._state = state
        self.socket_path = _socket_beside(path)
        """Where the daemon's control socket belongs; nobody else uses it while this lives."""
        self._write(replace(state, mounted=False))

    def _write(self, state: DaemonState) -> None:
        data = json.dumps(asdict(state)).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def mounted(self) -> None:
        """Say that the mount answers."""
        self._write(self._state)

    def finish(self, outcome: str) -> None:
        """Say how the daemon ended. The lock stays until the process is gone."""
        self._write(replace(self._state, outcome=outcome))
        os.unlink(self._path)


def claim(directory: str, volume: str, log_file: str | None) -> Claim:
    """Become the daemon of `directory`. Raises MountError when another one lives, or where its file
    cannot be one of ours: a link would lead to what is somebody's."""
    path = os.path.join(_own_directory(), _file_name(directory))
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise MountError(
                f"cannot keep the state of the mount in {path}: {error.strerror}; look what is"
                " there, and remove it"
            ) from error
        if not _lock_soon(descriptor):
            other = _read(descriptor)
            os.close(descriptor)
            raise MountError(
                f"the daemon of an earlier mount of {directory} (pid {other.pid}) still runs:"
                " it ends when its last file is closed and everything is flushed"
            )
        if _is_current(descriptor, path):
            return Claim(descriptor, path, DaemonState(os.getpid(), directory, volume, log_file))
        # Its last owner removed the file between our opening and locking it.
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_soon(descriptor: int) -> bool:
    """Who looks whether a daemon lives holds the lock for a moment too."""
    for _ in range(_LOCK_TRIES):
        if _try_lock(descriptor):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _is_current(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> DaemonState:
    data = os.pread(descriptor, 65_536, 0)
    try:
        return DaemonState(**json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        # Locked before it is written: the daemon is just starting.
        raise MountError("the mount is just starting or ending: try again") from error


# --- everybody else's side --------------------------------------------------------------------


class Daemon:
    """A daemon that was alive when it was found."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self.socket_path = _socket_beside(path)
        self.state = _read(descriptor)
        self._waiter: threading.Thread | None = None

    def terminate(self, user_id: int) -> None:
        """Tell it to end, if it belongs to `user_id`. Raises MountError where it does not.

        It is known by the lock that it holds: what the file says is its owner's word, and must not
        make root send signals to whom they like.
        """
        holder = _holder(self._descriptor)
        try:
            process = os.pidfd_open(holder)
        except OSError:
            return  # it has just ended, or cannot be seen from here
        try:
            if _holder(self._descriptor) == holder:
                if os.stat(f"/proc/{holder}").st_uid != user_id:
                    raise MountError(
                        f"pid {holder}, which serves {self.state.directory}, does not belong to"
                        f" user {user_id}: look at it, and end it yourself"
                    )
                signal.pidfd_send_signal(process, signal.SIGTERM)
        except (ProcessLookupError, FileNotFoundError):
            return
        finally:
            os.close(process)

    def _start_waiter(self) -> threading.Thread:
        """The thread that takes the lock, which blocks without a timeout of its own.

        One for all waits: a second would still hold the lock when the first wait has ended and the
        descriptor is closed, and the daemon would seem to live. It goes with this process.
        """
        if self._waiter is None:
            self._waiter = threading.Thread(
                target=fcntl.flock, args=(self._descriptor, fcntl.LOCK_EX), daemon=True
            )
            self._waiter.start()
        return self._waiter

    def wait(self, timeout_s: float, on_second: Callable[[float], None]) -> str | None:
        """Wait until the process is gone; how it ended, None for not by its own will.

        A thread that hangs in the kernel (a frozen device) keeps a process that has said how it
        ended: that word counts after DAEMON_EXIT_S. Calls `on_second` with the seconds waited so
        far. Raises MountError at the timeout.
        """
        waiter = self._start_waiter()
        waited_s, ended_s = 0.0, 0.0
        while waited_s < timeout_s:
            step_s = min(1.0, timeout_s - waited_s)
            waiter.join(step_s)
            outcome = self._outcome()
            if not waiter.is_alive():
                return outcome
            if outcome is not None and (ended_s := ended_s + step_s) > DAEMON_EXIT_S:
                return outcome
            waited_s += step_s
            if waited_s < timeout_s:
                on_second(waited_s)
        raise MountError(
            f"the daemon (pid {self.state.pid}) is still flushing after {timeout_s:.0f} s:"
            " wait for it to end, or look at its log"
        )

    def _outcome(self) -> str | None:
        try:
            return _read(self._descriptor).outcome
        except MountError:  # it is writing it now
            return None


def _holder(descriptor: int) -> int:
    """The process that holds the file's lock, as the kernel tells (proc_locks(5)).

    Raises MountError where it tells nothing.
    """
    found = os.fstat(descriptor)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == file:
            return int(fields[4])
    raise MountError("who serves the mount cannot be told: it just ended, or /proc is restricted")


@contextmanager
def living_daemon(directory: str, user_id: int) -> Iterator[Daemon | None]:
    """The daemon of a mount that `user_id` made, None when there is none alive.

    The file of one that was killed is removed.
    """
    for folder in _candidates(user_id):
        path = os.path.join(folder, _file_name(directory))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid != user_id:
                continue  # Anybody may make files in /tmp; theirs could name any process.
            if not _try_lock(descriptor):
                yield Daemon(descriptor, path)
                return
            if _is_current(descriptor, path):
                with suppress(FileNotFoundError):
                    os.unlink(_socket_beside(path))
                os.unlink(path)
        finally:
            os.close(descriptor)
    yield None
