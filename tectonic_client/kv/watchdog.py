"""Ends waits on sockets that got no answer: a database that hangs looks to libpq like a slow one.

`with watchdog.limit(socket, seconds):` shuts the socket down when the time is over, and whoever
reads from it sees the connection closed. Server-side timeouts come first where the server is well;
this one is for a frozen server or host.

One thread for all sockets, started with the first. The lock is held while a socket is shut down,
so a socket is never touched after its `with` block.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class SocketWatchdog:
    """Watches the sockets of one engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expiries: dict[int, tuple[float, socket.socket]] = {}
        self._next_number = 0
        self._wakes_at = float("inf")
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, wire: socket.socket, seconds: float) -> Iterator[None]:
        """Shut `wire` down if the block takes longer than `seconds`."""
        number = self._add(time.monotonic() + seconds, wire)
        try:
            yield
        finally:
            with self._changed:
                self._expiries.pop(number, None)

    def close(self) -> None:
        """Stop the thread; what is watched is no longer limited."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _add(self, expiry: float, wire: socket.socket) -> int:
        with self._changed:
            self._next_number += 1
            self._expiries[self._next_number] = (expiry, wire)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-watchdog", daemon=True)
                self._thread.start()
            elif expiry < self._wakes_at:
                self._changed.notify()
            return self._next_number

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._shut_down_overdue(time.monotonic())
                self._wakes_at = min(
                    (expiry for expiry, _ in self._expiries.values()), default=float("inf")
                )
                idle = not self._expiries
                self._changed.wait(None if idle else self._wakes_at - time.monotonic())

    def _shut_down_overdue(self, now: float) -> None:
        overdue = [number for number, (expiry, _) in self._expiries.items() if expiry <= now]
        for number in overdue:
            _, wire = self._expiries.pop(number)
            # The peer may have closed it at this moment, which is what we want.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
