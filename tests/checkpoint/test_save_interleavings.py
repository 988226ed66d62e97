"""The collective save under any interleaving, with crashes, lost answers and suspensions."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.checkpoint.attempts import Attempt
from tectonic_client.checkpoint.collective import Read
from tectonic_client.errors import (
    RankMismatch,
    RanksMissing,
    StepExists,
    StepInProgress,
    TectonicError,
)
from tests.checkpoint.simulation import Process, World

TIMEOUT_S = 5.0

many = settings(max_examples=300, deadline=None)

CRASH, LOSE_BEFORE, LOSE_AFTER, SUSPEND, CLEAN = range(250, 255)


def make_schedule(seed: int, length: int, faults: float, switches: float) -> bytes:
    """A byte is who goes next; the highest values are faults. `switches` is how often somebody
    else goes on: both long runs of one process and wild changes find errors."""
    choice = random.Random(seed)
    schedule, who = bytearray(), 0
    for _ in range(length):
        if choice.random() < faults:
            schedule.append(choice.randrange(CRASH, CLEAN + 1))
            continue
        if choice.random() < switches:
            who = choice.randrange(CRASH)
        schedule.append(who)
    return bytes(schedule)


schedules = st.builds(
    make_schedule,
    st.integers(0, 1 << 32),
    st.integers(0, 300),
    st.sampled_from((0.0, 0.01, 0.03, 0.1)),
    st.sampled_from((0.2, 1.0)),
)


def play(world: World, schedule: bytes, *, spare: frozenset[int] = frozenset()) -> None:
    """Run the world by a schedule; ranks in `spare` do not crash."""
    target = 0
    for byte in schedule:
        ready = world.runnable()
        if not ready:
            return
        process = ready[target % len(ready)]
        if byte == CRASH:
            if process.rank not in spare:
                process.crash()
        elif byte in (LOSE_BEFORE, LOSE_AFTER):
            process.lose_answers.append(byte == LOSE_AFTER)
        elif byte == SUSPEND:
            process.wakes_at = world.now + 0.7 * TIMEOUT_S
        elif byte == CLEAN:
            for session in world.sessions.values():
                session.has_record = session.has_record and session.alive
        else:
            target = byte
            ready[target % len(ready)].step()


def finish(world: World) -> None:
    """Run the world until everybody has an answer, and check what must hold at the end."""
    begun = world.now
    world.run()
    assert world.now < begun + 20 * TIMEOUT_S, "somebody waited too long for an answer"
    world.check_whole()
    visible = world.visible()
    for process in world.processes:
        for step, result in process.results.items():
            if isinstance(result, Attempt):
                assert visible[step] == result.attempt_id, "a success that cannot be seen"


@many
@given(st.integers(1, 4), schedules)
def test_all_or_nothing(world_size: int, schedule: bytes) -> None:
    """Whatever happens to whom, survivors get an answer in time, and the same one; what can be seen
    is whole."""
    world = World()
    ranks = world.start(world_size, steps=(100, 101), timeout_s=TIMEOUT_S)
    play(world, schedule)
    finish(world)
    survivors = [process for process in ranks if process.alive]
    for step in (100, 101):
        results = [process.results[step] for process in survivors]
        assert len({isinstance(result, Attempt) for result in results}) <= 1, results
        if len(survivors) == world_size and SUSPEND not in schedule:
            assert all(isinstance(result, Attempt) for result in results), results


def resume(process: Process) -> Generator[Any, Any, None]:
    """What a restarted rank does: register, look what is there, save what comes next, and go on."""
    yield from process.join_run()
    there = yield Read(lambda tx: process.namespace.step_directory(tx, 100) is not None)
    there_too = yield Read(lambda tx: process.namespace.step_directory(tx, 101) is not None)
    first = 102 if there_too else 101 if there else 100
    for step in range(first, 104):
        yield from process.save(step)


@many
@given(st.integers(1, 4), schedules, schedules, st.data())
def test_a_restarted_job_succeeds(
    world_size: int, before: bytes, after: bytes, data: st.DataObject
) -> None:
    """A job that lost rank 0 (and maybe others) anywhere is restarted under the same run id, while
    survivors go on: its ranks agree on what is there, all their saves succeed, nothing is mixed."""
    world = World()
    old = world.start(world_size, steps=(100, 101), timeout_s=TIMEOUT_S)
    for process in old:
        process.step()
    play(world, bytes(byte for byte in before if byte != CLEAN))
    old[0].crash()
    for process in old[1:]:
        if data.draw(st.booleans()):
            process.crash()
    new = world.start(world_size, start="B", script=resume, timeout_s=10 * TIMEOUT_S)
    play(world, bytes(byte for byte in after if byte not in (CRASH, CLEAN)))
    finish(world)
    for process in new:
        assert process.results.keys() == new[0].results.keys(), "ranks saw different steps"
        assert all(isinstance(result, Attempt) for result in process.results.values()), (
            process.results
        )


@many
@given(st.integers(1, 3), st.integers(1, 3), schedules, schedules)
def test_two_jobs_at_once(size_one: int, size_two: int, before: bytes, during: bytes) -> None:
    """Two jobs that save the same steps: each step is one job's, whole; the others get one of a few
    clear errors; a later job succeeds."""
    world = World()
    world.start(size_one, run_id="one", steps=(100, 101), timeout_s=TIMEOUT_S)
    play(world, before)
    world.start(size_two, run_id="two", start="B", steps=(100, 101), timeout_s=TIMEOUT_S)
    play(world, during)
    finish(world)
    for process in world.processes:
        for result in process.results.values():
            if isinstance(result, TectonicError):
                expected = (StepExists, StepInProgress, RanksMissing, RankMismatch)
                assert isinstance(result, expected) or CLEAN in before + during
    later = world.start(2, run_id="three", start="C", steps=(102,))
    finish(world)
    assert all(isinstance(process.results[102], Attempt) for process in later)


@many
@given(st.integers(2, 4), schedules)
def test_failing_and_trying_again(world_size: int, schedule: bytes) -> None:
    """Ranks that all try a failed step again, as often as it takes, succeed in the end."""

    def stubborn(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        for _ in range(8):
            yield from process.save(100)
            if isinstance(process.results[100], Attempt | StepExists):
                return

    world = World()
    ranks = world.start(world_size, script=stubborn, timeout_s=TIMEOUT_S)
    play(world, bytes(byte for byte in schedule if byte not in (CRASH, CLEAN)))
    finish(world)
    assert world.visible().keys() == {100}
    assert all(isinstance(rank.results[100], Attempt) for rank in ranks), [
        rank.results[100] for rank in ranks
    ]
