"""Sessions: liveness, the fence, leases."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tectonic_client.errors import SessionLost
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import Transaction
from tectonic_client.limits import IDS_PER_LEASE, SESSION_EXPIRY_S
from tectonic_client.metadata import keys, sessions
from tectonic_client.records import CounterRecord, SessionRecord


def _open(kv: MemoryKV, client: str = "test") -> int:
    return kv.transact(lambda tx: sessions.open_session(tx, client))


def _pretend(kv: MemoryKV, session_id: int, **changes: object) -> None:
    def change(tx: object) -> None:
        record = sessions.read_session(tx, session_id)
        assert record is not None
        tx.put(keys.session(session_id), replace(record, **changes).encode())

    kv.transact(change)


def test_a_session_of_a_living_process_is_alive() -> None:
    """This process's own session lives, however old its heartbeat is."""
    kv = MemoryKV()
    session_id = _open(kv)
    _pretend(kv, session_id, heartbeat_ns=1)
    assert kv.read(lambda tx: sessions.is_alive(tx, session_id))
    assert kv.read(sessions.dead_sessions) == []
    assert kv.transact(lambda tx: sessions.end_dead_session(tx, session_id)) is None


def test_a_killed_process_is_dead_at_once() -> None:
    """On the same host no expiry is waited for, and a reused pid does not revive a session."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kv = MemoryKV()
    session_id = _open(kv)
    ticks = sessions.process_started_ticks(child.pid)
    _pretend(kv, session_id, pid=child.pid, pid_started_ticks=ticks)
    assert kv.read(lambda tx: sessions.is_alive(tx, session_id))
    _pretend(kv, session_id, pid_started_ticks=(ticks or 0) + 1)
    assert not kv.read(lambda tx: sessions.is_alive(tx, session_id))
    _pretend(kv, session_id, pid_started_ticks=ticks)
    child.kill()
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert not kv.read(lambda tx: sessions.is_alive(tx, session_id))


def test_a_process_that_proc_hides_is_judged_by_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where /proc shows no processes of others (hidepid), their sessions are not taken for dead."""

    def kill(pid: int, signal: int) -> None:
        raise PermissionError

    kv = MemoryKV()
    session_id = _open(kv)
    monkeypatch.setattr(sessions, "process_started_ticks", lambda pid: None)
    monkeypatch.setattr("os.kill", kill)
    assert kv.read(lambda tx: sessions.is_alive(tx, session_id))
    _pretend(kv, session_id, heartbeat_ns=1)
    assert not kv.read(lambda tx: sessions.is_alive(tx, session_id))


def test_a_silent_session_of_another_host_expires() -> None:
    """Elsewhere only the heartbeat counts, on the engine's clock."""
    kv = MemoryKV()
    session_id = _open(kv)
    now = kv.read(lambda tx: tx.now_ns())
    edge = int(SESSION_EXPIRY_S * 1e9)
    _pretend(kv, session_id, host="another", heartbeat_ns=now - edge + 5_000_000_000)
    assert kv.read(lambda tx: sessions.is_alive(tx, session_id))
    _pretend(kv, session_id, heartbeat_ns=now - edge - 1)
    assert not kv.read(lambda tx: sessions.is_alive(tx, session_id))


def test_where_processes_are_hidden_only_the_heartbeat_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With /proc mounted hidepid a process of another user looks as if it were gone."""
    monkeypatch.setattr(sessions, "sees_all_processes", lambda: False)
    kv = MemoryKV()
    session_id = _open(kv)
    _pretend(kv, session_id, pid=2**22 + 1)
    assert kv.read(lambda tx: sessions.is_alive(tx, session_id))
    _pretend(kv, session_id, heartbeat_ns=1)
    assert not kv.read(lambda tx: sessions.is_alive(tx, session_id))


def test_the_fence_stops_a_session_that_was_declared_dead() -> None:
    """After its record is gone a session can neither beat nor lease nor publish."""
    kv = MemoryKV()
    session_id = _open(kv)
    lease = kv.transact(lambda tx: sessions.take_lease(tx, session_id))
    _pretend(kv, session_id, host="another", heartbeat_ns=1)
    assert kv.read(sessions.dead_sessions) == [session_id]
    dead = kv.transact(lambda tx: sessions.end_dead_session(tx, session_id))
    assert isinstance(dead, SessionRecord)
    with pytest.raises(SessionLost):
        kv.transact(lambda tx: sessions.heartbeat(tx, session_id))
    with pytest.raises(SessionLost):
        kv.transact(lambda tx: sessions.take_lease(tx, session_id))
    assert kv.read(sessions.abandoned_leases) == [lease]
    kv.transact(lambda tx: sessions.drop_lease(tx, lease))
    assert kv.read(sessions.abandoned_leases) == []


def test_leases_never_overlap() -> None:
    """Ids of all leases and sessions are disjoint, and none is the root's."""
    kv = MemoryKV()
    first, second = _open(kv), _open(kv)
    leases = [kv.transact(lambda tx, s=s: sessions.take_lease(tx, s)) for s in (first, second) * 3]
    ids = [number for lease in leases for number in sessions.lease_range(lease)]
    assert len(set(ids)) == len(ids) == 6 * IDS_PER_LEASE
    assert min(ids) >= IDS_PER_LEASE


def test_a_clean_end_leaves_nothing() -> None:
    """Ending a session removes its record and its leases."""
    kv = MemoryKV()
    session_id = _open(kv)
    lease = kv.transact(lambda tx: sessions.take_lease(tx, session_id))
    kv.transact(lambda tx: sessions.end_session(tx, session_id, [lease]))
    assert kv.read(sessions.list_sessions) == []
    assert kv.read(lambda tx: tx.scan(keys.LEASE, keys.prefix_end(keys.LEASE))) == []


def test_a_session_that_could_not_say_that_it_ended_is_dead() -> None:
    """Also while its process lives, which a trainer's does long after its volume is closed."""
    kv = MemoryKV()
    ended, living = _open(kv), _open(kv)
    record = kv.read(lambda tx: sessions.read_session(tx, ended))
    assert record is not None
    sessions.note_ended(record)
    assert kv.read(sessions.dead_sessions) == [ended]
    assert kv.read(lambda tx: sessions.living(tx, [ended, living])) == {living}


def test_of_many_clients_one_cleans_at_a_time() -> None:
    """The turn goes to whoever asks first after the interval; the others learn how long to wait.
    A clock that went back keeps nobody from it."""
    kv = MemoryKV()

    def claim(tx: Transaction) -> float:
        return sessions.claim_cleaning(tx, 60.0)

    assert kv.transact(claim) == 0
    assert 59 < kv.transact(claim) <= 60
    for moved_s in (-61, 3600):
        moved = CounterRecord(kv.read(lambda tx: tx.now_ns()) + moved_s * 10**9)
        kv.transact(lambda tx, row=moved: tx.put(keys.LAST_CLEANING, row.encode()))
        assert kv.transact(claim) == 0
        assert kv.transact(claim) > 59
