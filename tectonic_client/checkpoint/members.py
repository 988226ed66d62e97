"""Who is a rank: managers register as members of a run, and take each other over.

Functions over a transaction. See `attempts` for what a membership means and why it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.port import Namespace, SessionView
from tectonic_client.checkpoint.records import MemberRecord
from tectonic_client.errors import RankMismatch
from tectonic_client.kv.port import ReadTransaction, Transaction


@dataclass(frozen=True, slots=True)
class Identity:
    """A manager as a rank of a run.

    `directory` is the inode of the run's directory, `token` the manager's random number, `process`
    a number that is equal for managers of one process only, `born_ns` when the manager was made, on
    the engine's clock.
    """

    directory: int
    run_id: str
    rank: int
    world_size: int
    session: int
    token: int
    process: int
    born_ns: int
    pid: int
    hostname: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.hostname}, pid {self.pid})"


@dataclass(slots=True)
class Memory:
    """What a manager remembers of the ranks between its saves."""

    registered: bool = False
    """Whether it has been the rank, and so may not become it again once it was replaced."""

    leader: int | None = None
    """Token of the rank 0 whose attempts it joins."""

    active: set[int] = field(default_factory=set)
    """Steps that this manager is saving now."""

    spent: set[int] = field(default_factory=set)
    """Attempts whose end it knows."""

    seen: dict[int, MemberRecord] = field(default_factory=dict)
    """Ranks that were seen alive in this start of the run."""


def describe(rank: int, hostname: str, pid: int) -> str:
    return f"rank {rank} ({hostname}, pid {pid})"


def lives(namespace: Namespace, tx: ReadTransaction, session: int) -> bool:
    (view,) = namespace.look_up(tx, [session])
    return view is not None and view.alive


# --- members ----------------------------------------------------------------------------------


def register(tx: Transaction, namespace: Namespace, me: Identity, *, saving: bool) -> bool:
    """Become the rank, in place of whoever was it before.

    A manager made beside another one of the same process (`saving` false) leaves that one be and
    gets False. Raises RankMismatch where a manager made later holds the rank, SessionLost.
    """
    namespace.require_session(tx)
    old = read_member(tx, me, me.rank)
    fence_ns = 0
    if old is not None and old.token != me.token:
        (view,) = namespace.look_up(tx, [old.session])
        alive = view is not None and view.alive
        if alive and old.process == me.process and not saving:
            return False
        if alive and old.process != me.process and old.born_ns > me.born_ns:
            raise _taken_over(me, old)
        fence_ns = old.fence_ns
        if old.process != me.process:
            fence_ns = max(fence_ns, _last_life(old, view))
    elif old is not None:
        fence_ns = old.fence_ns
    write_member(tx, me, fence_ns)
    return True


def must_register(tx: ReadTransaction, me: Identity, memory: Memory) -> bool:
    """Whether this manager has to register before it saves.

    Raises RankMismatch where another process took its rank over: what an earlier start has left
    does not come back when its successor dies.
    """
    holder = read_member(tx, me, me.rank)
    if holder is not None and holder.token == me.token:
        return False
    if memory.registered and (holder is None or holder.process != me.process):
        require_member(me, holder)
    return True


def leave(tx: Transaction, me: Identity) -> None:
    """Stop being the rank, if this manager still is."""
    old = read_member(tx, me, me.rank)
    if old is not None and old.token == me.token:
        tx.delete(_member_key(me, me.rank))


def _last_life(old: MemberRecord, view: SessionView | None) -> int:
    """Up to when a process that is being replaced is known to have lived; see the module."""
    if view is None:
        return old.active_ns
    return old.born_ns if view.alive else max(old.active_ns, view.heartbeat_ns)


def _member_key(me: Identity, rank: int) -> bytes:
    return keys.member(me.directory, me.run_id, rank)


def read_member(tx: ReadTransaction, me: Identity, rank: int) -> MemberRecord | None:
    data = tx.get(_member_key(me, rank))
    return None if data is None else MemberRecord.decode(data)


def read_members(
    tx: ReadTransaction, me: Identity, ranks: Iterable[int]
) -> dict[int, MemberRecord | None]:
    wanted = list(ranks)
    rows = tx.get_many([_member_key(me, rank) for rank in wanted])
    decoded = (None if row is None else MemberRecord.decode(row) for row in rows)
    return dict(zip(wanted, decoded, strict=True))


def write_member(tx: Transaction, me: Identity, fence_ns: int) -> None:
    record = MemberRecord(
        session=me.session, token=me.token, process=me.process, born_ns=me.born_ns,
        active_ns=tx.now_ns(), fence_ns=fence_ns, world_size=me.world_size, pid=me.pid,
        hostname=me.hostname,
    )  # fmt: skip
    tx.put(_member_key(me, me.rank), record.encode())


def require_member(me: Identity, mine: MemberRecord | None) -> MemberRecord:
    """Raise RankMismatch unless `mine`, the record of this rank, is this manager's."""
    if mine is None:
        raise RankMismatch(f"{me} of run {me.run_id!r} has left it: make a new manager")
    if mine.token != me.token:
        raise _taken_over(me, mine)
    return mine


def _taken_over(me: Identity, holder: MemberRecord) -> RankMismatch:
    if holder.process == me.process:
        who = "another manager of this process: use one per directory"
    else:
        who = (
            f"{holder.hostname}, pid {holder.pid}: two processes are the same rank, or the run was"
            " restarted and this process belongs to its earlier start"
        )
    return RankMismatch(f"rank {me.rank} of run {me.run_id!r} was taken over by {who}")


def stale(me: Identity, leader: MemberRecord) -> RankMismatch:
    return RankMismatch(
        f"{me} belongs to an earlier start of run {me.run_id!r} than"
        f" {describe(0, leader.hostname, leader.pid)}: restart this rank"
    )
