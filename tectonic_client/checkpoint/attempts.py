"""The collective save as functions over a transaction: who is a rank, attempts, parts, verdicts.

A save of a step by `world_size` ranks is an *attempt*. Rank 0, its coordinator, opens it: the
attempt owns a hidden directory, whose inode is the attempt's id. Each rank arrives with one
transaction that links its file into that directory and writes its part. The commit links the
directory under the step's name. The attempt's record holds its verdict, decided exactly once, and
every rank reads it there.

Invariants:

* Parts are keyed by attempt id, so two attempts never share one. A part is added only while the
  attempt is open; an attempt commits only with all parts of ranks 0 to world_size - 1.
* Whatever decides an attempt reads and writes its record, so two deciders conflict: one verdict.
* A rank writes only keys of its own (member, part, objection, its entry and inode); the attempt's
  record is written when it is opened and when it is decided.
* What a rank writes twice, because the answer to the first time was lost, changes nothing.

Which ranks belong together. A run id names a job, and where the launcher tells restarts apart,
one start of it; where it does not, several *starts* of a job share one, and a process that outlived
an earlier start must never bring its part to an attempt of a later one, nor commit behind its back.
No rank can know the start that it belongs to, but it knows what it has seen:

1. The newest manager that registers as a rank takes the rank over. Who was replaced is refused
   where it arrives, and a commit is refused unless every part is by the present holder of its rank:
   once one rank of a new start has registered, nothing of the old one becomes visible, and what
   `latest()` says is what the new start will build on.
2. A rank that has joined one rank 0 joins no other (`Memory.leader`).
3. Taking over from another process sets a fence: that process's last sign of life (of a process
   that still lives only its birth, for else nobody could start beside a hung one). Members of one
   start are made after those of the last one have died. So a member born before rank 0's fence is
   of an earlier start than rank 0 (refused), and a rank 0 born before a member's fence is of an
   earlier start than the member (which waits for the new one).

What remains: processes of two starts, both alive, under one run id, of which the older has not
saved before and whose successor has not registered yet. Give such starts run ids of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.members import (
    Identity,
    Memory,
    describe,
    lives,
    read_member,
    read_members,
    require_member,
    stale,
    write_member,
)
from tectonic_client.checkpoint.names import part_name
from tectonic_client.checkpoint.port import Namespace, NewFile
from tectonic_client.checkpoint.records import (
    OPEN,
    AttemptRecord,
    MemberRecord,
    ObjectionKind,
    ObjectionRecord,
    Outcome,
    PartRecord,
    Verdict,
)
from tectonic_client.errors import RankMismatch, RanksMissing, StepExists, StepInProgress
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import (
    ATTEMPT_KEPT_S,
    ATTEMPTS_SWEPT,
    MAX_VERDICT_BYTES,
    SCAN_PAGE_ROWS,
)

_NS_PER_S: Final = 1_000_000_000


class Attempt(NamedTuple):
    """An attempt that this rank takes part in."""

    step: int
    record: AttemptRecord

    @property
    def attempt_id(self) -> int:
        return self.record.attempt_id

    @property
    def coordinator(self) -> str:
        """How messages name rank 0."""
        return describe(0, self.record.hostname, self.record.pid)


# --- opening and finding ----------------------------------------------------------------------


def open_attempt(
    tx: Transaction, namespace: Namespace, me: Identity, step: int, attempt_id: int
) -> Attempt:
    """Begin an attempt as rank 0; `attempt_id` is a fresh inode id.

    Replaces what a dead coordinator or an earlier save of this run has left. Raises StepExists,
    StepInProgress (a live coordinator of another run), RankMismatch, SessionLost.
    """
    namespace.require_session(tx)
    mine = require_member(me, read_member(tx, me, me.rank))
    old = read_attempt(tx, me.directory, step)
    if old is not None and old.attempt_id == attempt_id:
        return Attempt(step, old)
    if namespace.step_directory(tx, step) is not None:
        raise step_exists(step)
    if old is not None and old.is_open:
        if old.run_id != me.run_id and lives(namespace, tx, old.session):
            raise _in_progress(me, step, old)
        remove(tx, namespace, me.directory, old)
    _sweep(tx, namespace, me.directory)
    namespace.create_hidden(tx, attempt_id)
    record = AttemptRecord(
        attempt_id=attempt_id, session=me.session, token=me.token, started_ns=tx.now_ns(),
        decided_ns=0, world_size=me.world_size, pid=me.pid, run_id=me.run_id, hostname=me.hostname,
    )  # fmt: skip
    tx.put(keys.attempt(me.directory, step), record.encode())
    write_member(tx, me, mine.fence_ns)
    return Attempt(step, record)


def read_attempt(tx: ReadTransaction, directory: int, step: int) -> AttemptRecord | None:
    data = tx.get(keys.attempt(directory, step))
    return None if data is None else AttemptRecord.decode(data)


def step_exists(step: int) -> StepExists:
    return StepExists(f"step {step} exists already: delete it first to save it again")


def _in_progress(me: Identity, step: int, other: AttemptRecord) -> StepInProgress:
    return StepInProgress(
        f"step {step} is being saved by run {other.run_id!r} ({other.hostname}, pid {other.pid}),"
        f" this is run {me.run_id!r}: if they are one job, pass the same run_id to all ranks"
    )


def remove(tx: Transaction, namespace: Namespace, directory: int, old: AttemptRecord) -> None:
    """Hand an open attempt's directory over for cleaning and forget its parts."""
    namespace.discard(tx, old.attempt_id)
    forget_parts(tx, directory, old)


def forget_parts(tx: Transaction, directory: int, old: AttemptRecord) -> None:
    tx.delete_range(*keys.parts(directory, old.attempt_id))
    tx.delete_range(*keys.objections(directory, old.attempt_id))


def _sweep(tx: Transaction, namespace: Namespace, directory: int) -> None:
    """Forget some attempts of long ago, and clean up those whose coordinator died."""
    before_ns = tx.now_ns() - int(ATTEMPT_KEPT_S * _NS_PER_S)
    for key, value in tx.scan(*keys.attempts(directory), limit=ATTEMPTS_SWEPT):
        old = AttemptRecord.decode(value)
        if max(old.started_ns, old.decided_ns) > before_ns:
            continue
        if old.is_open:
            if lives(namespace, tx, old.session):
                continue
            remove(tx, namespace, directory, old)
        tx.delete(key)


class Wait(NamedTuple):
    """There is no attempt to join yet; `reason` says what is missing."""

    reason: str


def find_attempt(
    tx: ReadTransaction, namespace: Namespace, me: Identity, step: int, memory: Memory
) -> Attempt | Wait:
    """The attempt at a step that this rank, not rank 0, is to join.

    It may have failed before this rank came, and its world_size is for the caller to compare.
    Raises StepExists, StepInProgress, RanksMissing (rank 0 is dead), RankMismatch (this rank was
    taken over, or belongs to an earlier start of the run).
    """
    rows = read_members(tx, me, (0, me.rank))
    mine, leader = require_member(me, rows[me.rank]), rows[0]
    record = read_attempt(tx, me.directory, step)
    if namespace.step_directory(tx, step) is not None:
        raise step_exists(step)
    if leader is not None:
        unspent = record is not None and record.attempt_id not in memory.spent
        _check_leader(tx, namespace, me, step, leader, memory, record if unspent else None)
    if record is not None and record.is_open and record.run_id != me.run_id:
        if lives(namespace, tx, record.session):
            raise _in_progress(me, step, record)
        return Wait(f"a dead process of run {record.run_id!r} has left an attempt")
    if leader is None and record is not None and _is_left_to(me, record, memory):
        return Attempt(step, record)
    if leader is None:
        return Wait(f"no rank 0 of run {me.run_id!r} has made its manager")
    if leader.born_ns <= mine.fence_ns:
        return Wait(f"rank 0 ({leader.hostname}, pid {leader.pid}) is of an earlier start")
    if record is None or record.token != leader.token or record.attempt_id in memory.spent:
        return Wait(f"rank 0 ({leader.hostname}, pid {leader.pid}) has not begun to save it")
    return _joinable(tx, namespace, me, Attempt(step, record), leader, memory)


def _is_left_to(me: Identity, record: AttemptRecord, memory: Memory) -> bool:
    """Whether a rank 0 that has closed its manager since has left this attempt to this rank.

    It has failed, most likely, and says why. Of one start with this rank is a rank 0 that this rank
    knows, or that has lived in its life.
    """
    if record.run_id != me.run_id or record.attempt_id in memory.spent:
        return False
    if record.verdict.outcome is Outcome.COMMITTED:
        return False
    if memory.leader is None:
        return record.started_ns > me.born_ns
    return memory.leader == record.token


def _of_one_start(me: Identity, leader: MemberRecord, memory: Memory) -> bool:
    """Whether this rank 0 is surely of this rank's start, also when it has died since.

    One that was made in this rank's life is not left over from an earlier start.
    """
    return memory.leader == leader.token or leader.born_ns > me.born_ns


def _check_leader(
    tx: ReadTransaction, namespace: Namespace, me: Identity, step: int, leader: MemberRecord,
    memory: Memory, record: AttemptRecord | None,
) -> None:  # fmt: skip
    """Raise where this rank can never be of one start with this rank 0, or that is dead.

    An attempt that a dead rank 0 has left open is joined all the same: others may wait in it for
    this rank, and any of them decides it.
    """
    if memory.leader not in (None, leader.token) or me.born_ns <= leader.fence_ns:
        raise stale(me, leader)
    if record is not None and record.is_open and record.token == leader.token:
        return
    if _of_one_start(me, leader, memory) and not lives(namespace, tx, leader.session):
        who = describe(0, leader.hostname, leader.pid)
        raise RanksMissing(f"step {step}: {who} of run {me.run_id!r} died before saving it", (0,))


def _joinable(
    tx: ReadTransaction, namespace: Namespace, me: Identity, attempt: Attempt,
    leader: MemberRecord, memory: Memory,
) -> Attempt | Wait:  # fmt: skip
    known = _of_one_start(me, leader, memory)
    if not known and not lives(namespace, tx, attempt.record.session):
        return Wait(f"{attempt.coordinator} died, its attempt is left")
    if attempt.record.verdict.outcome is Outcome.COMMITTED:
        return Wait("the step was saved and deleted, rank 0 has not begun to save it again")
    return attempt


def sizes_differ(attempt: Attempt, who: str, world_size: int) -> str:
    return (
        f"ranks disagree on world_size in step {attempt.step}: {attempt.coordinator} says"
        f" {attempt.record.world_size}, {who} says {world_size}"
    )


def world_size_differs(me: Identity, attempt: Attempt) -> RankMismatch:
    """What a rank raises that was told another world_size than rank 0."""
    return RankMismatch(sizes_differ(attempt, str(me), me.world_size))


# --- objecting --------------------------------------------------------------------------------


def object_to(
    tx: Transaction, me: Identity, attempt: Attempt, kind: ObjectionKind, value: int = 0,
    message: str = "",
) -> None:  # fmt: skip
    """Tell the coordinator why an open attempt cannot succeed, so that it fails for everyone."""
    standing = read_attempt(tx, me.directory, attempt.step)
    if standing is None or standing.attempt_id != attempt.attempt_id or not standing.is_open:
        return
    record = ObjectionRecord(kind, value, me.pid, me.hostname, clipped(message))
    tx.put(keys.objection(me.directory, attempt.attempt_id, me.rank), record.encode())


def clipped(message: str) -> str:
    one_line = " ".join(message.split())
    return one_line.encode("utf-8", "replace")[:MAX_VERDICT_BYTES].decode("utf-8", "ignore")


def attempts_without_me(tx: ReadTransaction, me: Identity, memory: Memory) -> list[Attempt]:
    """Open attempts of this start of the run that this rank neither saves nor has arrived at.

    A rank that waits for another step objects to them: saves begin in the same order on all ranks,
    so it will not come.
    """
    leader = read_member(tx, me, 0)
    if leader is None:
        return []
    found = []
    for key, value in tx.scan(*keys.attempts(me.directory), limit=SCAN_PAGE_ROWS):
        attempt = Attempt(keys.parse_attempt(key), AttemptRecord.decode(value))
        record = attempt.record
        if record.is_open and record.token == leader.token and attempt.step not in memory.active:
            found.append(attempt)
    arrived = tx.get_many([part_key(me, attempt, me.rank) for attempt in found])
    return [attempt for attempt, part in zip(found, arrived, strict=True) if part is None]


# --- arriving ---------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A rank's file, its chunks durable; the seconds spent on it, for the accounts."""

    file: NewFile
    stage_s: float
    write_s: float


def arrive(
    tx: Transaction, namespace: Namespace, me: Identity, attempt: Attempt, arrival: Arrival
) -> Verdict:
    """Bring this rank's file to the attempt; returns the verdict if there is one already.

    Raises RankMismatch where the rank was taken over, SessionLost.
    """
    namespace.require_session(tx)
    mine = require_member(me, read_member(tx, me, me.rank))
    verdict = read_verdict(tx, namespace, me, attempt)
    if verdict.outcome is not Outcome.OPEN:
        return verdict
    file = arrival.file
    data = tx.get(part_key(me, attempt, me.rank))
    if data is not None:
        if PartRecord.decode(data).inode == file.inode:
            return OPEN
        return decide(tx, namespace, me, attempt, _two_parts(me, attempt))
    name = part_name(me.rank, attempt.record.world_size)
    namespace.add_file(tx, attempt.attempt_id, name, file)
    part = PartRecord(
        token=me.token, inode=file.inode, nbytes=file.nbytes,
        stage_ns=int(arrival.stage_s * _NS_PER_S), write_ns=int(arrival.write_s * _NS_PER_S),
        arrived_ns=tx.now_ns(),
    )  # fmt: skip
    tx.put(part_key(me, attempt, me.rank), part.encode())
    tx.delete(keys.objection(me.directory, attempt.attempt_id, me.rank))
    write_member(tx, me, mine.fence_ns)
    return OPEN


def part_key(me: Identity, attempt: Attempt, rank: int) -> bytes:
    return keys.part(me.directory, attempt.attempt_id, rank)


def _two_parts(me: Identity, attempt: Attempt) -> Verdict:
    return Verdict(
        Outcome.RANK_MISMATCH,
        f"step {attempt.step}: two processes brought a part as rank {me.rank}, one is {me}",
    )


# --- waiting ----------------------------------------------------------------------------------


def read_verdict(
    tx: ReadTransaction, namespace: Namespace, me: Identity, attempt: Attempt
) -> Verdict:
    """How the attempt stands, also long after its end."""
    record = read_attempt(tx, me.directory, attempt.step)
    if record is not None and record.attempt_id == attempt.attempt_id:
        return record.verdict
    if namespace.step_directory(tx, attempt.step) == attempt.attempt_id:
        return Verdict(Outcome.COMMITTED)
    what = "is not recorded any more"
    if record is not None:
        what = f"was replaced by run {record.run_id!r} ({record.hostname}, pid {record.pid})"
    message = f"step {attempt.step}: the attempt of {attempt.coordinator} {what}"
    return Verdict(Outcome.RANKS_MISSING, message, (0,))


class Standing(NamedTuple):
    """What a rank that has arrived needs to know."""

    verdict: Verdict
    coordinator_alive: bool


def look(
    tx: ReadTransaction, namespace: Namespace, me: Identity, attempt: Attempt, *, liveness: bool
) -> Standing:
    """The verdict, and (with `liveness`) whether the coordinator is there to decide it."""
    alive = not liveness or lives(namespace, tx, attempt.record.session)
    return Standing(read_verdict(tx, namespace, me, attempt), alive)


def decide(
    tx: Transaction, namespace: Namespace, me: Identity, attempt: Attempt, verdict: Verdict
) -> Verdict:
    """Record the verdict of an attempt that is open, and let go of what it does not need."""
    verdict = replace(verdict, message=clipped(verdict.message))
    if verdict.outcome is Outcome.COMMITTED:
        forget_parts(tx, me.directory, attempt.record)
    else:
        remove(tx, namespace, me.directory, attempt.record)
    record = replace(attempt.record, decided_ns=tx.now_ns(), verdict=verdict)
    tx.put(keys.attempt(me.directory, attempt.step), record.encode())
    return verdict
