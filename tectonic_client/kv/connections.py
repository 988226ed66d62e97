"""A bounded stack of database connections, shared by the threads of a process.

Owns how many there are and who waits. The last one used is the next one taken: its caches are
warm, and those at the bottom of the stack, which a burst needed, are closed once they were idle for
IDLE_CONNECTION_S. It knows nothing of databases; engines pass in how to open and close.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tectonic_client.errors import MetadataUnavailable
from tectonic_client.limits import IDLE_CONNECTION_S

C = TypeVar("C")


class Connections(Generic[C]):
    """At most `limit` connections of `name` (for messages); `wait_s` bounds `take`.

    `open_one` is given the seconds that it may take.
    """

    def __init__(
        self,
        name: str,
        *,
        open_one: Callable[[float], C],
        close_one: Callable[[C], None],
        limit: int,
        wait_s: float,
    ) -> None:
        self._name = name
        self._open_one = open_one
        self._close_one = close_one
        self._limit = limit
        self._wait_s = wait_s
        self._idle: list[tuple[C, float]] = []
        """With the time since when."""
        self._opened = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def take(self, wait_s: float | None = None) -> C:
        """An idle connection or a new one, which the caller gives back or discards.

        Raises MetadataUnavailable (closed, all in use for too long), and what opening raises.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        give_up_at = time.monotonic() + wait_s
        with self._changed:
            if not self._changed.wait_for(self._may_take, wait_s):
                raise MetadataUnavailable(
                    f"{self._name}: all {self._limit} connections in use for {wait_s:.0f} s"
                )
            if self._closed:
                raise MetadataUnavailable(f"{self._name} is closed")
            if self._idle:
                return self._idle.pop()[0]
            self._opened += 1
        try:
            return self._open_one(give_up_at - time.monotonic())
        except BaseException:
            self._forget_one()
            raise

    def give(self, connection: C) -> None:
        """Give back a connection that is fit for the next one."""
        now = time.monotonic()
        unused = [connection]
        with self._changed:
            if not self._closed:
                unused = self._pop_unused(now)
                self._idle.append((connection, now))
                self._changed.notify()
        for connection in unused:
            self.discard(connection)

    def _pop_unused(self, now: float) -> list[C]:
        """Take those from the bottom of the stack that nobody has needed for long."""
        unused = []
        while self._idle and self._idle[0][1] < now - IDLE_CONNECTION_S:
            unused.append(self._idle.pop(0)[0])
        return unused

    def discard(self, connection: C) -> None:
        """Give back a connection that is not."""
        self._close_one(connection)
        self._forget_one()

    def discard_idle(self) -> None:
        """Close what is not in use: after one connection broke, the others likely are, too."""
        with self._changed:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            self.discard(connection)

    def close(self) -> None:
        """Close all; those in use when they come back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.discard_idle()

    def _may_take(self) -> bool:
        return self._closed or bool(self._idle) or self._opened < self._limit

    def _forget_one(self) -> None:
        with self._changed:
            self._opened -= 1
            self._changed.notify()
