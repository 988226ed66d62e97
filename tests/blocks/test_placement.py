"""Placement of chunks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.blocks.placement import rotation, store_for
from tectonic_client.errors import NoSpace
from tectonic_client.records import StoreRecord, StoreState


def store(store_id: int, weight: int = 100, state: StoreState = StoreState.ACTIVE) -> StoreRecord:
    return StoreRecord(store_id, state, weight, f"/flash{store_id}", f"domain{store_id}")


def test_chunks_of_a_block_rotate_over_the_stores() -> None:
    """Neighbouring chunks of a block lie on different stores, all stores equally often."""
    turns = rotation([store(3), store(1), store(2)])
    chosen = [store_for(turns, 77, index) for index in range(9)]
    assert Counter(chosen) == {1: 3, 2: 3, 3: 3}
    assert all(a != b for a, b in pairwise(chosen))


def test_small_blocks_spread_over_the_stores() -> None:
    """First chunks of consecutive blocks, which small files are, do not pile up on one store."""
    turns = rotation([store(0), store(1), store(2), store(3)])
    counts = Counter(store_for(turns, 4096 + number, 0) for number in range(4000))
    assert all(900 < count < 1100 for count in counts.values())


def test_a_store_gets_chunks_by_its_weight() -> None:
    """A store with three times the weight takes three times the chunks."""
    turns = rotation([store(0, 100), store(1, 300)])
    assert Counter(store_for(turns, 5, index) for index in range(400)) == {0: 100, 1: 300}


def test_draining_stores_and_those_without_weight_get_nothing() -> None:
    """New chunks avoid stores that are draining or have no weight; with no other, NoSpace."""
    out = [store(0, state=StoreState.DRAINING), store(1, weight=0)]
    assert rotation([*out, store(2)]) == (2,)
    with pytest.raises(NoSpace):
        rotation(out)


@given(weights=st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=8))
def test_a_rotation_is_short_and_complete(weights: list[int]) -> None:
    """Whatever the weights, every store has a turn and a rotation stays short."""
    turns = rotation(store(number, weight) for number, weight in enumerate(weights))
    assert set(turns) == set(range(len(weights)))
    assert len(turns) <= 100 * len(weights)


@given(block_id=st.integers(0, 2**64 - 1), index=st.integers(0, 1023))
def test_a_place_is_found_again(block_id: int, index: int) -> None:
    """Placement depends on nothing but its arguments, for any id."""
    turns = rotation([store(0), store(5)])
    assert store_for(turns, block_id, index) == store_for(turns, block_id, index)
    assert store_for(turns, block_id, index) != store_for(turns, block_id, index + 1)
