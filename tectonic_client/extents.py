"""Extent arithmetic: which bytes of a file lie where, and what a write or a cut changes.

Extents of a file are sorted by offset and never overlap; what no extent covers is a hole. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Extent(NamedTuple):
    """File bytes [file_offset, file_offset + length) are block bytes from block_offset on."""

    file_offset: int
    length: int
    block_id: int
    block_offset: int

    @property
    def end(self) -> int:
        """File offset behind the last byte."""
        return self.file_offset + self.length

    def between(self, start: int, end: int) -> Extent | None:
        """The part of the extent inside the file bytes [start, end), None where there is none."""
        first, last = max(start, self.file_offset), min(end, self.end)
        if first >= last:
            return None
        return Extent(
            first, last - first, self.block_id, self.block_offset + first - self.file_offset
        )

    def continued_by(self, other: Extent) -> bool:
        """Whether `other` goes on where this one ends, in the file and in the block."""
        return (
            other.file_offset == self.end
            and other.block_id == self.block_id
            and other.block_offset == self.block_offset + self.length
        )


def coalesce(extents: Sequence[Extent]) -> list[Extent]:
    """The same bytes with neighbours joined that continue each other."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].continued_by(extent):
            joined[-1] = joined[-1]._replace(length=joined[-1].length + extent.length)
        else:
            joined.append(extent)
    return joined


@dataclass(slots=True)
class OverlayPlan:
    """What has to change in a file's stored extents.

    Delete those at `deleted_offsets`, then write `written`; `released` counts per block the bytes
    that the file uses no more.
    """

    deleted_offsets: list[int] = field(default_factory=list)
    written: list[Extent] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)

    def _release(self, block_id: int, byte_count: int) -> None:
        self.released[block_id] = self.released.get(block_id, 0) + byte_count


def overlay(existing: Sequence[Extent], new: Sequence[Extent]) -> OverlayPlan:
    """Lay `new` over `existing` (each sorted, without overlaps among themselves).

    `existing` needs to hold only the extents that `new` touches.
    """
    plan = OverlayPlan()
    for extent in existing:
        rests = _without(extent, new)
        kept = sum(rest.length for rest in rests)
        if kept == extent.length:
            continue
        plan._release(extent.block_id, extent.length - kept)
        if not any(rest.file_offset == extent.file_offset for rest in rests):
            plan.deleted_offsets.append(extent.file_offset)
        plan.written += rests
    plan.written += new
    plan.written.sort()
    overwritten = {extent.file_offset for extent in plan.written}
    plan.deleted_offsets = [o for o in plan.deleted_offsets if o not in overwritten]
    return plan


def _without(extent: Extent, covers: Sequence[Extent]) -> list[Extent]:
    """What is left of `extent` when `covers` lie over it."""
    rests: list[Extent] = []
    position = extent.file_offset
    first = bisect_right(covers, position, key=lambda cover: cover.file_offset)
    for cover in covers[max(first - 1, 0) :]:
        if cover.file_offset >= extent.end:
            break
        rest = extent.between(position, cover.file_offset)
        if rest is not None:
            rests.append(rest)
        position = max(position, cover.end)
    rest = extent.between(position, extent.end)
    return rests if rest is None else [*rests, rest]


def truncate(existing: Sequence[Extent], size: int) -> OverlayPlan:
    """Remove everything from file offset `size` on."""
    end = max((extent.end for extent in existing), default=size)
    if size >= end:
        return OverlayPlan()
    cover = Extent(size, end - size, 0, 0)
    plan = overlay(existing, [cover])
    plan.written.remove(cover)
    if any(extent.file_offset == size for extent in existing):
        plan.deleted_offsets.append(size)
    return plan


class ExtentMap:
    """Extents of an open file in memory: sorted, not overlapping, later ones win."""

    __slots__ = ("_extents",)

    def __init__(self) -> None:
        self._extents: list[Extent] = []

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExtentMap) and self._extents == other._extents

    __hash__ = None  # type: ignore[assignment]  # it changes

    def _first_touching(self, start: int) -> int:
        """Index of the first extent that ends behind `start`."""
        index = bisect_right(self._extents, start, key=lambda extent: extent.file_offset)
        if index and self._extents[index - 1].end > start:
            return index - 1
        return index

    def insert(self, new: Extent) -> None:
        """Lay an extent over what is there; continues its neighbour where it can."""
        first = self._first_touching(new.file_offset)
        last = first
        while last < len(self._extents) and self._extents[last].file_offset < new.end:
            last += 1
        touched = self._extents[first:last]
        replacement = [new]
        if touched:
            before = touched[0].between(touched[0].file_offset, new.file_offset)
            after = touched[-1].between(new.end, touched[-1].end)
            replacement = [part for part in (before, new, after) if part is not None]
        if first and self._extents[first - 1].continued_by(replacement[0]):
            first -= 1
            replacement.insert(0, self._extents[first])
        self._extents[first:last] = coalesce(replacement)

    def cut(self, size: int) -> None:
        """Remove everything from file offset `size` on."""
        first = self._first_touching(size)
        rest = [extent.between(0, size) for extent in self._extents[first : first + 1]]
        self._extents[first:] = [extent for extent in rest if extent is not None]

    def lookup(self, start: int, end: int) -> list[Extent]:
        """The parts of extents inside the file bytes [start, end), in order."""
        found = []
        for index in range(self._first_touching(start), len(self._extents)):
            part = self._extents[index].between(start, end)
            if part is None:
                break
            found.append(part)
        return found
