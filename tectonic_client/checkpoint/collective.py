"""One rank's way through a collective save, without I/O.

`Save.run` is a generator: it yields requests (a read, a transaction, a pause, an index file to
write), its driver carries them out and sends the answers back, or throws what they raised. So the
manager's event loop and the tests' interleavings drive the same code. See `attempts` for the
protocol; this module owns the order of its steps, the deadline, and what is tried again.

The driver uploads the rank's file meanwhile; `arrival` says when that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from tectonic_client.checkpoint.attempts import (
    Arrival,
    Attempt,
    Standing,
    Wait,
    arrive,
    attempts_without_me,
    find_attempt,
    look,
    object_to,
    open_attempt,
    read_verdict,
    world_size_differs,
)
from tectonic_client.checkpoint.decisions import (
    Survey,
    commit,
    fail,
    given_up,
    not_arrived,
    read_parts,
    survey,
)
from tectonic_client.checkpoint.members import Identity, Memory, must_register, register
from tectonic_client.checkpoint.port import Namespace, NewFile
from tectonic_client.checkpoint.records import ObjectionKind, Outcome, PartRecord, Verdict
from tectonic_client.errors import (
    RanksMissing,
    TectonicError,
    TransientError,
    UnknownOutcome,
)
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import (
    CHECKPOINT_OUTCOME_GRACE_S,
    CHECKPOINT_POLL_MAX_S,
    CHECKPOINT_POLL_MIN_S,
    CHECKPOINT_POLL_PER_RANK_S,
    ELSEWHERE_AFTER_S,
    LIVENESS_INTERVAL_S,
)


@dataclass(frozen=True, slots=True)
class Read:
    """Run `fn` on a snapshot; the answer is its result."""

    fn: Callable[[ReadTransaction], Any]


@dataclass(frozen=True, slots=True)
class Transact:
    """Run `fn` and commit; the answer is its result."""

    fn: Callable[[Transaction], Any]
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Let this much time pass, less if the upload ends meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WriteIndex:
    """Write the index of the step, durable; the answer is its NewFile."""

    attempt: Attempt
    parts: Mapping[int, PartRecord]


Request: TypeAlias = Read | Transact | Pause | WriteIndex
Steps: TypeAlias = Generator[Request, Any, Any]


class _Interval:
    """Says when something that is due every `seconds` is due; the first time at once."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._next = clock()

    def due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Save:
    """The save of one step by one rank. `clock` gives seconds; `timeout_s` begins now.

    `hindrance` says what holds the upload up, as far as is known.

    `attempt_id` is a fresh inode id (used by rank 0 only). `attempt` is what the rank has joined,
    `arrived` whether its file may be in there: until then its chunks are its own to delete.
    """

    def __init__(
        self, namespace: Namespace, me: Identity, memory: Memory, step: int, *, attempt_id: int,
        arrival: Callable[[], Arrival | None], clock: Callable[[], float], timeout_s: float,
        hindrance: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self._namespace = namespace
        self._me = me
        self._memory = memory
        self._step = step
        self._attempt_id = attempt_id
        self._arrival = arrival
        self._hindrance = hindrance
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = clock() + timeout_s
        self._pause_s = CHECKPOINT_POLL_MIN_S
        self._objected = False
        self._refused = False
        self.attempt: Attempt | None = None
        self.arrived = False

    def run(self) -> Generator[Request, Any, Attempt]:
        """Save; returns the attempt when it is committed and durable.

        Raises the verdict of the attempt, the same on every rank; StepExists, StepInProgress,
        RankMismatch, RanksMissing, SessionLost; what the engine raises, once time is up.
        """
        self._memory.active.add(self._step)
        try:
            attempt = self.attempt = yield from self._enter()
            verdict = yield from self._bring(attempt)
            if verdict.outcome is Outcome.OPEN:
                verdict = yield from self._await_verdict(attempt)
            error = verdict.error()
            if error is not None:
                raise self._explained(error)
        except TectonicError:
            if self.attempt is None:
                self._refused = True
            else:
                self._memory.spent.add(self.attempt.attempt_id)
            raise
        finally:
            self._memory.active.discard(self._step)
        return attempt

    def give_up(self, reason: str, *, patient: bool = True) -> Steps:
        """Tell the other ranks that this one cannot go on; best done quickly.

        Also where `run` has not begun or was cut short: the others would wait until their timeout.
        A `patient` rank waits for rank 0's attempt for that.
        """
        attempt = self.attempt
        if self._objected or self._refused:
            return  # the others know a better reason already, or this rank is none of theirs
        if attempt is None:
            attempt = yield from self._attempt_to_give_up(patient)
        if attempt is None:
            return
        self._memory.spent.add(attempt.attempt_id)
        if self._me.rank == 0:
            yield from self._fail(attempt, given_up(self._me, attempt, reason))
            return
        yield from self._object(attempt, ObjectionKind.FAILED, message=reason)

    def _attempt_to_give_up(self, patient: bool) -> Generator[Request, Any, Attempt | None]:
        """The attempt that the others wait in, where this rank has not joined one.

        Rank 0 opens it, or finds that it had.
        """
        if self._me.rank == 0:
            return (yield from self._enter())
        while isinstance(found := (yield from self._read(self._find)), Wait):
            if not patient or self._late():
                return None
            yield from self._pause()
        attempt: Attempt = found
        return attempt

    # --- entering -----------------------------------------------------------------------------

    def _enter(self) -> Generator[Request, Any, Attempt]:
        must = yield from self._read(lambda tx: must_register(tx, self._me, self._memory))
        if must:
            yield from self._transact(
                lambda tx: register(tx, self._namespace, self._me, saving=True)
            )
        self._memory.registered = True
        if self._me.rank != 0:
            return (yield from self._join())
        opened: Attempt = yield from self._transact(
            lambda tx: open_attempt(tx, self._namespace, self._me, self._step, self._attempt_id)
        )
        return opened

    def _find(self, tx: ReadTransaction) -> Attempt | Wait:
        return find_attempt(tx, self._namespace, self._me, self._step, self._memory)

    def _join(self) -> Generator[Request, Any, Attempt]:
        """Wait for rank 0's attempt."""
        objected: dict[int, Attempt] = {}
        elsewhere = _Interval(self._clock, ELSEWHERE_AFTER_S)
        elsewhere.due()
        while True:
            found: Attempt | Wait = yield from self._read(self._find)
            if isinstance(found, Attempt):
                break
            if self._late():
                raise self._no_attempt(found)
            if elsewhere.due():
                yield from self._watch_elsewhere(objected)
            yield from self._pause()
        self.attempt = found
        self._memory.leader = found.record.token
        error = found.record.verdict.error()
        if error is not None:
            raise error
        if found.record.world_size != self._me.world_size:
            self.attempt, self._objected = found, True
            yield from self._object(found, ObjectionKind.WORLD_SIZE, self._me.world_size)
            raise world_size_differs(self._me, found)
        return found

    def _no_attempt(self, wait: Wait) -> RanksMissing:
        what = f"step {self._step}: rank 0 opened no attempt within {self._timeout_s:g} s"
        return RanksMissing(f"{what}: {wait.reason}", (0,))

    def _watch_elsewhere(self, objected: dict[int, Attempt]) -> Steps:
        """Object to attempts that wait for this rank in vain, and share their verdict."""
        for attempt in objected.values():
            verdict: Verdict = yield from self._read(
                partial(read_verdict, namespace=self._namespace, me=self._me, attempt=attempt)
            )
            error = verdict.error()
            if error is not None and verdict.outcome is Outcome.RANK_MISMATCH:
                self._memory.spent.add(attempt.attempt_id)
                raise error
        waiting: list[Attempt] = yield from self._read(
            lambda tx: attempts_without_me(tx, self._me, self._memory)
        )
        for attempt in waiting:
            if attempt.attempt_id not in objected:
                objected[attempt.attempt_id] = attempt
                yield from self._object(attempt, ObjectionKind.ELSEWHERE, self._step)

    def _object(
        self, attempt: Attempt, kind: ObjectionKind, value: int = 0, message: str = ""
    ) -> Steps:
        yield from self._transact(lambda tx: object_to(tx, self._me, attempt, kind, value, message))

    # --- bringing the part --------------------------------------------------------------------

    def _bring(self, attempt: Attempt) -> Generator[Request, Any, Verdict]:
        """Wait for the upload, then arrive; returns a verdict that came before."""
        self._pause_s = CHECKPOINT_POLL_MIN_S
        while (arrival := self._arrival()) is None:
            standing = yield from self._look(attempt, liveness=False)
            if standing.verdict.outcome is not Outcome.OPEN:
                return standing.verdict
            if self._late():
                return (yield from self._fail(attempt, self._overdue(attempt)))
            yield from self._pause()
        self.arrived = True
        verdict: Verdict = yield from self._transact(
            lambda tx: arrive(tx, self._namespace, self._me, attempt, arrival)
        )
        return verdict

    def _overdue(self, attempt: Attempt) -> Verdict:
        return not_arrived(attempt, (self._me.rank,), self._timeout_s, self._hindrance())

    def _explained(self, error: TectonicError) -> TectonicError:
        """Where another rank was the first to say that this one is late: what holds it up."""
        if self.arrived or not isinstance(error, RanksMissing) or self._me.rank not in error.ranks:
            return error
        why = self._hindrance()
        if not why or "has not answered" in str(error):
            return error
        return RanksMissing(f"{error}: {why}", error.ranks)

    # --- waiting for the verdict --------------------------------------------------------------

    def _await_verdict(self, attempt: Attempt) -> Generator[Request, Any, Verdict]:
        self._pause_s = CHECKPOINT_POLL_MIN_S
        liveness = _Interval(self._clock, LIVENESS_INTERVAL_S)
        while self._me.rank != 0 and not self._late():
            standing = yield from self._look(attempt, liveness=liveness.due())
            if standing.verdict.outcome is not Outcome.OPEN:
                return standing.verdict
            if not standing.coordinator_alive:
                break
            yield from self._pause()
        return (yield from self._coordinate(attempt))

    def _coordinate(self, attempt: Attempt) -> Generator[Request, Any, Verdict]:
        """Decide the attempt: as rank 0, or in place of one that is dead or too late."""
        missing = frozenset(range(attempt.record.world_size))
        liveness = _Interval(self._clock, LIVENESS_INTERVAL_S)
        while True:
            seen: Survey = yield from self._survey(attempt, missing, liveness=liveness.due())
            missing, verdict = seen.missing, seen.verdict
            self._memory.seen.update(seen.seen)
            if verdict.outcome is Outcome.OPEN and not missing:
                verdict = yield from self._commit(attempt)
            elif verdict.outcome is Outcome.OPEN and seen.decision is not None:
                verdict = yield from self._fail(attempt, seen.decision)
            elif verdict.outcome is Outcome.OPEN and self._late():
                overdue = not_arrived(attempt, missing, self._timeout_s)
                verdict = yield from self._fail(attempt, overdue)
            if verdict.outcome is not Outcome.OPEN:
                return verdict
            yield from self._pause()

    def _survey(
        self, attempt: Attempt, missing: frozenset[int], *, liveness: bool
    ) -> Generator[Request, Any, Survey]:
        result: Survey = yield from self._read(
            lambda tx: survey(
                tx, self._namespace, self._me, attempt, self._memory, missing, liveness=liveness
            )
        )
        return result

    def _commit(self, attempt: Attempt) -> Generator[Request, Any, Verdict]:
        # Read anew: somebody else may have decided since, and removed the parts.
        standing: Verdict
        parts: dict[int, PartRecord]
        standing, parts = yield from self._read(
            lambda tx: (
                read_verdict(tx, self._namespace, self._me, attempt),
                read_parts(tx, self._me, attempt),
            )
        )
        if standing.outcome is not Outcome.OPEN:
            return standing
        try:
            index: NewFile = yield WriteIndex(attempt, parts)
            verdict: Verdict = yield from self._transact(
                lambda tx: commit(tx, self._namespace, self._me, attempt, index), durable=True
            )
        except (TransientError, UnknownOutcome):
            raise
        except TectonicError as error:
            yield from self._fail(attempt, given_up(self._me, attempt, str(error)))
            raise
        return verdict

    # --- requests -----------------------------------------------------------------------------

    def _look(self, attempt: Attempt, *, liveness: bool) -> Generator[Request, Any, Standing]:
        standing: Standing = yield from self._read(
            lambda tx: look(tx, self._namespace, self._me, attempt, liveness=liveness)
        )
        return standing

    def _fail(self, attempt: Attempt, verdict: Verdict) -> Generator[Request, Any, Verdict]:
        standing: Verdict = yield from self._transact(
            lambda tx: fail(tx, self._namespace, self._me, attempt, verdict)
        )
        return standing

    def _read(self, fn: Callable[[ReadTransaction], Any]) -> Steps:
        return (yield from self._persist(Read(fn)))

    def _transact(self, fn: Callable[[Transaction], Any], *, durable: bool = False) -> Steps:
        return (yield from self._persist(Transact(fn, durable)))

    def _persist(self, request: Request) -> Steps:
        """Try until the deadline: every step of the protocol may be taken twice.

        What may have happened is tried for longer: "unknown" is the worst answer.
        """
        while True:
            try:
                return (yield request)
            except TransientError:
                if self._late():
                    raise
            except UnknownOutcome:
                if self._clock() >= self._deadline + CHECKPOINT_OUTCOME_GRACE_S:
                    raise
            yield from self._pause()

    def _late(self) -> bool:
        return self._clock() >= self._deadline

    def _pause(self) -> Steps:
        most = CHECKPOINT_POLL_MAX_S + CHECKPOINT_POLL_PER_RANK_S * self._me.world_size
        yield Pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, most)
