"""What one operation of a door does, and what it waits for: the flight recorder's unit.

The door makes the operation *current* for its task (a context variable, which child tasks inherit);
whoever makes it wait, below, says so with `Waiting`. Tasks that outlive the operation they were
begun by (puts, read-ahead) begin with `detach`: who waits for them says so himself. Belongs to the
event loop.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from types import TracebackType
from typing import Final

import trio

from tectonic_client.errors import FileSystemError, NoSpace
from tectonic_client.metrics import Meter

METADATA: Final = 0
STORE: Final = 1
MEMORY: Final = 2
FOLLOWERS: Final = 3

WAITS: Final = ("metadata", "store", "memory", "followers")
"""Names of what an operation waits for, by number."""


class Activity:
    """One operation, under way or ended. Times in nanoseconds of `time.perf_counter_ns`.

    Several child tasks may wait at once: `waited_ns` adds their times, `waiting` counts them.
    """

    __slots__ = (
        "elapsed_ns", "inode", "offset", "operation", "outcome", "size", "started_ns", "store",
        "waited_ns", "waiting",
    )  # fmt: skip

    def __init__(self, operation: str, inode: int, offset: int, size: int) -> None:
        self.operation = operation
        self.inode = inode
        self.offset = offset
        self.size = size
        self.started_ns = time.perf_counter_ns()
        self.elapsed_ns = 0
        self.outcome: int | None = None
        """errno, 0 for success; None while it is under way."""
        self.waited_ns = [0, 0, 0, 0]
        self.waiting = [0, 0, 0, 0]
        self.store: str | None = None
        """Name of the store that it waited for last."""


current: Final[ContextVar[Activity | None]] = ContextVar("current", default=None)
"""The operation that the task at hand works for."""


class Waiting:
    """A context manager around a wait for `kind`; the time goes into `meter` too, if there is one.

    An exception that passes counts as a failure of the meter, unless it is a POSIX answer or the
    caller's own cancellation.
    """

    __slots__ = ("_activity", "_kind", "_meter", "_started_ns", "_store")

    def __init__(self, kind: int, meter: Meter | None = None, store: str | None = None) -> None:
        self._kind = kind
        self._meter = meter
        self._store = store

    def __enter__(self) -> None:
        self._activity = activity = current.get()
        if activity is not None:
            activity.waiting[self._kind] += 1
            if self._store is not None:
                activity.store = self._store
        self._started_ns = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        elapsed_ns = time.perf_counter_ns() - self._started_ns
        activity = self._activity
        if activity is not None:
            activity.waiting[self._kind] -= 1
            activity.waited_ns[self._kind] += elapsed_ns
        if self._meter is not None:
            self._meter.add(elapsed_ns, failed=kind is not None and _is_failure(kind))


def _is_failure(kind: type[BaseException]) -> bool:
    return kind is NoSpace or not issubclass(kind, (FileSystemError, trio.Cancelled))


def detach() -> None:
    """The task at hand works for no operation from now on."""
    current.set(None)
