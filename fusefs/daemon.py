"""Going to the background: fork, detach from the terminal, tell the parent how it went.

The fork comes first: no event loop, thread, lock or database connection crosses it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from fusefs.errors import root_cause
from tectonic_client.errors import MountError, TectonicError

_log = logging.getLogger(__name__)

_READY: Final = b"+"


class _Announcement:
    """The child's end of the pipe: one message, readiness or an error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def ready(self) -> None:
        self._send(_READY)

    def failed(self, reason: str) -> None:
        self._send(reason.encode(errors="replace"))

    def _send(self, message: bytes) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, message)
            os.close(self._descriptor)
            self._descriptor = None


def start(serve: Callable[[Callable[[], None]], None], open_log: Callable[[], None]) -> int:
    """Run `serve(on_ready)` in a daemon; returns its pid once it has called `on_ready`.

    `open_log` is called in the daemon before anything else. Raises MountError with the daemon's
    reason if it ends before it is ready.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _run(serve, open_log, _Announcement(write_end))
    os.close(write_end)
    return _await_ready(pid, read_end)


def _await_ready(pid: int, read_end: int) -> int:
    try:
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    if message == _READY:
        return pid
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    raise MountError(message.decode(errors="replace") or _how_ended(status))


def _how_ended(status: int) -> str:
    """Of a daemon that said nothing."""
    if status == 0:
        return "the daemon was told to end before the mount answered"
    if status < 0:
        return f"the daemon was killed while mounting ({signal.strsignal(-status)})"
    return f"the daemon ended while mounting (exit status {status})"


def _run(
    serve: Callable[[Callable[[], None]], None], open_log: Callable[[], None],
    announcement: _Announcement,
) -> NoReturn:  # fmt: skip
    """The daemon's whole life. It never returns into the code that forked it."""
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        open_log()
        serve(announcement.ready)
        status = 0
    except BaseException as error:  # noqa: BLE001 - nobody above would see it
        cause = root_cause(error)
        if isinstance(cause, TectonicError):
            _log.error("%s", cause)
            announcement.failed(str(cause))
        else:
            _log.error("the daemon failed", exc_info=error)
            announcement.failed(f"the daemon failed: {cause!r}")
    finally:
        logging.shutdown()
        os._exit(status)
