"""Saving, loading and removing steps with every kind of fault at each of their steps.

Whatever fails and when, on whichever rank: all ranks succeed or all get an error of the tree; a
step is whole or not there; trying again works; the next client leaves nothing over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
import trio

from tectonic_client.checkpoint.saving import SaveReport
from tectonic_client.errors import (
    MetadataUnavailable,
    NoSpace,
    RanksMissing,
    StepNotFound,
    TectonicError,
)
from tectonic_client.volume import open_volume
from tests.checkpoint.rankprocesses import same, state_of
from tests.checkpoint.threadranks import ThreadRank, save_together, thread_ranks
from tests.filesystem.faultrig import KINDS, Kind, end_sessions_left_by_this_process, new_volume
from tests.leaks import assert_no_leaks, clean

MAX_STEPS = 60
"""More steps than any operation has."""

TIMEOUT_S = 1.0
"""Of a save: some faults leave a rank no way to tell the others."""


def _at_each_step(attempt: Callable[[int], bool]) -> None:
    """Call `attempt` with n = 1, 2, ... until it says that the fault did not come."""
    for n in count(1):
        assert n < MAX_STEPS
        try:
            if not attempt(n):
                return
        except BaseException as error:
            error.add_note(f"fault at step {n}")
            raise


def _assert_clean(url: str) -> None:
    """Nothing is left once the next client has cleaned up."""

    async def look() -> None:
        async with open_volume(url) as volume:
            await end_sessions_left_by_this_process(volume)
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(look)


def _assert_holds(ranks: list[ThreadRank], step: int, seed: int) -> None:
    for number, rank in enumerate(ranks):
        assert same(rank.manager.read(step), state_of(number, seed))
        assert rank.manager.verify(step).ok


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_save_with_a_fault_at_any_step(kind: Kind, victim: int) -> None:
    """Both ranks agree on what became of it, and can save the step (again) at once."""

    def attempt(n: int) -> bool:
        url = new_volume()
        with thread_ranks(url, 2) as ranks:
            faults = ranks[victim].faults
            kind.plan(faults, n)
            states = [state_of(rank, 1) for rank in range(2)]
            ends = save_together(ranks, 1, states, timeout=TIMEOUT_S)
            came = not faults.pending
            faults.clear()
            failed = [end for end in ends if isinstance(end, TectonicError)]
            assert len(failed) in (0, 2), ends
            assert ranks[1 - victim].manager.steps() == ([] if failed else [1])
            if failed:
                states = [state_of(rank, 2) for rank in range(2)]
                ends = save_together(ranks, 1, states, timeout=30)
                assert not any(isinstance(end, TectonicError) for end in ends), ends
            _assert_holds(ranks, 1, seed=2 if failed else 1)
        _assert_clean(url)
        return came

    _at_each_step(attempt)


def test_a_rank_that_gets_no_ids_fails_the_others_at_once() -> None:
    """They learn of it long before their timeout, and rank 0, whom they wait for, tries again."""
    with thread_ranks(new_volume(), 2) as ranks:
        states = [state_of(rank, 1) for rank in range(2)]
        ranks[1].faults.kv.fail_transaction(1, NoSpace("injected: full"))
        began = time.monotonic()
        ends = save_together(ranks, 1, states, timeout=60)
        assert time.monotonic() - began < 20
        assert isinstance(ends[0], RanksMissing)
        assert ends[0].ranks == (1,)
        assert isinstance(ends[1], NoSpace)
    with thread_ranks(new_volume(), 2) as ranks:
        ranks[0].faults.kv.fail_transaction(1, MetadataUnavailable("injected: away"))
        for end in save_together(ranks, 1, states, timeout=60):
            assert isinstance(end, SaveReport), end


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_load_with_a_fault_at_any_step(kind: Kind) -> None:
    """The state is loaded, or there is an error; loading it again repairs what was half loaded."""
    url = new_volume()
    with thread_ranks(url, 1) as (saver,):
        save_together([saver], 1, [state_of(0, 1)], timeout=30)

        def attempt(n: int) -> bool:
            with thread_ranks(url, 1, "loading") as (rank,):
                state = state_of(0, 9)
                kind.plan(rank.faults, n)
                try:
                    rank.manager.load(state)
                except TectonicError:
                    rank.faults.clear()
                    rank.manager.load(state)
                assert same(state, state_of(0, 1))
                came = not rank.faults.pending
                rank.faults.clear()
            return came

        _at_each_step(attempt)
    _assert_clean(url)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_removed_with_a_fault_at_any_step(kind: Kind) -> None:
    """It is whole or gone; removing it until it is gone leaves nothing but the other step."""

    def attempt(n: int) -> bool:
        url = new_volume()
        with thread_ranks(url, 1) as (rank,):
            for step in (1, 2):
                save_together([rank], step, [state_of(0, step)], timeout=30)
            kind.plan(rank.faults, n)
            try:
                rank.manager.delete(1)
            except TectonicError:
                rank.faults.clear()
                if rank.manager.steps() == [1, 2]:
                    _assert_holds([rank], 1, seed=1)
                with suppress(StepNotFound):
                    rank.manager.delete(1)
            came = not rank.faults.pending
            rank.faults.clear()
            assert rank.manager.steps() == [2]
            _assert_holds([rank], 2, seed=2)
        _assert_clean(url)
        return came

    _at_each_step(attempt)
