"""Extent arithmetic against bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.extents import (
    Extent,
    ExtentMap,
    OverlayPlan,
    coalesce,
    overlay,
    truncate,
)

SIZE = 64
_writes = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, 20)).map(
        lambda pair: (pair[0], min(pair[1], SIZE - pair[0]))
    ),
    max_size=12,
)


class Oracle:
    """Per file byte: (block, offset in it) or None."""

    def __init__(self) -> None:
        self.bytes: list[tuple[int, int] | None] = [None] * SIZE

    def write(self, extent: Extent) -> None:
        for i in range(extent.length):
            self.bytes[extent.file_offset + i] = (extent.block_id, extent.block_offset + i)

    def agrees(self, extents: list[Extent]) -> bool:
        found: list[tuple[int, int] | None] = [None] * SIZE
        last_end = 0
        for extent in extents:
            assert extent.length > 0
            assert extent.file_offset >= last_end
            last_end = extent.end
            for i in range(extent.length):
                found[extent.file_offset + i] = (extent.block_id, extent.block_offset + i)
        return found == self.bytes


def _apply(stored: dict[int, Extent], plan: OverlayPlan) -> None:
    for offset in plan.deleted_offsets:
        del stored[offset]
    for extent in plan.written:
        stored[extent.file_offset] = extent


def _touching(stored: dict[int, Extent], start: int, end: int) -> list[Extent]:
    return sorted(e for e in stored.values() if e.file_offset < end and e.end > start)


def _live(stored: dict[int, Extent]) -> dict[int, int]:
    live: dict[int, int] = {}
    for extent in stored.values():
        live[extent.block_id] = live.get(extent.block_id, 0) + extent.length
    return live


@given(batches=st.lists(_writes, max_size=5), cuts=st.lists(st.integers(0, SIZE), max_size=3))
def test_stored_extents_follow_writes_and_cuts(
    batches: list[list[tuple[int, int]]], cuts: list[int]
) -> None:
    """overlay and truncate keep stored extents equal to a byte array, and count releases."""
    oracle, block = Oracle(), 0
    stored: dict[int, Extent] = {}
    used: dict[int, int] = {}
    released: dict[int, int] = {}

    def settle(plan: OverlayPlan) -> None:
        _apply(stored, plan)
        for block_id, count in plan.released.items():
            released[block_id] = released.get(block_id, 0) + count

    for number, writes in enumerate(batches):
        pending = ExtentMap()
        for offset, length in writes:
            block += 1
            extent = Extent(offset, length, block, 7 * block)
            pending.insert(extent)
            oracle.write(extent)
        new = list(pending)
        if new:
            for extent in new:
                used[extent.block_id] = used.get(extent.block_id, 0) + extent.length
            settle(overlay(_touching(stored, new[0].file_offset, new[-1].end), new))
        if number < len(cuts):
            cut = cuts[number]
            settle(truncate(_touching(stored, cut, SIZE), cut))
            oracle.bytes[cut:] = [None] * (SIZE - cut)
        assert oracle.agrees(sorted(stored.values()))
        live = {b: used[b] - released.get(b, 0) for b in used}
        assert {b: n for b, n in live.items() if n} == _live(stored)


@given(writes=_writes, window=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)))
def test_the_map_in_memory_shows_the_last_write(
    writes: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    """ExtentMap equals a byte array, whole and through any window."""
    oracle, extents = Oracle(), ExtentMap()
    log = 0
    for offset, length in writes:
        extent = Extent(offset, length, 1, log)
        log += length
        extents.insert(extent)
        oracle.write(extent)
    assert oracle.agrees(list(extents))
    start, end = min(window), max(window)
    clipped = Oracle()
    clipped.bytes[start:end] = oracle.bytes[start:end]
    assert clipped.agrees(extents.lookup(start, end))


def test_a_sequential_writer_has_one_extent_per_block() -> None:
    """Appends that continue in file and block are one extent."""
    extents = ExtentMap()
    for number in range(100):
        extents.insert(Extent(10 * number, 10, number // 50, 10 * (number % 50)))
    assert list(extents) == [Extent(0, 500, 0, 0), Extent(500, 500, 1, 0)]
    assert coalesce([Extent(0, 5, 1, 0), Extent(5, 5, 1, 5)]) == [Extent(0, 10, 1, 0)]
