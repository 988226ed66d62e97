"""The figures that were promised for the mount. Pure: rows in, bars out.

A bar whose rows were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.fs.places import RATE, SECONDS, SPEED
from bench.report import Bar, Row, at_least, at_most, find_row

RAW: Final = "raw"
NULL: Final = "null"
MOUNT: Final = "mount"

_RAW_SHARE: Final = 0.75
_NULL_READ_SHARE: Final = 0.9
_NULL_MMAP_SHARE: Final = 0.8
_NULL_NAMES_SHARE: Final = 0.5
_LIST_S: Final = 1.0

_COMPARED_UNITS: Final = frozenset({RATE, SPEED, SECONDS})
"""CPU and memory are reported and promised nothing."""


def filesystem_bars(rows: Sequence[Row], peers: Sequence[str]) -> tuple[Bar, ...]:
    """The bars that these rows decide; `peers` are the cases to be ahead of."""
    return (*_own_bars(rows), *_peer_bars(rows, peers))


def _own_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for files in ("1", "4"):
        metric = f"seq-write-{files}"
        if (share := _ahead(rows, metric, RAW)) is not None:
            yield at_least(f"{metric} / raw", share, _RAW_SHARE)
        yield from _read_bar(rows, f"seq-read-{files}")
    if (share := _ahead(rows, "mmap-read", NULL)) is not None:
        yield at_least("mmap-read / null FUSE", share, _NULL_MMAP_SHARE)
    for metric in ("create", "stat", "unlink"):
        if (share := _ahead(rows, metric, NULL)) is not None:
            yield at_least(f"{metric} / null FUSE", share, _NULL_NAMES_SHARE)
    if (row := find_row(rows, MOUNT, "ls-l")) is not None:
        yield at_most("ls-l (s)", row.median, _LIST_S)


def _read_bar(rows: Sequence[Row], metric: str) -> Iterator[Bar]:
    """Beside the device; or beside FUSE itself, where that asks for less."""
    row = find_row(rows, MOUNT, metric)
    raw, null = find_row(rows, RAW, metric), find_row(rows, NULL, metric)
    if row is None or raw is None:
        return
    if null is not None and _NULL_READ_SHARE * null.median < _RAW_SHARE * raw.median:
        yield at_least(f"{metric} / null FUSE", row.median / null.median, _NULL_READ_SHARE)
    else:
        yield at_least(f"{metric} / raw", row.median / raw.median, _RAW_SHARE)


def _peer_bars(rows: Sequence[Row], peers: Sequence[str]) -> Iterator[Bar]:
    for row in rows:
        if row.case != MOUNT or row.unit not in _COMPARED_UNITS:
            continue
        for peer in peers:
            if (ratio := _ahead(rows, row.metric, peer)) is not None:
                yield Bar(f"ahead of {peer} in {row.metric}", ratio, 1.0, ratio > 1.0)


def _ahead(rows: Sequence[Row], metric: str, other: str) -> float | None:
    """How many times as fast the mount is; None if one of the two was not measured."""
    row, reference = find_row(rows, MOUNT, metric), find_row(rows, other, metric)
    if row is None or reference is None:
        return None
    if row.unit == SECONDS:
        return reference.median / row.median
    return row.median / reference.median
