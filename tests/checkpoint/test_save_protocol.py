"""The collective save, one situation at a time: what every rank is told, and what can be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import pytest

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.attempts import Arrival, Attempt, arrive, object_to, read_attempt
from tectonic_client.checkpoint.collective import Pause, Transact, WriteIndex
from tectonic_client.checkpoint.decisions import (
    Survey,
    commit,
    fail,
    not_arrived,
    read_parts,
    survey,
)
from tectonic_client.checkpoint.members import (
    leave,
    must_register,
    read_member,
    register,
    require_member,
)
from tectonic_client.checkpoint.names import INDEX_NAME, part_name
from tectonic_client.checkpoint.records import ObjectionKind, Outcome, PartRecord, Verdict
from tectonic_client.errors import (
    CheckpointError,
    NoSpace,
    RankMismatch,
    RanksMissing,
    SessionLost,
    StepExists,
    StepInProgress,
    TectonicError,
)
from tectonic_client.limits import ATTEMPT_KEPT_S
from tests.checkpoint.simulation import DIRECTORY, Process, SimFile, World


def result(process: Process, step: int = 100) -> Any:
    return process.results[step]


def error_of(process: Process, kind: type[TectonicError], step: int = 100) -> str:
    """The one-line message of the error that a save came to."""
    found = process.results[step]
    assert type(found) is kind, found
    assert "\n" not in str(found)
    return str(found)


def succeeded(processes: Iterable[Process], step: int = 100) -> bool:
    return all(isinstance(process.results[step], Attempt) for process in processes)


def crash_before(process: Process, kind: type[Any], count: int = 1) -> None:
    """Kill the process when it is about to make its `count`-th request of this kind."""
    carry_out, seen = process._carry_out, 0

    def crashing(request: Any) -> Any:
        nonlocal seen
        seen += isinstance(request, kind)
        if seen == count:
            process.crash()
            return None
        return carry_out(request)

    process._carry_out = crashing  # type: ignore[method-assign]


def is_durable(request: Any) -> bool:
    return isinstance(request, Transact) and request.durable


# --- success ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_see_the_commit(world_size: int) -> None:
    """Each rank returns when the step is visible, with every part and an index."""
    world = World()
    ranks = world.start(world_size)
    world.run()
    assert succeeded(ranks)
    directory = world.visible()[100]
    assert {result(rank).attempt_id for rank in ranks} == {directory}
    names = {INDEX_NAME, *(part_name(rank, world_size) for rank in range(world_size))}
    assert world.files(directory).keys() == names
    world.check_whole()


def test_one_write_per_rank_and_save_on_keys_of_its_own() -> None:
    """A save costs a rank one write transaction (rank 0: three), however many there are, and no
    two ranks write one key; the commit leaves one record of the protocol per step."""
    world = World()
    ranks = world.start(16, steps=(100, 200, 300))
    world.run()
    assert [rank.transactions for rank in ranks] == [1 + 3 * 3] + [1 + 3] * 15
    for rank in ranks[1:]:
        for other in ranks[1:]:
            assert rank is other or not rank.written & other.written
    others = set().union(*(rank.written for rank in ranks[1:]))
    members = {keys.member(DIRECTORY, "run", rank) for rank in range(16)}
    assert not others & ranks[0].written & members, "rank 0 wrote another rank's member"
    rows = world.kv.read(lambda tx: tx.scan(b"K", b"L"))
    assert len(rows) == 16 + 3


def test_durability_is_asked_for_once() -> None:
    """Only the commit waits for power-loss durability; it covers everything before it."""
    world = World()
    ranks = world.start(3)
    durable: list[Process] = []
    for rank in ranks:
        carry_out = rank._carry_out

        def noting(request: Any, rank: Process = rank, carry_out: Any = carry_out) -> Any:
            if is_durable(request):
                durable.append(rank)
            return carry_out(request)

        rank._carry_out = noting  # type: ignore[method-assign]
    world.run()
    assert durable == [ranks[0]]


def test_a_late_rank_joins() -> None:
    """A rank that begins long after the others still makes the save succeed."""
    world = World()
    ranks = world.start(3, ranks=(0, 1), timeout_s=60)
    for _ in range(200):
        ready = world.runnable()
        ready[0].step()
    (late,) = world.start(3, ranks=(2,))
    world.run()
    assert succeeded([*ranks, late])


def threads(
    process: Process, works: Iterable[tuple[float, Generator[Any, Any, None]]]
) -> Generator[Any, Any, None]:
    """Run generators in turn, as threads would, each from its delay in seconds on."""
    begun = process.world.now
    waiting = sorted(works, key=lambda pair: pair[0])
    running: list[tuple[Generator[Any, Any, None], Any]] = []
    while waiting or running:
        while waiting and process.world.now >= begun + waiting[0][0]:
            work = waiting.pop(0)[1]
            running.append((work, next(work)))
        if not running:
            yield Pause(0.1)
        for work, request in list(running):
            running.remove((work, request))
            answer = yield request
            with contextlib.suppress(StopIteration):
                running.append((work, work.send(answer)))


def continued(work: Generator[Any, Any, None], request: Any) -> Generator[Any, Any, None]:
    """The rest of a generator that has made `request`."""
    with contextlib.suppress(StopIteration):
        while True:
            answer = yield request
            request = work.send(answer)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("steps", [(100, 101), (101, 100)])
def test_two_steps_at_once(late: int, steps: tuple[int, int]) -> None:
    """Two concurrent saves of different steps, begun in the same order everywhere, one rank seconds
    later with the second, both succeed: they are not taken for a disagreement."""

    def both(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        delay = 4.0 if process.rank == late else 0.0
        works = [(0.0, process.save(steps[0])), (delay, process.save(steps[1]))]
        yield from threads(process, works)

    world = World()
    ranks = world.start(3, script=both, uploads=400, timeout_s=60)
    ranks[0].uploads = 2
    world.run()
    assert succeeded(ranks, 100)
    assert succeeded(ranks, 101)
    world.check_whole()


def test_an_objection_that_was_too_early() -> None:
    """Rank 1 waits for step 101, which rank 0 has begun but not opened yet, and has not come to
    step 100: rank 0 knows better than to take that for a disagreement, then and later."""
    world = World()

    def slow_to_open(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        second, first = process.save(101), process.save(100)
        opening, request = next(second), next(first)
        begun = process.world.now
        while process.world.now < begun + 3:
            request = first.send((yield request))
        works = [(0.0, continued(second, opening)), (0.0, continued(first, request))]
        yield from threads(process, works)

    def one_after_the_other(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        yield from process.save(101)
        yield Pause(2)
        yield from process.save(100)

    (zero,) = world.start(2, ranks=(0,), script=slow_to_open, timeout_s=60)
    (one,) = world.start(2, ranks=(1,), script=one_after_the_other, timeout_s=60)
    world.run()
    assert succeeded([zero, one], 100)
    assert succeeded([zero, one], 101)
    assert world.objections, "nobody objected: the test tests nothing"
    world.check_whole()


# --- steps that are taken ---------------------------------------------------------------------


def test_saving_a_step_twice() -> None:
    """A committed step is not overwritten: StepExists on every rank, at once; then others go on."""
    world = World()
    world.start(2)
    world.run()
    again = world.start(2, start="B", steps=(100, 101))
    world.run()
    for rank in again:
        assert "step 100 exists" in error_of(rank, StepExists)
    assert succeeded(again, 101)
    world.check_whole()


def test_another_live_run_saves_the_step() -> None:
    """The run that comes second is told who is saving; the first one succeeds."""
    world = World()
    first = world.start(2, run_id="one", uploads=50)
    while not world.open_attempts():
        first[0].step()
    second = world.start(2, run_id="two", start="B")
    world.run()
    assert succeeded(first)
    for rank in second:
        message = error_of(rank, StepInProgress)
        assert "run 'one' (hostA, pid" in message
        assert "pass the same run_id" in message
    world.check_whole()


def test_a_dead_run_left_an_attempt() -> None:
    """What another run's crash left is replaced; its parts are in nothing that can be seen."""
    world = World()
    dead = world.start(3, run_id="one")
    for process in dead:
        crash_before(process, PartRecord)
    crash_before(dead[2], Transact, 2)
    for _ in range(60):
        world.runnable()[0].step()
    assert world.open_attempts()
    for process in dead:
        process.crash()
    ranks = world.start(3, run_id="two", start="B")
    world.run()
    assert succeeded(ranks)
    world.check_whole()


# --- disagreement -----------------------------------------------------------------------------


def test_ranks_disagree_on_world_size() -> None:
    """Every rank gets the same message: who says what."""
    world = World()
    ranks = world.start(3, ranks=(0, 1))
    ranks += world.start(4, ranks=(2,))
    world.run()
    messages = {error_of(rank, RankMismatch) for rank in ranks}
    (message,) = messages
    assert "rank 0 (hostA, pid" in message
    assert "says 3, rank 2 (hostA, pid" in message
    assert message.endswith("says 4")
    assert world.visible() == {}
    assert world.now < 1005, "it took a timeout"
    world.check_whole()


def test_a_rank_beyond_the_world() -> None:
    """A rank that the others do not count is told; their own save may succeed."""
    world = World()
    world.start(2)
    (extra,) = world.start(4, ranks=(3,))
    world.run()
    assert isinstance(result(extra), RankMismatch | StepExists)
    world.check_whole()


def test_ranks_disagree_on_the_step() -> None:
    """Rank 0 at step 100, rank 1 at 101: everyone is told within seconds, not at the timeout."""
    world = World()
    (zero,) = world.start(3, ranks=(0,), steps=(100,), timeout_s=600)
    (one,) = world.start(3, ranks=(1,), steps=(101,), timeout_s=600)
    (two,) = world.start(3, ranks=(2,), steps=(100,), timeout_s=600)
    world.run()
    messages = {
        error_of(zero, RankMismatch), error_of(one, RankMismatch, 101), error_of(two, RankMismatch)
    }  # fmt: skip
    (message,) = messages
    assert "rank 0 (hostA, pid" in message
    assert "saves 100, rank 1 (hostA, pid" in message
    assert message.endswith("saves 101")
    assert world.now < 1010
    world.check_whole()


def test_a_rank_taken_over() -> None:
    """Two live processes as the same rank: the older one is told of the newer, which succeeds."""
    world = World()
    old = world.start(1, steps=(100,), start="A", uploads=50)[0]
    while not world.open_attempts():
        old.step()
    new = world.start(1, start="B")[0]
    world.run()
    assert succeeded([new])
    assert isinstance(result(old), RankMismatch | RanksMissing | StepExists)
    later = old.world.start(1, start="C", steps=(101,))[0]
    world.run()
    assert succeeded([later], 101)
    world.check_whole()


def test_the_message_of_a_takeover() -> None:
    """A rank whose place was taken names the process that has it now."""
    world = World()
    (old,) = world.start(2, ranks=(1,))
    old.step()
    old.step()
    (new,) = world.start(2, ranks=(1,), start="B")
    new.step()
    new.step()
    while not old.done:
        world.runnable()
        old.step()
    message = error_of(old, RankMismatch)
    assert f"was taken over by hostB, pid {new.me.pid}" in message
    assert "earlier start" in message


def test_an_older_process_comes_late() -> None:
    """The rank belongs to the process that was started last, not to the one that registers last."""
    world = World()
    (old,) = world.start(2, ranks=(1,))
    (new,) = world.start(2, ranks=(1,), start="B")
    register_all([new])
    with pytest.raises(RankMismatch, match=f"taken over by hostB, pid {new.me.pid}"):
        world.transact(lambda tx: register(tx, old.namespace, old.me, saving=True))


def test_a_rank_that_was_replaced_does_not_come_back() -> None:
    """A process whose rank was taken over is refused also when its successor has died."""
    world = World()
    old = world.start(1, steps=(100, 200))[0]
    while 100 not in old.results:
        old.step()
    (new,) = world.start(1, start="B")
    register_all([new])
    new.crash()
    world.run()
    assert "taken over by hostB" in error_of(old, RankMismatch, 200)


def test_taken_over_while_writing() -> None:
    """A rank that is taken over after it joined an attempt cannot bring its part any more."""
    world = World()
    ranks = world.start(2, uploads=50, timeout_s=10)
    while ranks[1].memory.leader is None:
        world.runnable()[0].step()
    new = world.start(2, ranks=(1,), start="B", timeout_s=5)
    register_all(new)
    world.run()
    assert "taken over by hostB" in error_of(ranks[1], RankMismatch)
    assert isinstance(result(ranks[0]), RanksMissing)
    assert world.visible() == {}
    world.check_whole()


def test_a_second_manager_of_one_process() -> None:
    """Of two managers of one live process, the one that saves is the rank."""
    world = World()
    (first,) = world.start(2, ranks=(1,))
    (second,) = world.start(2, ranks=(1,))
    second.me = second.me.__class__(
        **{name: getattr(second.me, name) for name in second.me.__slots__}
        | {"process": first.me.process}
    )

    def registered(process: Process, saving: bool) -> bool:
        done: bool = world.transact(
            lambda tx: register(tx, process.namespace, process.me, saving=saving)
        )[0]
        return done

    assert registered(first, False)
    assert not registered(second, False)
    assert registered(second, True)
    first.memory.registered = True
    holds = partial(must_register, me=first.me, memory=first.memory)
    assert world.read(holds), "the first one may be the rank again"
    assert registered(first, True)
    assert not world.read(holds)
    with pytest.raises(RankMismatch, match="another manager of this process"):
        world.read(lambda tx: require_member(second.me, read_member(tx, second.me, 1)))


def register_all(processes: Iterable[Process]) -> None:
    """Let processes make their managers, no more."""
    for process in processes:
        process.step()


def drain(process: Process) -> None:
    """Run one process alone to its end."""
    while not process.done:
        process.world.now = max(process.world.now, process.wakes_at)
        process.step()


# --- ranks that are missing -------------------------------------------------------------------


def test_a_rank_never_starts() -> None:
    """At the timeout every rank is told which ones did not arrive; nothing is visible."""
    world = World()
    ranks = world.start(5, ranks=(0, 1, 4), timeout_s=10)
    world.run()
    for rank in ranks:
        message = error_of(rank, RanksMissing)
        assert message == "step 100: ranks 2, 3 did not arrive within 10 s"
        assert result(rank).ranks == (2, 3)
    assert world.visible() == {}
    assert world.now < 1012
    world.check_whole()


def test_rank_0_never_starts() -> None:
    """Without rank 0 the others are told at the timeout, and why."""
    world = World()
    ranks = world.start(3, ranks=(1, 2), timeout_s=10)
    world.run()
    for rank in ranks:
        assert result(rank).ranks == (0,)
        assert "no rank 0 of run 'run' has made its manager" in error_of(rank, RanksMissing)


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("when", [0, 1, 2, 3, 5])
def test_a_rank_dies_before_it_arrives(victim: int, when: int) -> None:
    """A rank that was seen alive and is dead fails the save early, named, on every survivor."""
    world = World()
    ranks = world.start(3, timeout_s=600, uploads=8)
    register_all(ranks)
    for _ in range(when):
        ranks[0].step() if ranks[0] in world.runnable() else None
        ranks[victim].step() if ranks[victim] in world.runnable() else None
    ranks[victim].crash()
    world.run()
    for rank in ranks:
        if rank is not ranks[victim]:
            assert result(rank).ranks == (victim,)
            message = error_of(rank, RanksMissing)
            assert f"rank {victim} (hostA, pid {ranks[victim].me.pid})" in message
    assert world.visible() == {}
    assert world.now < 1010, "it took a timeout"
    world.check_whole()


def test_a_rank_died_between_two_saves() -> None:
    """A rank that took part in one save and is dead at the next fails that at once."""
    world = World()
    one, two = world.start(3, ranks=(1, 2), steps=(100, 200), timeout_s=600)
    (zero,) = world.start(3, ranks=(0,), steps=(100, 200), timeout_s=600)
    two.steps = (100,)
    while not two.done:
        world.runnable()[0].step()
    two.crash()
    started = world.now
    world.run()
    for rank in (zero, one):
        assert "gone before arriving: rank 2 (hostA" in error_of(rank, RanksMissing, 200)
    assert world.now < started + 5


def test_a_rank_that_does_not_save_any_more() -> None:
    """A rank that is alive but does not come is waited for until the timeout."""
    world = World()
    ranks = world.start(2, steps=(100, 200), timeout_s=10)
    ranks[1].steps = (100,)
    world.run()
    assert error_of(ranks[0], RanksMissing, 200) == ("step 200: rank 1 did not arrive within 10 s")


def test_a_rank_fails_to_write() -> None:
    """A full store on one rank: the others get its reason at once."""
    world = World()

    def failing(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        process.uploads = 10**9
        save = process.new_save(100)
        work = save.run()
        request = next(work)
        for _ in range(20):
            request = work.send((yield request))
        work.close()
        process.results[100] = NoSpace("store /flash is full")
        yield from save.give_up(str(process.results[100]))

    healthy = world.start(3, ranks=(0, 2), timeout_s=600)
    (full,) = world.start(3, ranks=(1,), script=failing)
    world.run()
    for rank in healthy:
        message = error_of(rank, RanksMissing)
        assert message.startswith("step 100: rank 1 (hostA, pid ")
        assert message.endswith(" failed: store /flash is full")
        assert result(rank).ranks == (1,)
    assert world.now < 1005
    assert not full.memory.active
    world.check_whole()


@pytest.mark.parametrize("steps", range(5))
def test_rank_0_fails_to_write(steps: int) -> None:
    """The coordinator's own failure reaches the others at once, also before it has opened."""
    world = World()

    def failing(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        save = process.new_save(100)
        work = save.run()
        request = next(work)
        for _ in range(steps):
            request = work.send((yield request))
        work.close()
        yield from save.give_up("interrupted")

    (zero,) = world.start(3, ranks=(0,), script=failing)
    others = world.start(3, ranks=(1, 2), timeout_s=600)
    world.run()
    assert zero.results == {}
    for rank in others:
        assert error_of(rank, CheckpointError).endswith("failed: interrupted")
    assert world.now < 1005
    world.check_whole()


@pytest.mark.parametrize("patient", [True, False])
def test_a_rank_fails_before_there_is_an_attempt(patient: bool) -> None:
    """Rank 0 comes late; a patient rank has waited for it to say that it failed."""
    world = World()

    def failing(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        save = process.new_save(100)
        work = save.run()
        request = next(work)
        for _ in range(3):
            request = work.send((yield request))
        work.close()
        yield from save.give_up("store is full", patient=patient)

    world.start(2, ranks=(1,), script=failing)
    for _ in range(50):
        for process in world.runnable():
            process.step()
    (zero,) = world.start(2, ranks=(0,), timeout_s=20)
    world.run()
    message = error_of(zero, RanksMissing)
    assert ("failed: store is full" in message) == patient
    assert ("did not arrive" in message) == (not patient)
    world.check_whole()


# --- rank 0 dies ------------------------------------------------------------------------------


def crash_rank_0(predicate: Callable[[Any], bool], **options: Any) -> tuple[World, list[Process]]:
    """Kill rank 0 when it is about to make a request that fulfils `predicate`."""
    world = World()
    ranks = world.start(3, timeout_s=600, **options)
    carry_out = ranks[0]._carry_out

    def crashing(request: Any) -> Any:
        if predicate(request):
            ranks[0].crash()
            return None
        return carry_out(request)

    ranks[0]._carry_out = crashing  # type: ignore[method-assign]
    world.run()
    return world, ranks


@pytest.mark.parametrize("what", ["before the index", "before the commit"])
def test_rank_0_dies_after_all_arrived(what: str) -> None:
    """Another rank commits in its place: the step is whole and visible, the survivors succeed."""
    world, ranks = crash_rank_0(
        (lambda request: isinstance(request, WriteIndex)) if "index" in what else is_durable
    )
    assert succeeded(ranks[1:])
    assert world.visible().keys() == {100}
    assert world.now < 1010
    world.check_whole()


@pytest.mark.parametrize("arrived", [True, False])
def test_rank_0_dies_before_a_slow_rank_has_joined(arrived: bool) -> None:
    """Rank 1 waits in its attempt, rank 2 comes when it is dead: both end at once and alike, with
    the step where rank 0 had arrived, else told that it is gone."""
    world = World()
    ranks = world.start(3, steps=(90, 100), timeout_s=600)
    zero, one, two = ranks

    def all_but_rank_2() -> list[Process]:
        # Rank 2 is slow: it ends the first save and does not begin the second one.
        return [p for p in world.runnable() if p is not two or 90 not in two.results]

    while (parts := _parts_of(world, 100)) is None or 1 not in parts or (0 in parts) != arrived:
        for process in all_but_rank_2():
            waits_to_arrive = process is zero and not arrived and parts is not None
            if not waits_to_arrive:
                process.step()
    zero.crash()
    died = world.now
    world.run()
    if arrived:
        assert succeeded([one, two])
    else:
        for rank in (one, two):
            assert "gone before arriving: rank 0" in error_of(rank, RanksMissing)
            assert result(rank).ranks == (0,)
    assert world.now < died + 5
    world.check_whole()


def _parts_of(world: World, step: int) -> set[int] | None:
    """Ranks that have arrived at the attempt at a step; None where there is none."""
    record = world.read(lambda tx: read_attempt(tx, DIRECTORY, step))
    if record is None:
        return None
    rows = world.read(lambda tx: tx.scan(*keys.parts(DIRECTORY, record.attempt_id)))
    return {keys.parse_rank(key) for key, _ in rows}


@pytest.mark.parametrize("earlier", [True, False])
def test_rank_0_fails_and_leaves_before_a_slow_rank_has_looked(earlier: bool) -> None:
    """The slow rank learns at once why it failed, though nobody is rank 0 any more."""
    world = World()

    def failing(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        if earlier:
            yield from process.new_save(90).run()
        process.results[100] = NoSpace("no such leaf")
        yield from process.new_save(100).give_up("no such leaf")
        yield Transact(lambda tx: leave(tx, process.me))

    (zero,) = world.start(3, ranks=(0,), script=failing)
    others = world.start(3, ranks=(1, 2), steps=(90, 100) if earlier else (100,), timeout_s=600)
    register_all([zero, *others])
    while not zero.done:
        for process in world.runnable():
            if process is zero or (earlier and 90 not in process.results):
                process.step()
    failed = world.now
    world.run()
    for rank in others:
        assert error_of(rank, CheckpointError).endswith("failed: no such leaf")
    assert world.now < failed + 5
    world.check_whole()


def test_rank_0_is_too_slow_to_commit() -> None:
    """When time is up another rank commits; rank 0, awake again, sees the step as its success."""
    world = World()
    zero, one = world.start(2, timeout_s=5)
    carry_out, indices = zero._carry_out, 0

    def dozing(request: Any) -> Any:
        nonlocal indices
        indices += isinstance(request, WriteIndex)
        answer = carry_out(request)
        if isinstance(answer, Survey) and not answer.missing:
            zero.wakes_at = world.now + 50
        return answer

    zero._carry_out = dozing  # type: ignore[method-assign]
    world.run()
    assert succeeded([zero, one])
    assert indices == 0
    world.check_whole()


def test_rank_0_dies_before_it_arrives() -> None:
    """Its attempt can never be complete: the survivors are told at once."""
    seen = 0

    def third_transaction(request: Any) -> bool:
        nonlocal seen
        seen += isinstance(request, Transact)
        return seen == 3

    world, ranks = crash_rank_0(third_transaction)
    for rank in ranks[1:]:
        assert "gone before arriving: rank 0 (hostA" in error_of(rank, RanksMissing)
        assert result(rank).ranks == (0,)
    assert world.now < 1010
    world.check_whole()


def test_rank_0_dies_before_it_opens() -> None:
    """A rank 0 that registered in a rank's lifetime and died is noticed; else the timeout is."""
    world = World()
    others = world.start(3, ranks=(1, 2), timeout_s=20)
    (zero,) = world.start(3, ranks=(0,))
    register_all([zero])
    zero.crash()
    world.run()
    for rank in others:
        assert "rank 0 (hostA, pid" in error_of(rank, RanksMissing)
        assert result(rank).ranks == (0,)
    assert world.now < 1005


# --- a job that was restarted -----------------------------------------------------------------


@pytest.mark.parametrize("same_run_id", [True, False])
@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_restarted_job_saves_the_same_step(turns: int, same_run_id: bool) -> None:
    """Killed at any point of a save, the restarted job saves the step with parts of its own."""
    world = World()
    dead = world.start(3, run_id="one")
    for turn in range(turns):
        ready = [process for process in world.runnable() if not process.done]
        if ready:
            ready[turn % len(ready)].step()
    for process in dead:
        process.crash()
    before = world.visible()
    run_id = "one" if same_run_id else "two"
    ranks = world.start(3, run_id=run_id, start="B", steps=(101,) if before else (100,))
    world.run()
    assert succeeded(ranks, 101 if before else 100)
    world.check_whole()


def test_a_survivor_of_an_earlier_start() -> None:
    """A rank that outlived the rank 0 that it knows joins no attempt of the next one; restarted
    itself, it does."""

    def slow(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        yield from process.save(100)
        yield Pause(100)
        yield from process.save(200)

    world = World()
    old = world.start(2, script=slow)
    while not all(100 in process.results for process in old):
        world.runnable()[0].step()
    old[0].crash()
    (zero,) = world.start(2, ranks=(0,), start="B", steps=(200,), timeout_s=600)
    while not world.open_attempts():
        zero.step()
    drain(old[1])
    assert "belongs to an earlier start of run 'run'" in error_of(old[1], RankMismatch, 200)
    (one,) = world.start(2, ranks=(1,), start="B", steps=(200,))
    world.run()
    assert succeeded([zero, one], 200)
    world.check_whole()


def test_a_survivor_that_never_saved() -> None:
    """A rank that never joined anything, of a start whose rank 0 died, does not slip into the next
    start's attempt in place of its successor."""
    world = World()
    old = world.start(2, start="A")
    register_all(old)
    while not world.open_attempts():
        old[0].step()
    old[0].crash()
    (zero,) = world.start(2, ranks=(0,), start="B", timeout_s=600)
    while len(world.verdicts) < 2:
        zero.step()
    drain(old[1])
    assert "earlier start" in error_of(old[1], RankMismatch)
    (one,) = world.start(2, ranks=(1,), start="B")
    world.run()
    assert succeeded([zero, one])
    world.check_whole()


def test_a_survivor_beside_a_live_rank_0() -> None:
    """A rank that saved with one rank 0 joins no other, even where the first one still lives."""

    def slow(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        yield from process.save(100)
        yield Pause(100)
        yield from process.save(200)

    world = World()
    old = world.start(2, script=slow)
    while not all(100 in process.results for process in old):
        world.runnable()[0].step()
    (zero,) = world.start(2, ranks=(0,), start="B", steps=(200,), timeout_s=600)
    while not world.open_attempts():
        zero.step()
    drain(old[1])
    assert "belongs to an earlier start" in error_of(old[1], RankMismatch, 200)
    (one,) = world.start(2, ranks=(1,), start="B", steps=(200,), timeout_s=600)
    world.run()
    assert succeeded([zero, one], 200)
    assert "was taken over by hostB" in error_of(old[0], RankMismatch, 200)
    world.check_whole()


def test_dead_members_of_an_earlier_start() -> None:
    """A rank whose former process is dead is waited for: its successor may still be starting."""
    world = World()
    old = world.start(3)
    world.run()
    for process in old:
        process.crash()
    new = world.start(3, ranks=(0, 1), start="B", steps=(101,), timeout_s=60)
    until = world.now + 20
    while world.now < until:
        world.runnable()[0].step()
    new += world.start(3, ranks=(2,), start="B", steps=(101,))
    world.run()
    assert succeeded(new, 101)
    world.check_whole()


def test_a_rank_restarted_alone() -> None:
    """A rank that was restarted while the others went on is named at once: it belongs to another
    start than they."""
    world = World()
    ranks = world.start(3, steps=(100, 200), timeout_s=600)
    while not ranks[2].done or not all(100 in rank.results for rank in ranks):
        if 100 in ranks[2].results:
            ranks[2].crash()
        world.runnable()[0].step()
    (again,) = world.start(3, ranks=(2,), start="B", steps=(200,), timeout_s=5)
    world.run()
    for rank in ranks[:2]:
        assert result(rank, 200).ranks == (2,)
    assert "is of an earlier start" in error_of(again, RanksMissing, 200)
    world.check_whole()


def test_a_new_rank_does_not_join_an_old_coordinator() -> None:
    """A restarted rank waits for the rank 0 of its own start, not one that still hangs around."""
    world = World()
    old = world.start(2, start="A", timeout_s=20)
    for process in old:
        process.step()
        process.step()
    while not world.open_attempts():
        old[0].step()
    old[1].crash()
    (one,) = world.start(2, ranks=(1,), start="B", timeout_s=60)
    for _ in range(20):
        world.runnable()
        one.step()
    assert 100 not in one.results
    (zero,) = world.start(2, ranks=(0,), start="B", timeout_s=60)
    world.run()
    assert succeeded([zero, one])
    assert isinstance(result(old[0]), RanksMissing | RankMismatch)
    world.check_whole()


def test_nothing_old_appears_behind_a_new_start() -> None:
    """Once a rank of a new start has registered, the old start's complete attempt cannot commit."""
    world = World()
    old = world.start(2, start="A")
    carry_out = old[0]._carry_out
    late: list[Process] = []

    def pausing(request: Any) -> Any:
        if is_durable(request) and not late:
            late.extend(world.start(2, ranks=(1,), start="B", steps=(101,), timeout_s=5))
            late[0].step()
            late[0].step()
        return carry_out(request)

    old[0]._carry_out = pausing  # type: ignore[method-assign]
    world.run()
    assert "rank 1 was taken over by hostB" in error_of(old[0], RankMismatch)
    assert world.visible() == {}
    world.check_whole()


def test_saving_again_after_a_failure() -> None:
    """The same ranks try the step again after a timeout, and it succeeds."""
    world = World()

    def twice(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        yield from process.save(100)
        process.results[1] = process.results.pop(100)
        yield from process.save(100)

    ranks = world.start(3, ranks=(0, 1), script=twice, timeout_s=5)
    while not all(1 in rank.results for rank in ranks):
        world.runnable()[0].step()
    ranks += world.start(3, ranks=(2,), timeout_s=5)
    world.run()
    assert result(ranks[0], 1).ranks == (2,)
    assert succeeded(ranks)
    world.check_whole()


def test_trying_again_at_once() -> None:
    """A rank that tries again before rank 0 does waits for the new attempt; the verdict of the old
    one is given once only, also to a rank that came too late for it."""

    def patient(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        if process.rank == 1:
            yield Pause(20)
        yield from process.save(100)
        process.results[1] = process.results.pop(100)
        if process.rank == 0:
            yield Pause(15)
        yield from process.save(100)

    world = World()
    ranks = world.start(2, script=patient, timeout_s=10)
    world.run()
    for rank in ranks:
        assert "rank 1 did not arrive within 10 s" in error_of(rank, RanksMissing, 1)
    assert succeeded(ranks)
    world.check_whole()


def test_deleted_and_saved_again() -> None:
    """A step that was deleted can be saved again; the old outcome confuses nobody."""

    def twice(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        yield from process.save(100)
        yield Pause(5)
        process.results.clear()
        yield from process.save(100)

    world = World()
    ranks = world.start(2, script=twice)
    while not all(100 in rank.results for rank in ranks):
        world.runnable()[0].step()
    first = world.visible()[100]
    world.transact(lambda tx: tx.delete(b"Xs%010d" % 100))
    world.run()
    assert succeeded(ranks)
    assert world.visible()[100] != first
    world.check_whole()


# --- lost answers, lost sessions, upkeep ------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("took_effect", [True, False])
def test_a_lost_answer(rank: int, number: int, took_effect: bool) -> None:
    """A transaction of unknown outcome is tried again: nothing happens twice, nothing is lost."""
    world = World()
    ranks = world.start(3)

    def losing(process: Process) -> Generator[Any, Any, None]:
        yield from process.join_run()
        process.lose_answers = [None] * number + [took_effect]
        yield from process.save(100)

    ranks[rank]._work = losing(ranks[rank])
    world.run()
    assert succeeded(ranks)
    world.check_whole()


def test_a_lost_answer_to_the_opening() -> None:
    """Rank 0 opens an attempt, does not learn it, and asks again when all others have arrived."""
    world = World()
    ranks = world.start(3)
    register_all(ranks)
    ranks[0].lose_answers = [True]
    while not world.open_attempts():
        ranks[0].step()
    (attempt,) = world.open_attempts()
    ranks[0].wakes_at = world.now + 5
    while world.now < 1004:
        world.runnable()[0].step()
    world.run()
    assert succeeded(ranks)
    assert world.visible() == {100: attempt}
    world.check_whole()


def test_deciding_too_early() -> None:
    """No commit without all parts, no missing ranks that have arrived: the deciders look again."""
    world = World()
    ranks = world.start(2, uploads=0)
    register_all(ranks)
    while not world.open_attempts():
        ranks[0].step()
    zero = ranks[0]
    index = SimFile(world.next_id(), 5, [2, "A"])

    def attempt() -> Attempt:
        record = world.read(lambda tx: read_attempt(tx, DIRECTORY, 100))
        return Attempt(100, record)

    def try_commit() -> Outcome:
        mine = attempt()
        verdict, _ = world.transact(lambda tx: commit(tx, zero.namespace, zero.me, mine, index))
        return Outcome(verdict.outcome)

    def try_fail() -> Outcome:
        mine = attempt()
        due = not_arrived(mine, (1,), 5)
        verdict, _ = world.transact(lambda tx: fail(tx, zero.namespace, zero.me, mine, due))
        return Outcome(verdict.outcome)

    assert try_commit() is Outcome.OPEN
    arrived: set[int] = set()
    while len(arrived) < 2:
        world.runnable()
        for rank in ranks:
            if rank.rank not in arrived:
                rank.step()
        arrived = set(world.read(partial(read_parts, me=zero.me, attempt=attempt())))
    assert try_fail() is Outcome.OPEN
    assert try_commit() is Outcome.COMMITTED
    assert try_commit() is Outcome.COMMITTED
    assert try_fail() is Outcome.COMMITTED
    world.check_whole()


def test_objections_come_and_go() -> None:
    """Who arrives has withdrawn its objection; one to an attempt that has ended leaves no trace."""
    world = World()
    zero, one = world.start(2, uploads=0)
    register_all([zero, one])
    while not world.open_attempts():
        zero.step()
    record = world.read(lambda tx: read_attempt(tx, DIRECTORY, 100))
    attempt = Attempt(100, record)
    arrival = Arrival(SimFile(world.next_id(), 1, ["A", 1, 100]), 0, 0)

    def objected() -> bool:
        world.transact(lambda tx: object_to(tx, one.me, attempt, ObjectionKind.ELSEWHERE, 101))
        return bool(world.read(lambda tx: tx.scan(*keys.objections(DIRECTORY, record.attempt_id))))

    def decision() -> Verdict | None:
        seen = world.read(
            lambda tx: survey(
                tx, zero.namespace, zero.me, attempt, zero.memory, {0, 1}, liveness=False
            )
        )
        return seen.decision  # type: ignore[no-any-return]  # a survey's

    assert objected()
    found = decision()
    assert found is not None
    assert found.outcome is Outcome.RANK_MISMATCH
    world.transact(lambda tx: arrive(tx, one.namespace, one.me, attempt, arrival))
    assert decision() is None
    world.transact(lambda tx: fail(tx, zero.namespace, zero.me, attempt, found))
    assert not objected()
    world.check_whole()


def test_a_session_that_was_cleaned_up() -> None:
    """A rank that was declared dead cannot bring its part: SessionLost, and the others are told."""
    world = World()
    ranks = world.start(2, uploads=10, timeout_s=20)
    for rank in ranks:
        rank.step()
        rank.step()
    world.sessions[ranks[1].session].has_record = False
    world.run()
    error_of(ranks[1], SessionLost)
    assert result(ranks[0]).ranks == (1,)
    world.check_whole()


def test_a_clean_leave() -> None:
    """A manager that is closed gives its rank free, but not one that was taken over."""
    world = World()
    (old,) = world.start(2, ranks=(1,))
    (new,) = world.start(2, ranks=(1,), start="B")
    register_all([old, new])
    key = keys.member(DIRECTORY, "run", 1)
    world.transact(lambda tx: leave(tx, old.me))
    assert world.kv.read(lambda tx: tx.get(key)) is not None
    world.transact(lambda tx: leave(tx, new.me))
    assert world.kv.read(lambda tx: tx.get(key)) is None


def test_old_outcomes_are_swept() -> None:
    """Records of attempts do not pile up: each save removes several that are old."""
    world = World()
    ranks = world.start(1, steps=range(100, 140))
    world.run()
    assert len(world.verdicts) == 40
    world.now += ATTEMPT_KEPT_S + 1
    more = world.start(1, start="B", steps=(200, 201, 202))
    world.run()
    assert succeeded(ranks, 139)
    assert succeeded(more, 202)
    assert len(world.kv.read(lambda tx: tx.scan(*keys.attempts(DIRECTORY)))) == 3
    world.check_whole()


def test_an_attempt_left_at_another_step_is_cleaned_up() -> None:
    """What a dead job left at a step that nobody saves again is handed over in time."""
    world = World()
    (dead,) = world.start(2, ranks=(0,), steps=(50,))
    while not world.open_attempts():
        dead.step()
    dead.crash()
    world.now += ATTEMPT_KEPT_S + 1
    ranks = world.start(1, run_id="two", start="B")
    world.run()
    assert succeeded(ranks)
    assert world.hidden() == set()


def test_an_outcome_that_was_swept() -> None:
    """A rank that slept for longer than outcomes are kept finds its step, or learns that it is not
    to be found."""
    for visible in (True, False):
        world = World()
        ranks = world.start(2)
        while not ranks[0].done:
            ranks[0].step() if ranks[0] in world.runnable() else ranks[1].step()
            if ranks[1].transactions == 2:
                ranks[1].wakes_at = world.now + 5
        world.transact(lambda tx: tx.delete(keys.attempt(DIRECTORY, 100)))
        if not visible:
            world.transact(lambda tx: tx.delete(b"Xs%010d" % 100))
        drain(ranks[1])
        if visible:
            assert succeeded(ranks)
        else:
            assert "is not recorded any more" in error_of(ranks[1], RanksMissing)
