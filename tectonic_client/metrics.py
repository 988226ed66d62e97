"""Counting and timing of calls: fixed memory, no lock, well under a microsecond per call.

A `Meter` belongs to one thread, or its owner guards it. What was measured so far is a `Measured`,
which can be subtracted from a later one, and travels as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Final

BUCKETS: Final = 40
"""Bucket i holds durations below 2**i microseconds, the last one everything above."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls so far. `buckets[i]` of them took less than 2**i microseconds and no less than half of
    that (the last: anything above)."""

    calls: int = 0
    errors: int = 0
    transferred_bytes: int = 0
    total_ns: int = 0
    max_ns: int = 0
    buckets: tuple[int, ...] = ()

    def quantile_s(self, share: float) -> float:
        """Seconds within which this share (0 to 1) of the calls ended, to a factor of two.

        The upper bound of the bucket that holds it, or the longest call; 0 without calls.
        """
        left = share * self.calls
        for exponent, count in enumerate(self.buckets):
            left -= count
            if left <= 0 and count:
                return min(float(2**exponent / 1e6), self.max_ns / 1e9)
        return 0.0

    def since(self, earlier: Measured) -> Measured:
        """The calls between an earlier look and this one; `max_ns` is that of all calls."""
        buckets = zip_longest(self.buckets, earlier.buckets, fillvalue=0)
        return Measured(
            self.calls - earlier.calls, self.errors - earlier.errors,
            self.transferred_bytes - earlier.transferred_bytes, self.total_ns - earlier.total_ns,
            self.max_ns, tuple(now - before for now, before in buckets),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As JSON values; empty buckets at the end are left out."""
        fields = asdict(self)
        fields["buckets"] = _trimmed(self.buckets)
        return fields

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Measured:
        """The opposite of `to_json`. Raises KeyError, TypeError."""
        return Measured(
            fields["calls"], fields["errors"], fields["transferred_bytes"], fields["total_ns"],
            fields["max_ns"], tuple(fields["buckets"]),
        )  # fmt: skip


def _trimmed(buckets: Sequence[int]) -> list[int]:
    end = len(buckets)
    while end and not buckets[end - 1]:
        end -= 1
    return list(buckets[:end])


class Meter:
    """Counts and times calls."""

    __slots__ = ("buckets", "calls", "errors", "max_ns", "total_ns", "transferred_bytes")

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.transferred_bytes = 0
        self.total_ns = 0
        self.max_ns = 0
        self.buckets = [0] * BUCKETS

    def add(self, elapsed_ns: int, transferred_bytes: int = 0, *, failed: bool = False) -> None:
        """A call has ended."""
        self.calls += 1
        self.total_ns += elapsed_ns
        if failed:
            self.errors += 1
        if transferred_bytes:
            self.transferred_bytes += transferred_bytes
        if elapsed_ns > self.max_ns:
            self.max_ns = elapsed_ns
        bucket = (elapsed_ns // 1000).bit_length()
        self.buckets[bucket if bucket < BUCKETS else BUCKETS - 1] += 1

    def measured(self) -> Measured:
        """A snapshot."""
        return Measured(
            self.calls, self.errors, self.transferred_bytes, self.total_ns, self.max_ns,
            tuple(self.buckets),
        )  # fmt: skip
