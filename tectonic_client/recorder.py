"""The flight recorder of a client: meters of its operations, those under way, the most recent ones.

Bounded memory, no I/O: it hands out lines, others write them. Used from the event loop only, but
for `lines`.
"""

from __future__ import annotations

import errno
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tectonic_client.activity import WAITS, Activity, current
from tectonic_client.limits import RECORDED_OPERATIONS
from tectonic_client.metrics import Measured, Meter


class Recorder:
    """`on_failure` is called when an operation ends with EIO: nobody foresaw what happened, or a
    store failed."""

    def __init__(self, capacity: int = RECORDED_OPERATIONS) -> None:
        self._meters: dict[str, Meter] = {}
        self._errors: Counter[tuple[str, int]] = Counter()
        self._under_way: dict[Activity, None] = {}
        self._recent: deque[Activity] = deque(maxlen=capacity)
        self.on_failure: Callable[[], None] | None = None

    def begin(self, operation: str, inode: int, offset: int = 0, size: int = 0) -> Activity:
        """An operation begins, in the task at hand; `end` ends it."""
        activity = Activity(operation, inode, offset, size)
        self._under_way[activity] = None
        current.set(activity)
        return activity

    def end(self, activity: Activity, outcome: int, transferred_bytes: int = 0) -> None:
        """It has ended, in its task; `outcome` is its errno, 0 for success."""
        current.set(None)
        activity.elapsed_ns = elapsed_ns = time.perf_counter_ns() - activity.started_ns
        activity.outcome = outcome
        del self._under_way[activity]
        self._recent.append(activity)
        meter = self._meters.get(activity.operation)
        if meter is None:
            meter = self._meters[activity.operation] = Meter()
        meter.add(elapsed_ns, transferred_bytes, failed=outcome != 0)
        if outcome:
            self._errors[activity.operation, outcome] += 1
            if outcome == errno.EIO and self.on_failure is not None:
                self.on_failure()

    def measured(self) -> dict[str, Measured]:
        """Each kind of operation so far."""
        return {name: meter.measured() for name, meter in sorted(self._meters.items())}

    def errors(self) -> dict[str, dict[str, int]]:
        """How often each kind of operation got which errno. Most are no trouble: ENOENT answers a
        look-up of what is not there."""
        found: dict[str, dict[str, int]] = {}
        for (operation, number), count in sorted(self._errors.items()):
            found.setdefault(operation, {})[_errno_name(number)] = count
        return found

    def under_way(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The operations under way as JSON values, the oldest first."""
        now = _Now.read()
        return [_described(activity, now) for activity in list(self._under_way)[:limit]]

    def look(self) -> Look:
        """What is recorded now, to be written out by somebody who has the time."""
        return Look(_Now.read(), list(self._under_way), list(self._recent))


class _Now(NamedTuple):
    """The same moment on the clock of activities and on the calendar."""

    monotonic_ns: int
    calendar_ns: int

    @staticmethod
    def read() -> _Now:
        return _Now(time.perf_counter_ns(), time.time_ns())


class Look(NamedTuple):
    """The operations at a moment: under way, and ended (in the order of their end)."""

    now: _Now
    under_way: list[Activity]
    ended: list[Activity]

    def lines(self, **about: object) -> Iterator[str]:
        """JSON lines: `about` the dump, then operations under way, then those that have ended.

        May be called by any thread: of operations under way only numbers change.
        """
        counts = {"under_way": len(self.under_way), "ended": len(self.ended)}
        yield json.dumps({"time": _calendar(self.now.calendar_ns), **about, **counts})
        for activity in (*self.under_way, *self.ended):
            yield json.dumps(_described(activity, self.now))


def _calendar(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="microseconds")


def _described(activity: Activity, now: _Now) -> dict[str, Any]:
    """Times in seconds. `outcome` is null, and `seconds` the age, while it is under way."""
    age_ns = now.monotonic_ns - activity.started_ns
    ended = activity.outcome is not None
    return {
        "time": _calendar(now.calendar_ns - age_ns),
        "operation": activity.operation,
        "inode": activity.inode,
        "offset": activity.offset,
        "size": activity.size,
        "seconds": (activity.elapsed_ns if ended else age_ns) / 1e9,
        "outcome": _outcome_name(activity.outcome),
        "waited_s": _named(ns / 1e9 for ns in activity.waited_ns),
        "waiting_for": list(_named(activity.waiting)),
        "store": activity.store,
    }


def _named(values: Iterable[float]) -> dict[str, float]:
    pairs = zip(WAITS, values, strict=True)
    return {name: value for name, value in pairs if value}


def _outcome_name(outcome: int | None) -> str | None:
    if not outcome:
        return None if outcome is None else "OK"
    return _errno_name(outcome)


def _errno_name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
