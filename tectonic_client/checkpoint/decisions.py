"""How an attempt ends: who is missing and why, failing it, committing it. See `attempts`.

Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.attempts import (
    Attempt,
    decide,
    part_key,
    read_attempt,
    read_verdict,
    sizes_differ,
    step_exists,
)
from tectonic_client.checkpoint.members import Identity, Memory, describe, read_members
from tectonic_client.checkpoint.names import INDEX_NAME
from tectonic_client.checkpoint.port import Namespace, NewFile
from tectonic_client.checkpoint.records import (
    OPEN,
    MemberRecord,
    ObjectionKind,
    ObjectionRecord,
    Outcome,
    PartRecord,
    Verdict,
)
from tectonic_client.kv.port import ReadTransaction, Transaction

_RANKS_NAMED: Final = 16
"""Ranks spelled out in a message; the error's attribute has all."""


class Survey(NamedTuple):
    """How far an attempt has come, seen by whoever decides it.

    `decision` is a verdict that is due; `seen` are members found to be of this start of the run.
    """

    verdict: Verdict
    missing: frozenset[int]
    decision: Verdict | None
    seen: Mapping[int, MemberRecord]


def survey(
    tx: ReadTransaction, namespace: Namespace, me: Identity, attempt: Attempt, memory: Memory,
    missing: Collection[int], *, liveness: bool,
) -> Survey:  # fmt: skip
    """Look which of the ranks that were `missing` have arrived, and why others never will.

    With `liveness` it also looks whether those are alive, at the cost of two more round trips.
    """
    verdict = read_verdict(tx, namespace, me, attempt)
    if verdict.outcome is not Outcome.OPEN:
        return Survey(verdict, frozenset(missing), None, {})
    ranks = sorted(missing)
    rows = tx.get_many([part_key(me, attempt, rank) for rank in ranks])
    still = frozenset(rank for rank, row in zip(ranks, rows, strict=True) if row is None)
    decision = _objected(tx, me, attempt, memory)
    arrived = read_members(tx, me, set(missing) - still - memory.seen.keys())
    seen = {rank: member for rank, member in arrived.items() if member is not None}
    if decision is None and still and liveness:
        members = read_members(tx, me, {0, *still})
        living = _living(tx, namespace, members)
        decision = _lost(attempt, memory, still, members, living)
        seen |= {rank: living[rank] for rank in still & living.keys()}
    return Survey(verdict, still, decision, seen)


def _objected(
    tx: ReadTransaction, me: Identity, attempt: Attempt, memory: Memory
) -> Verdict | None:
    """The verdict that an objection leads to; who arrives withdraws its own."""
    for key, value in tx.scan(*keys.objections(me.directory, attempt.attempt_id)):
        rank, objection = keys.parse_rank(key), ObjectionRecord.decode(value)
        who = describe(rank, objection.hostname, objection.pid)
        step, coordinator = attempt.step, attempt.coordinator
        match objection.kind:
            case ObjectionKind.FAILED:
                message = f"step {step}: {who} failed: {objection.message}"
                return Verdict(Outcome.RANKS_MISSING, message, (rank,))
            case ObjectionKind.WORLD_SIZE:
                return Verdict(Outcome.RANK_MISMATCH, sizes_differ(attempt, who, objection.value))
            case ObjectionKind.ELSEWHERE:
                if not _begun(tx, me, attempt, memory, objection.value):
                    message = (
                        f"ranks disagree on the step: {coordinator} saves {step},"
                        f" {who} saves {objection.value}"
                    )
                    return Verdict(Outcome.RANK_MISMATCH, message)
    return None


def _begun(tx: ReadTransaction, me: Identity, attempt: Attempt, memory: Memory, step: int) -> bool:
    """Whether rank 0 saves that other step as well, or did: then the rank only is slow here."""
    if step in memory.active:
        return True
    other = read_attempt(tx, me.directory, step)
    return other is not None and other.token == attempt.record.token


def _living(
    tx: ReadTransaction, namespace: Namespace, members: Mapping[int, MemberRecord | None]
) -> dict[int, MemberRecord]:
    there = {rank: member for rank, member in members.items() if member is not None}
    views = namespace.look_up(tx, [member.session for member in there.values()])
    return {
        rank: member
        for (rank, member), view in zip(there.items(), views, strict=True)
        if view is not None and view.alive
    }


def _lost(
    attempt: Attempt, memory: Memory, missing: Iterable[int],
    members: Mapping[int, MemberRecord | None], living: Mapping[int, MemberRecord],
) -> Verdict | None:  # fmt: skip
    """The verdict when there are missing ranks that will never arrive.

    A dead member may be left from an earlier start, its successor not there yet. So only those
    count that were seen in this start or made after its rank 0; and living ones that will not join
    because they replaced a process of this start.
    """
    gone = {}
    for rank in sorted(missing):
        member, seen, leader = members[rank], memory.seen.get(rank), members[0]
        if rank == 0:
            lost = rank not in living or living[0].token != attempt.record.token
        elif rank in living:
            lost = leader is not None and living[rank].fence_ns >= leader.born_ns
        else:
            newer = member is not None and leader is not None and member.born_ns > leader.born_ns
            lost = seen is not None or newer
        if lost:
            gone[rank] = seen or member
    if not gone:
        return None
    named = [
        f"rank {rank}" if member is None else describe(rank, member.hostname, member.pid)
        for rank, member in list(gone.items())[:_RANKS_NAMED]
    ]
    message = f"step {attempt.step}: gone before arriving: {', '.join(named)}"
    return Verdict(Outcome.RANKS_MISSING, message, tuple(gone))


def _named(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_RANKS_NAMED]))
    more = len(ranks) - _RANKS_NAMED
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {shown}" + (f" and {more} more" if more > 0 else "")


# --- deciding ---------------------------------------------------------------------------------


def not_arrived(
    attempt: Attempt, missing: Collection[int], timeout_s: float, because: str = ""
) -> Verdict:
    """The verdict when time is up; `because` as far as it is known."""
    message = f"step {attempt.step}: {_named(missing)} did not arrive within {timeout_s:g} s"
    message += f": {because}" if because else ""
    return Verdict(Outcome.RANKS_MISSING, message, tuple(sorted(missing)))


def given_up(me: Identity, attempt: Attempt, reason: str) -> Verdict:
    """The verdict when the coordinator itself cannot go on."""
    return Verdict(Outcome.FAILED, f"step {attempt.step}: {me} failed: {reason}")


def read_parts(tx: ReadTransaction, me: Identity, attempt: Attempt) -> dict[int, PartRecord]:
    """The parts that have arrived, by rank."""
    rows = tx.scan(*keys.parts(me.directory, attempt.attempt_id))
    return {keys.parse_rank(key): PartRecord.decode(value) for key, value in rows}


def fail(
    tx: Transaction, namespace: Namespace, me: Identity, attempt: Attempt, verdict: Verdict
) -> Verdict:
    """Decide that the attempt failed; returns the verdict that stands.

    That is another one where it was decided before, and none (OPEN) where ranks are said to be
    missing of which the last has arrived meanwhile.
    """
    standing = read_verdict(tx, namespace, me, attempt)
    if standing.outcome is not Outcome.OPEN:
        return standing
    if verdict.outcome is Outcome.RANKS_MISSING:
        rows = tx.get_many([part_key(me, attempt, rank) for rank in verdict.ranks])
        if all(row is not None for row in rows):
            return OPEN
    return decide(tx, namespace, me, attempt, verdict)


def commit(
    tx: Transaction, namespace: Namespace, me: Identity, attempt: Attempt, index: NewFile
) -> Verdict:
    """Make the step visible if every rank's part is there; returns the verdict that stands.

    May be called by rank 0, and by any other rank of the attempt when that is dead or too late.
    Raises SessionLost, and what `Namespace.publish` raises.
    """
    standing = read_verdict(tx, namespace, me, attempt)
    if standing.outcome is not Outcome.OPEN:
        return standing
    namespace.require_session(tx)
    ranks = range(attempt.record.world_size)
    parts = read_parts(tx, me, attempt)
    if parts.keys() != set(ranks):
        return OPEN
    members = read_members(tx, me, ranks)
    for rank, part in parts.items():
        member = members[rank]
        if member is None or member.token != part.token:
            verdict = _holder_changed(attempt, rank, member)
            return decide(tx, namespace, me, attempt, verdict)
    if namespace.step_directory(tx, attempt.step) is not None:
        verdict = Verdict(Outcome.STEP_EXISTS, str(step_exists(attempt.step)))
        return decide(tx, namespace, me, attempt, verdict)
    namespace.add_file(tx, attempt.attempt_id, INDEX_NAME, index)
    namespace.publish(tx, attempt.attempt_id, attempt.step)
    return decide(tx, namespace, me, attempt, Verdict(Outcome.COMMITTED))


def _holder_changed(attempt: Attempt, rank: int, member: MemberRecord | None) -> Verdict:
    who = "left" if member is None else (
        f"was taken over by {member.hostname}, pid {member.pid}: the run was restarted"
    )  # fmt: skip
    return Verdict(Outcome.RANK_MISMATCH, f"step {attempt.step}: rank {rank} {who}")
