"""Saves that are interrupted, stopped or ended by a signal, and programs that just end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.errors import RanksMissing, StepExists
from tectonic_client.volume import open_volume, volume_status
from tests.checkpoint.rankprocesses import DIRECTORY, Job, Kill, Ranks, same, state_of
from tests.leaks import assert_no_leaks, clean

MOMENTS = [
    ("uploading", "", 0), ("uploading", "", 1),
    ("before", "_enter", 0),
    ("before", "_bring", 0), ("before", "_bring", 1),
    ("after", "_bring", 0), ("after", "_bring", 1),
    ("before", "_commit", 0), ("after", "_commit", 0),
]  # fmt: skip

_EACH_MOMENT = pytest.mark.parametrize(
    ("when", "phase", "victim"), MOMENTS, ids=[f"{w}{p}-{v}" for w, p, v in MOMENTS]
)


def _assert_whole(url: str, seeds: dict[int, int], world_size: int = 2) -> None:
    """The steps are these, each by the ranks of its seed; the rest has been cleaned up."""
    for rank in range(world_size):
        with CheckpointManager(
            url, DIRECTORY, rank=rank, world_size=world_size, run_id="looking"
        ) as manager:
            assert manager.steps() == sorted(seeds)
            for step, seed in seeds.items():
                assert same(manager.read(step), state_of(rank, seed))

    async def look() -> None:
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(look)


@_EACH_MOMENT
def test_an_interrupted_rank_fails_the_others_at_once(
    url: str, when: str, phase: str, victim: int
) -> None:
    """Ctrl-C at any moment: KeyboardInterrupt there, one error elsewhere; then all save again."""
    kill = Kill(when, phase, signal.SIGINT)
    job = Job(url, 2, 100, seed=1, timeout_s=60, earlier=(1,), again=True)
    ranks = Ranks([(job, rank, kill if rank == victim else None) for rank in range(2)])
    ranks.begin()
    began = time.monotonic()
    outcomes = [ranks.outcome(rank) for rank in range(2)]
    assert time.monotonic() - began < 20, "the other waited for its timeout"
    assert outcomes[victim] == "interrupted"
    committed = outcomes[1 - victim] is None
    if not committed:
        assert f"rank {victim}" in str(outcomes[1 - victim])
        assert outcomes[1 - victim].__class__.__name__ in ("RanksMissing", "CheckpointError")
    ranks.go()
    for rank in range(2):
        again = ranks.outcome(rank)
        assert isinstance(again, StepExists) if committed else again is None, again
    ranks.end()
    _assert_whole(url, {1: 1, 100: 1 if committed else 2})


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_told_to_end_leaves_at_once(url: str, victim: int) -> None:
    """SIGTERM with a handler that exits: the session ends, the other rank learns it."""
    kill = Kill("uploading", number=signal.SIGTERM)
    job = Job(url, 2, 100, seed=1, timeout_s=60, earlier=(1,))
    ranks = Ranks([(job, rank, kill if rank == victim else None) for rank in range(2)])
    began = time.monotonic()
    outcomes = ranks.run()
    assert time.monotonic() - began < 40, "the other waited for its timeout"
    assert ranks.processes[victim].exitcode == 1
    assert f"rank {victim}" in str(outcomes[1 - victim])
    assert volume_status(url).sessions == []
    _assert_whole(url, {1: 1})


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stands_still_is_missing(url: str, victim: int) -> None:
    """SIGSTOP: the others name it at the timeout; when it goes on it gets the same verdict.

    It is stopped between two transactions: in one it would hold up the embedded engine.
    """
    kill = Kill("before", "_bring", signal.SIGSTOP)
    job = Job(url, 3, 100, seed=1, timeout_s=2, earlier=(1,))
    ranks = Ranks([(job, rank, kill if rank == victim else None) for rank in range(3)])
    ranks.begin()
    for rank in {0, 1, 2} - {victim}:
        outcome = ranks.outcome(rank)
        assert isinstance(outcome, RanksMissing), outcome
        assert outcome.ranks == (victim,)
    os.kill(ranks.processes[victim].pid or 0, signal.SIGCONT)
    outcome = ranks.outcome(victim)
    assert isinstance(outcome, RanksMissing), outcome
    ranks.end()
    _assert_whole(url, {1: 1}, 3)


@pytest.mark.parametrize(("phase", "victim"), [("_bring", 1), ("_commit", 0)])
def test_a_rank_that_stands_still_when_all_are_there(url: str, phase: str, victim: int) -> None:
    """Its part is enough; a coordinator that does not commit is replaced at the timeout."""
    when = "after" if phase == "_bring" else "before"
    kill = Kill(when, phase, signal.SIGSTOP)
    job = Job(url, 3, 100, seed=1, timeout_s=2, earlier=(1,))
    ranks = Ranks([(job, rank, kill if rank == victim else None) for rank in range(3)])
    ranks.begin()
    assert [ranks.outcome(rank) for rank in sorted({0, 1, 2} - {victim})] == [None, None]
    os.kill(ranks.processes[victim].pid or 0, signal.SIGCONT)
    assert ranks.outcome(victim) is None
    ranks.end()
    _assert_whole(url, {1: 1, 100: 1}, 3)


# --- programs that just end -------------------------------------------------------------------

_PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from tectonic_client.checkpoint import CheckpointManager
    from tectonic_client.errors import UsedAfterFork
    url = sys.argv[1]
    large = {"a": np.zeros(20_000_000, np.uint8)}
    manager = CheckpointManager(url, "/runs/test", run_id="program")
    manager.save(1, {"a": np.arange(10)})
"""


def _run(url: str, rest: str, code: int) -> str:
    program = textwrap.dedent(_PROGRAM) + textwrap.dedent(rest)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("rest", "code", "steps"),
    [
        ("", 0, [1]),
        ("raise SystemExit(3)", 3, [1]),
        ("raise ValueError", 1, [1]),
        ("threading.Thread(target=manager.save, args=(2, large)).start()", 0, [1, 2]),
        ("del manager", 0, [1]),
    ],
    ids=["end", "exit", "error", "thread", "forgotten"],
)
def test_a_program_that_ends_without_close_leaves_its_session(
    url: str, rest: str, code: int, steps: list[int]
) -> None:
    """Nobody has to wait for its heartbeat or clean up after it; saves of threads are finished."""
    _run(url, rest, code)
    assert volume_status(url).sessions == []
    with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
        assert manager.steps() == steps


def test_a_save_in_the_background_when_the_program_ends(url: str) -> None:
    """A daemon thread's save is whole or nothing, and the session ends."""
    _run(
        url,
        """
        def save():
            try:
                manager.save(2, large)
            except BaseException:
                pass
        threading.Thread(target=save, daemon=True).start()
        """,
        0,
    )
    assert volume_status(url).sessions == []
    with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
        assert manager.steps() in ([1], [1, 2])
        assert all(manager.verify(step).ok for step in manager.steps())


def test_a_forked_child_cannot_use_its_parents_manager(url: str) -> None:
    """Every call says what to do; a manager of its own works; the parent's goes on."""
    _run(
        url,
        """
        child = os.fork()
        if not child:
            state = {"a": np.arange(10)}
            for call in (
                manager.steps, manager.latest, lambda: manager.save(2, state),
                lambda: manager.load(state), manager.read, lambda: manager.verify(1),
                lambda: manager.delete(1),
            ):
                try:
                    call()
                except UsedAfterFork as error:
                    assert "open it again in the child" in str(error)
                else:
                    raise SystemExit(7)
            manager.close()
            with CheckpointManager(url, "/runs/test", run_id="child") as own:
                own.save(3, state)
            raise SystemExit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        manager.save(4, large)
        assert manager.steps() == [1, 3, 4]
        """,
        0,
    )
    assert volume_status(url).sessions == []
