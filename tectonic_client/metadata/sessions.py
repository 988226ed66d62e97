"""Sessions: who is alive, which ids it holds, and the fence that keeps the dead from publishing.

A session is a client of the volume. It shows a heartbeat on the engine's clock, and leases ids
(for inodes and blocks alike) in ranges of IDS_PER_LEASE. Invariants:

* A block id is *in flight* as long as its lease's record exists. A chunk whose block has neither a
  record nor a lease is garbage.
* Whatever publishes a block or an inode reads its session's record in the same transaction
  (`require_session`). A cleaner deletes that record before it touches anything else, so a client
  that was declared dead by mistake cannot publish what the cleaner is about to delete.

Functions over a transaction; the tasks that call them live in `volume`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tectonic_client.errors import CorruptRecord, SessionLost
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import IDS_PER_LEASE, SCAN_PAGE_ROWS, SESSION_EXPIRY_S
from tectonic_client.metadata import keys
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.records import CounterRecord, SessionRecord

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Host:
    """A running machine as processes see it: equal only where process ids mean the same."""

    identity: str
    name: str


@cache
def this_host() -> Host:
    """The host of this process: boot id and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return Host(f"{boot}/{os.readlink('/proc/self/ns/pid')}", socket.gethostname())


def process_started_ticks(pid: int) -> int | None:
    """Start time of a process of this host in clock ticks since boot; None if none is to be seen.

    Pid and start time together never name another process (proc_pid_stat(5), field 22).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


@cache
def sees_all_processes() -> bool:
    """Whether /proc shows processes of other users: not where it is mounted with `hidepid`."""
    try:
        return bool(Path("/proc/1/stat").read_bytes())
    except OSError:
        return False


def describe(record: SessionRecord) -> str:
    """How messages name a session."""
    return f"{record.client} on {record.hostname}, pid {record.pid}"


def open_session(tx: Transaction, client: str) -> int:
    """Register this process as a session and return its id."""
    now = tx.now_ns()
    host = this_host()
    pid = os.getpid()
    session_id = _next_number(tx)
    record = SessionRecord(
        started_ns=now,
        heartbeat_ns=now,
        pid=pid,
        pid_started_ticks=process_started_ticks(pid) or 0,
        host=host.identity,
        hostname=host.name,
        client=client,
    )
    tx.put(keys.session(session_id), record.encode())
    return session_id


def read_session(tx: ReadTransaction, session_id: int) -> SessionRecord | None:
    """The session's record, or None when it ended."""
    data = tx.get(keys.session(session_id))
    return None if data is None else SessionRecord.decode(data)


def read_sessions(tx: ReadTransaction, session_ids: Sequence[int]) -> list[SessionRecord | None]:
    """Records in the order of the ids; None where a session ended."""
    rows = tx.get_many([keys.session(session_id) for session_id in session_ids])
    return [None if row is None else SessionRecord.decode(row) for row in rows]


def require_session(tx: ReadTransaction, session_id: int) -> None:
    """The fence: raises SessionLost when the session was declared dead."""
    if tx.get(keys.session(session_id)) is None:
        raise _lost()


def _lost() -> SessionLost:
    return SessionLost(
        "this client was without contact for so long that its session was ended:"
        " unpublished data is lost, reopen the volume"
    )


def heartbeat(tx: Transaction, session_id: int) -> None:
    """Show that the session lives. Raises SessionLost."""
    record = read_session(tx, session_id)
    if record is None:
        raise _lost()
    tx.put(keys.session(session_id), replace(record, heartbeat_ns=tx.now_ns()).encode())


def is_alive(tx: ReadTransaction, session_id: int) -> bool:
    """Whether the session exists and neither its heartbeat nor its process is gone."""
    return session_id in living(tx, [session_id])


def living(tx: ReadTransaction, session_ids: Collection[int]) -> set[int]:
    """Those of the sessions that are alive; one round trip."""
    now = tx.now_ns()
    records = zip(session_ids, read_sessions(tx, list(session_ids)), strict=True)
    return {sid for sid, record in records if record is not None and shows_life(record, now)}


def shows_life(record: SessionRecord, now_ns: int) -> bool:
    """Whether a session's process exists (on this host) or its heartbeat is recent (elsewhere)."""
    if _identity(record) in _ended_here:
        return False
    if record.host == this_host().identity and sees_all_processes():
        ticks = process_started_ticks(record.pid)
        if ticks is not None or not _is_hidden(record.pid):
            return ticks == record.pid_started_ticks
    return now_ns - record.heartbeat_ns < SESSION_EXPIRY_S * _NS_PER_S


_ended_here: set[tuple[str, int, int, int]] = set()
"""Sessions of this process that ended, although their records are still there."""


def _identity(record: SessionRecord) -> tuple[str, int, int, int]:
    return record.host, record.pid, record.pid_started_ticks, record.started_ns


def note_ended(record: SessionRecord) -> None:
    """A session of this process ended and could not remove its record: it lives no more, though
    its process does."""
    _ended_here.add(_identity(record))


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process of another user, which /proc may not show (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def _all_sessions(tx: ReadTransaction) -> Iterator[tuple[int, SessionRecord]]:
    for page in scan_layer(tx, keys.SESSION):
        for key, value in page:
            yield keys.parse_id(key), SessionRecord.decode(value)


def list_sessions(tx: ReadTransaction) -> list[tuple[int, SessionRecord]]:
    """All sessions, dead ones that nobody has cleaned up included."""
    return list(_all_sessions(tx))


def dead_sessions(tx: ReadTransaction) -> list[int]:
    """Sessions without a sign of life that nobody has cleaned up."""
    now = tx.now_ns()
    return [sid for sid, record in _all_sessions(tx) if not shows_life(record, now)]


def end_dead_session(tx: Transaction, session_id: int) -> SessionRecord | None:
    """Fence off a session by removing its record, unless it shows life after all.

    Returns the record that was removed.
    """
    record = read_session(tx, session_id)
    if record is None or shows_life(record, tx.now_ns()):
        return None
    tx.delete(keys.session(session_id))
    tx.delete(keys.follower(session_id))
    return record


def is_alone(tx: ReadTransaction, session_id: int) -> bool:
    """Whether this session is the only one that is recorded.

    That one is recorded does not do: this one may have been ended, by the one that is.
    """
    rows = tx.scan(keys.SESSION, keys.prefix_end(keys.SESSION), limit=2)
    return [key for key, _ in rows] == [keys.session(session_id)]


def other_sessions_live(tx: ReadTransaction, session_id: int) -> bool:
    """Whether anybody else uses the volume."""
    now = tx.now_ns()
    return any(sid != session_id and shows_life(record, now) for sid, record in _all_sessions(tx))


def end_session(tx: Transaction, session_id: int, leases: list[int]) -> None:
    """Leave cleanly: nothing of this session is in flight any more."""
    tx.delete(keys.session(session_id))
    tx.delete(keys.follower(session_id))
    for number in leases:
        tx.delete(keys.lease(number))


# --- whose turn it is to clean ----------------------------------------------------------------


def claim_cleaning(tx: Transaction, interval_s: float) -> float:
    """0 where it is this client's turn to look after the dead, because nobody began to do so for
    `interval_s`; else the seconds until it is somebody's."""
    data = tx.get(keys.LAST_CLEANING)
    now_ns = tx.now_ns()
    if data is not None:
        age_s = (now_ns - CounterRecord.decode(data).value) / _NS_PER_S
        # Below 0: by the clock of a server that has been set back since.
        if 0 <= age_s < interval_s:
            return interval_s - age_s
    tx.put(keys.LAST_CLEANING, CounterRecord(now_ns).encode())
    return 0.0


# --- leases -----------------------------------------------------------------------------------


def _next_number(tx: Transaction) -> int:
    data = tx.get(keys.NEXT_LEASE)
    number = 1 if data is None else CounterRecord.decode(data).value
    if not 0 < number <= keys.MAX_LEASE:
        raise CorruptRecord(f"{number} cannot be the number of the next lease")
    tx.put(keys.NEXT_LEASE, CounterRecord(number + 1).encode())
    return number


def take_lease(tx: Transaction, session_id: int) -> int:
    """Lease the next range of ids to the session and return the lease's number."""
    require_session(tx, session_id)
    number = _next_number(tx)
    tx.put(keys.lease(number), CounterRecord(session_id).encode())
    return number


def lease_range(number: int) -> range:
    """The ids of a lease."""
    return range(number * IDS_PER_LEASE, (number + 1) * IDS_PER_LEASE)


def abandoned_leases(tx: ReadTransaction) -> list[int]:
    """Leases whose session has ended; at most a page of them."""
    found: list[int] = []
    for page in scan_layer(tx, keys.LEASE):
        holders = [CounterRecord.decode(value).value for _, value in page]
        rows = zip(page, read_sessions(tx, holders), strict=True)
        found += [keys.parse_lease(key) for (key, _), session in rows if session is None]
        if len(found) >= SCAN_PAGE_ROWS:
            break
    return found


def drop_lease(tx: Transaction, number: int) -> None:
    """Forget a lease after its leftovers were removed."""
    tx.delete(keys.lease(number))
