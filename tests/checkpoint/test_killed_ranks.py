"""Collective saves by real processes, some of which are killed, stay away or disagree."""

from __future__ import annotations

import time

import pytest
import safetensors.numpy
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.names import part_name, step_name
from tectonic_client.errors import (
    CheckpointError,
    RankMismatch,
    RanksMissing,
    StepExists,
    StepInProgress,
    UnsupportedLeaf,
)
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import open_volume
from tests.checkpoint.rankprocesses import (
    DIRECTORY,
    PHASES,
    Job,
    Kill,
    Ranks,
    run_job,
    same,
    state_of,
)
from tests.leaks import assert_no_leaks, clean


def _steps(url: str) -> list[int]:
    with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
        return manager.steps()


def _assert_holds(url: str, step: int, world_size: int, seed: int) -> None:
    """The step is exactly what the ranks of that seed saved."""
    for rank in range(world_size):
        with CheckpointManager(
            url, DIRECTORY, rank=rank, world_size=world_size, run_id="looking"
        ) as manager:
            assert same(manager.read(step), state_of(rank, seed))
            state = state_of(rank, seed + 1)
            weights = state["weights"]
            assert manager.load(state, step).step == step
            assert state["weights"] is weights
            assert same(state, state_of(rank, seed))
    with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
        assert manager.verify(step).ok


def _assert_clean(url: str) -> None:
    """After the next client has cleaned up nothing is left of the dead."""

    async def look() -> None:
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(look)


def test_a_step_is_standard_safetensors_files(url: str) -> None:
    """Four ranks save; the safetensors library reads each part, the index names them."""
    assert run_job(Job(url, 4, 7, seed=1)) == [None] * 4
    _assert_holds(url, 7, 4, seed=1)

    async def read_parts() -> list[bytes]:
        async with open_volume(url) as volume:
            fs = volume.filesystem
            directory = await fs.resolve(f"{DIRECTORY}/{step_name(7)}")
            assert directory != ROOT_INODE
            parts = []
            for rank in range(4):
                found = await fs.lookup(directory, part_name(rank, 4).encode())
                handle = await fs.open(found.inode, 0)
                parts.append(bytes(await fs.read(handle, 0, found.size)))
                await fs.release(handle)
            return parts

    for rank, data in enumerate(trio.run(read_parts)):
        tensors = safetensors.numpy.load(data)
        expected = state_of(rank, 1)
        assert (tensors["weights"] == expected["weights"]).all()
        assert (tensors["moments.0"] == expected["moments"][0]).all()
    _assert_clean(url)


_KILLS = [
    (Kill("before", "_enter"), 0),
    (Kill("after", "_enter"), 0),
    (Kill("uploading"), 0),
    (Kill("uploading"), 1),
    (Kill("before", "_bring"), 0),
    (Kill("before", "_bring"), 1),
    (Kill("after", "_bring"), 0),
    (Kill("after", "_bring"), 1),
    (Kill("before", "_commit"), 0),
    (Kill("after", "_commit"), 0),
]


@pytest.mark.parametrize(
    ("kill", "victim"), _KILLS, ids=[f"{k.when}{k.phase}-{victim}" for k, victim in _KILLS]
)
def test_a_killed_rank_never_leaves_half_a_step(url: str, kill: Kill, victim: int) -> None:
    """Survivors agree and learn it quickly; the step is whole or not there; a restarted job saves
    it; nothing leaks."""
    began = time.monotonic()
    outcomes = run_job(Job(url, 3, 100, seed=1, timeout_s=60, earlier=(1,)), {victim: kill})
    assert time.monotonic() - began < 30, "survivors waited for their timeout"
    assert outcomes[victim] == "killed"
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    committed = survivors == [None, None]
    if not committed:
        for outcome in survivors:
            assert isinstance(outcome, RanksMissing), outcome
            assert victim in outcome.ranks
    assert _steps(url) == ([1, 100] if committed else [1])
    if committed:
        _assert_holds(url, 100, 3, seed=1)
        assert kill in (
            Kill("after", "_bring"),
            Kill("before", "_commit"),
            Kill("after", "_commit"),
        )
    else:
        assert run_job(Job(url, 3, 100, seed=2)) == [None] * 3
        _assert_holds(url, 100, 3, seed=2)
    _assert_clean(url)


@pytest.mark.parametrize("phase", PHASES)
def test_a_job_that_died_whole_is_never_mixed_into_its_successor(url: str, phase: str) -> None:
    """All ranks are killed at some step of saving 100; the restarted job's 100 is only its own."""
    arrived = Kill("after", "_bring")
    third = arrived if phase == "_commit" else Kill("uploading")
    kills = {0: Kill("before", phase), 1: arrived, 2: third}
    outcomes = run_job(Job(url, 3, 100, seed=1, timeout_s=10, earlier=(90,)), kills)
    assert outcomes[0] == "killed"
    assert None not in outcomes
    assert _steps(url) == [90]
    assert run_job(Job(url, 3, 100, seed=2)) == [None] * 3
    _assert_holds(url, 100, 3, seed=2)
    _assert_clean(url)


def test_two_jobs_that_save_one_step_end_as_one_whole_step(url: str) -> None:
    """One job's save succeeds on all its ranks, the other's fails with one clear error."""
    jobs = [Job(url, 2, 100, seed=seed, run_id=f"job-{seed}") for seed in (1, 2)]
    outcomes = run_job(jobs[0], also=jobs[1:])
    by_job = [outcomes[:2], outcomes[2:]]
    winners = [number for number, ends in enumerate(by_job) if ends == [None, None]]
    assert len(winners) == 1, outcomes
    for outcome in by_job[1 - winners[0]]:
        assert isinstance(outcome, StepExists | StepInProgress | RanksMissing), outcome
    _assert_holds(url, 100, 2, seed=winners[0] + 1)
    _assert_clean(url)


def test_two_jobs_that_save_different_steps_do_not_disturb_each_other(url: str) -> None:
    """Both steps are whole."""
    first = Job(url, 2, 100, seed=1, run_id="one")
    second = Job(url, 2, 200, seed=2, run_id="two")
    assert run_job(first, also=[second]) == [None] * 4
    _assert_holds(url, 100, 2, seed=1)
    _assert_holds(url, 200, 2, seed=2)


def test_a_rank_that_never_comes_is_named_at_the_timeout(url: str) -> None:
    """The others get RanksMissing naming it, and nothing is visible."""
    with CheckpointManager(url, DIRECTORY, rank=0, world_size=2, run_id="r") as manager:
        with pytest.raises(RanksMissing, match="rank 1 did not arrive") as caught:
            manager.save(5, state_of(0, 1), timeout=1.5)
        assert caught.value.ranks == (1,)
        assert manager.steps() == []
    with CheckpointManager(url, DIRECTORY, rank=1, world_size=2, run_id="r") as manager:
        with pytest.raises(RanksMissing) as caught:
            manager.save(5, state_of(1, 1), timeout=1.5)
        assert caught.value.ranks == (0,)
    _assert_clean(url)


@pytest.mark.parametrize("what", ["world_size", "step"])
def test_ranks_that_disagree_all_get_one_error(url: str, what: str) -> None:
    """RankMismatch on every rank, long before the timeout."""
    jobs = [Job(url, 2, 100, seed=1, run_id="r"), Job(url, 2, 100, seed=1, run_id="r")]
    jobs[1] = Job(url, 3, 100, 1, "r") if what == "world_size" else Job(url, 2, 101, 1, "r")
    began = time.monotonic()
    outcomes = Ranks([(jobs[0], 0, None), (jobs[1], 1, None)]).run()
    assert time.monotonic() - began < 25
    for outcome in outcomes:
        assert isinstance(outcome, RankMismatch), outcome
        assert what.replace("_", "") in str(outcome).replace("_", "")
    assert _steps(url) == []
    _assert_clean(url)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_state_that_cannot_be_stored_fails_all_ranks_at_once(url: str, rank: int) -> None:
    """The rank gets UnsupportedLeaf naming every path, the others RanksMissing naming the rank."""
    began = time.monotonic()
    outcomes = run_job(Job(url, 3, 5, seed=1, timeout_s=60, unsupported_on=rank))
    assert time.monotonic() - began < 30, "the others waited for their timeout"
    error = outcomes.pop(rank)
    assert isinstance(error, UnsupportedLeaf), error
    assert "bad.object" in str(error)
    assert "bad.set" in str(error)
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError), outcome
        assert f"rank {rank}" in str(outcome)
    assert _steps(url) == []
    _assert_clean(url)


def test_a_step_that_exists_is_refused_on_every_rank(url: str) -> None:
    """StepExists, and the step that is there stays as it is."""
    assert run_job(Job(url, 2, 1, seed=1)) == [None, None]
    for outcome in run_job(Job(url, 2, 1, seed=2)):
        assert isinstance(outcome, StepExists), outcome
    _assert_holds(url, 1, 2, seed=1)
    with CheckpointManager(url, DIRECTORY) as manager:
        manager.delete(1)
        assert manager.steps() == []
        assert manager.latest() is None
    _assert_clean(url)
