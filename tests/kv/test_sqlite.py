"""The embedded engine: the contract, processes, crashes, full disks, broken files, group commit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from tectonic_client.errors import (
    BadURL,
    CorruptRecord,
    FormatTooNew,
    MetadataUnavailable,
    NoSpace,
    ReadOnly,
    TectonicError,
    UnknownOutcome,
    UsedAfterFork,
    VolumeNotFound,
)
from tectonic_client.kv import sqlite_connection, sqlite_writer
from tectonic_client.kv.filelock import FairFileLock
from tectonic_client.kv.port import Transaction
from tectonic_client.kv.sqlite import SqliteKV
from tests.contracts.kv import (
    ConcurrentKVContract,
    OpenEngine,
    Planned,
    closing,
    get,
    in_threads,
    increment,
    put_all,
    scan_all,
)
from tests.kv.faulty_files import FaultyFiles, faulty_files

TIMEOUT_S = 60
WAL_FRAME_BYTES = 24 + 4096


class TestSqlite(ConcurrentKVContract):
    engine = SqliteKV

    @pytest.fixture
    def open_engine(self, tmp_path: Path) -> Iterator[OpenEngine]:
        path = tmp_path / "meta.db"
        yield from closing(
            lambda read_only: SqliteKV(path, create=not read_only, read_only=read_only)
        )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A volume's database."""
    path = str(tmp_path / "meta.db")
    SqliteKV(path, create=True).close()
    return path


@pytest.fixture
def kv(path: str) -> Iterator[SqliteKV]:
    """A client of it."""
    kv = SqliteKV(path, create=False)
    yield kv
    kv.close()


@pytest.fixture
def impatient(path: str) -> Iterator[SqliteKV]:
    """Another one, with a short deadline."""
    kv = SqliteKV(path, create=False, deadline_s=1)
    yield kv
    kv.close()


# --- processes --------------------------------------------------------------------------------


def _process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kv.writer_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_four_processes_increment(path: str) -> None:
    """Four processes that increment one value at once lose nothing."""
    processes = [_process("increment", path, "100") for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    kv = SqliteKV(path, create=False)
    assert get(kv, b"count") == b"400"
    kv.close()


@pytest.mark.parametrize("reader_is_open", [False, True])
def test_kill_9(path: str, reader_is_open: bool) -> None:
    """What a process was told is committed is there after it was killed at any moment."""
    survivor = SqliteKV(path, create=False) if reader_is_open else None
    acknowledged = -1
    for round_number in range(3):
        process = _process("stream", path)
        assert process.stdout is not None
        for _ in range(50 + 37 * round_number):
            acknowledged = max(acknowledged, int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
        acknowledged = max([acknowledged, *map(int, rest.split()[:-1])])
        kv = survivor or SqliteKV(path, create=False)
        keys = [key for key, value in scan_all(kv) if key == value]
        assert keys[: acknowledged + 1] == [b"%08d" % n for n in range(acknowledged + 1)]
        put_all(kv, {b"works": b""})
        kv.close() if survivor is None else None
    if survivor is not None:
        survivor.close()


def test_use_after_fork(kv: SqliteKV) -> None:
    """A forked child gets a clear error from every call; the parent goes on."""

    def calls_refused() -> bool:
        calls: list[Callable[[], object]] = [
            lambda: get(kv, b"count"),
            lambda: kv.transact(increment),
            kv.close,
        ]
        for call in calls:
            try:
                call()
            except UsedAfterFork:
                continue
            return False
        return True

    kv.transact(increment)
    child = os.fork()
    if child == 0:
        os._exit(0 if calls_refused() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.transact(increment) == 2


def test_child_does_not_keep_the_lock(path: str, tmp_path: Path) -> None:
    """A forked child that outlives its parent does not hold the lock that it had."""
    ready, done = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        lock = FairFileLock(f"{path}-lock")
        lock.__enter__()
        if os.fork() == 0:
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    assert os.waitpid(parent, 0)[1] == 0
    kv = SqliteKV(path, create=False, deadline_s=10)
    assert kv.transact(increment) == 1
    kv.close()
    os.write(done[1], b"x")
    for descriptor in (*ready, *done):
        os.close(descriptor)


# --- waiting for others -----------------------------------------------------------------------


def test_lock_held_until_the_deadline(impatient: SqliteKV, path: str) -> None:
    """While another process holds the lock: a bounded wait, the file's name, and no late run."""
    lock = FairFileLock(f"{path}-lock")
    with lock, pytest.raises(MetadataUnavailable, match=r"meta\.db"):
        impatient.transact(increment)
    assert impatient.transact(increment) == 1
    lock.close()


def test_foreign_write_transaction(impatient: SqliteKV, path: str) -> None:
    """A program that holds SQLite's own lock without taking turns: MetadataUnavailable."""
    foreign = apsw.Connection(path)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(MetadataUnavailable, match=r"meta\.db"):
        impatient.transact(increment)
    assert get(impatient, b"count") is None
    foreign.execute("ROLLBACK")
    foreign.close()
    assert impatient.transact(increment) == 1


def test_queue_is_bounded(kv: SqliteKV, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue refuses more at once; what was accepted happens."""
    monkeypatch.setattr(sqlite_writer, "MAX_TRANSACTIONS_WAITING", 5)
    lock = FairFileLock(f"{path}-lock")
    with lock:
        futures = [kv.submit(increment) for _ in range(5)]
        with pytest.raises(MetadataUnavailable, match="waiting already"):
            # The writer may have taken one into its hand, so one more may fit.
            futures += [kv.submit(increment), kv.submit(increment)]
    assert [future.result(TIMEOUT_S) for future in futures] == [1, 2, 3, 4, 5]
    lock.close()


def test_cancelled_transactions_do_not_run(kv: SqliteKV, path: str) -> None:
    """What was cancelled in the queue never runs; its neighbours do."""
    lock = FairFileLock(f"{path}-lock")
    with lock:
        futures = [kv.submit(increment) for _ in range(4)]
        assert futures[0].cancel()
        assert futures[2].cancel()
    assert [futures[1].result(TIMEOUT_S), futures[3].result(TIMEOUT_S)] == [1, 2]
    lock.close()


def test_close_finishes_the_queue(path: str) -> None:
    """close waits for what was submitted before it; later calls are refused."""
    kv = SqliteKV(path, create=False)
    futures = [kv.submit(increment) for _ in range(50)]
    kv.close()
    assert [future.result(0) for future in futures] == list(range(1, 51))


def test_close_with_the_lock_held(path: str) -> None:
    """close does not hang behind another process: it says so."""
    kv = SqliteKV(path, create=False, deadline_s=0.2)
    lock = FairFileLock(f"{path}-lock")
    with lock:
        future = kv.submit(increment)
        with pytest.raises(MetadataUnavailable, match="another process"):
            kv.close()
    assert future.result(TIMEOUT_S) == 1
    kv.close()
    lock.close()


# --- group commit -----------------------------------------------------------------------------


def _batch(kv: SqliteKV, path: str, *functions: Callable[[Transaction], object]) -> list[object]:
    """Submit all while the writer waits, so that they share a commit; results or errors."""
    lock = FairFileLock(f"{path}-lock")
    with lock:
        futures = [kv.submit(function, durable=True) for function in functions]
    lock.close()
    return [future.exception(TIMEOUT_S) or future.result() for future in futures]


def _put(key: bytes, size: int = 1) -> Callable[[Transaction], str]:
    def put(transaction: Transaction) -> str:
        transaction.put(key, b"v" * size)
        return "done"

    return put


def _fail(transaction: Transaction) -> None:
    transaction.put(b"failed", b"")
    raise Planned


def test_members_fail_alone(kv: SqliteKV, path: str) -> None:
    """One commit serves many; a function that raises takes back its own writes only."""
    results = _batch(kv, path, _put(b"a"), _fail, _put(b"b"), _fail, _put(b"c"))
    assert [type(result) for result in results] == [str, Planned, str, Planned, str]
    assert [key for key, _ in scan_all(kv)] == [b"a", b"b", b"c"]


def test_one_sync_per_batch(kv: SqliteKV, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durable transactions that wait together are synced together."""
    syncs = _count_syncs(monkeypatch)
    assert _batch(kv, path, *[_put(b"%d" % number) for number in range(20)]) == ["done"] * 20
    assert len(syncs) <= 2  # the first may have been on its way alone


def _count_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    syncs: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        syncs.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return syncs


def test_durable_means_synced(
    kv: SqliteKV, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is acknowledged as durable, and all before it, is in the files as synced.

    The files are copied when the sync has returned: what a power loss right then would leave.
    """
    copy = str(tmp_path / "copy.db")
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        shutil.copyfile(path, copy)
        shutil.copyfile(f"{path}-wal", f"{copy}-wal")

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    def survivors() -> list[bytes]:
        after_power_loss = SqliteKV(copy, create=False)
        keys = [key for key, _ in scan_all(after_power_loss)]
        after_power_loss.close()
        return keys

    put_all(kv, {b"1": b""})
    assert not os.path.exists(copy), "a transaction that is not durable waited for a sync"
    kv.transact(_put(b"2"), durable=True)
    assert survivors() == [b"1", b"2"]
    put_all(kv, {b"3": b""})
    kv.transact(lambda _: None, durable=True)  # writes nothing, and still covers the one before
    assert survivors() == [b"1", b"2", b"3"]
    other = SqliteKV(path, create=False)
    put_all(other, {b"4": b""})
    kv.transact(lambda transaction: transaction.delete(b"none"), durable=True)
    assert survivors() == [b"1", b"2", b"3", b"4"]
    other.close()


# --- full and broken disks --------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FaultyFiles]:
    with faulty_files() as files:
        yield files


@pytest.mark.parametrize("after_writes", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (apsw.FullError("database or disk is full"), NoSpace),
        (apsw.IOError("disk I/O error"), UnknownOutcome),
    ],
)
def test_failing_commit(
    files: FaultyFiles,
    kv: SqliteKV,
    error: apsw.Error,
    expected: type[TectonicError],
    after_writes: int,
) -> None:
    """A commit that fails at any write: typed, all or nothing, earlier data whole, it recovers."""
    put_all(kv, {b"a": b"1", b"b": b"1"})
    with (
        files.failing(error, after_writes=after_writes),
        pytest.raises(expected, match=r"meta\.db"),
    ):
        put_all(kv, {b"a": b"2", b"b": b"2" * 9000})
    assert scan_all(kv) == [(b"a", b"1"), (b"b", b"1")]
    put_all(kv, {b"c": b"3"})
    assert scan_all(kv) == [(b"a", b"1"), (b"b", b"1"), (b"c", b"3")]


def test_own_error_survives_a_failing_commit(files: FaultyFiles, kv: SqliteKV, path: str) -> None:
    """Members whose function raised keep their error when the commit of the others fails."""
    with files.failing(apsw.IOError("disk I/O error")):
        results = _batch(kv, path, _put(b"a"), _fail, _put(b"b"))
    assert [type(result) for result in results] == [UnknownOutcome, Planned, UnknownOutcome]
    assert scan_all(kv) == []


def test_full_database_fails_the_large_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a large transaction, the small ones of the same batch still happen."""
    real = sqlite_connection.connect

    def connect(path: str, *, cache_bytes: int, wait_s: float) -> apsw.Connection:
        connection = real(path, cache_bytes=cache_bytes, wait_s=wait_s)
        connection.pragma("max_page_count", 20)
        return connection

    monkeypatch.setattr(sqlite_writer, "connect", connect)
    kv = SqliteKV(path, create=False)
    put_all(kv, {b"old": b"v" * 20_000})
    results = _batch(
        kv, path, _put(b"a"), _put(b"large", 500_000), lambda t: t.delete(b"old"), _put(b"b")
    )
    assert [type(result) for result in results] == [str, NoSpace, type(None), str]
    assert [key for key, _ in scan_all(kv)] == [b"a", b"b"]
    kv.close()


def test_one_by_one_each_has_its_own_outcome(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk, a lock that is lost in the middle fails nothing that is committed."""
    real, begun = sqlite_connection.connect, 0

    class Limited(apsw.Connection):
        def execute(self, *arguments: Any, **settings: Any) -> Any:
            nonlocal begun
            begun += arguments[0] == "BEGIN IMMEDIATE"
            if arguments[0] == "BEGIN IMMEDIATE" and begun == 3:
                raise apsw.BusyError("database is locked")
            return super().execute(*arguments, **settings)

    def connect(path: str, *, cache_bytes: int, wait_s: float) -> apsw.Connection:
        with monkeypatch.context() as patch:
            patch.setattr(apsw, "Connection", Limited)
            connection = real(path, cache_bytes=cache_bytes, wait_s=wait_s)
        connection.pragma("max_page_count", 20)
        return connection

    monkeypatch.setattr(sqlite_writer, "connect", connect)
    kv = SqliteKV(path, create=False)
    results = _batch(kv, path, _put(b"a"), _put(b"b"), _put(b"large", 500_000), _put(b"c"))
    assert [type(result) for result in results] == [str, MetadataUnavailable, NoSpace, str]
    assert [key for key, _ in scan_all(kv)] == [b"a", b"c"]
    kv.close()


def test_full_disk_fails_the_large_only(files: FaultyFiles, kv: SqliteKV, path: str) -> None:
    """Likewise where the disk is full only when the batch is committed."""
    put_all(kv, {b"old": b""})
    room = os.path.getsize(f"{path}-wal") + 3 * WAL_FRAME_BYTES
    with files.failing(apsw.FullError("database or disk is full"), beyond=room):
        results = _batch(kv, path, _put(b"large", 100_000), lambda t: t.delete(b"old"))
    assert [type(result) for result in results] == [NoSpace, type(None)]
    assert scan_all(kv) == []


def test_failed_sync_stops_the_writer(kv: SqliteKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync is UnknownOutcome; as the kernel may forget it, nothing is accepted after."""

    def fdatasync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert kv.transact(increment) == 1
    with pytest.raises(UnknownOutcome, match="Input/output error"):
        kv.transact(increment, durable=True)
    monkeypatch.undo()
    with pytest.raises(MetadataUnavailable, match="open it again"):
        kv.transact(increment)
    assert get(kv, b"count") == b"2"


def test_removed_log_is_noticed(kv: SqliteKV, path: str) -> None:
    """If somebody removes the log, a durable transaction is not acknowledged."""
    kv.transact(increment, durable=True)
    os.unlink(f"{path}-wal")
    with pytest.raises(UnknownOutcome, match="removed"):
        kv.transact(increment, durable=True)


# --- brief transactions -----------------------------------------------------------------------


def _thread(transaction: Transaction) -> int:
    increment(transaction)
    return threading.get_ident()


def test_brief_runs_in_the_caller(kv: SqliteKV) -> None:
    """With nobody to wait for it is committed on return, by the caller's own thread."""
    future = kv.submit(_thread, brief=True)
    assert future.done()
    assert future.result() == threading.get_ident()
    assert kv.submit(_thread).result(TIMEOUT_S) != threading.get_ident()
    assert get(kv, b"count") == b"2"


def test_brief_and_durable_waits_for_its_sync(
    kv: SqliteKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody syncs in the caller's thread: what must be durable takes the queue."""
    syncs = _count_syncs(monkeypatch)
    future = kv.submit(_thread, durable=True, brief=True)
    assert future.result(TIMEOUT_S) != threading.get_ident()
    assert len(syncs) == 1


def test_brief_waits_for_nobody(kv: SqliteKV, path: str) -> None:
    """Behind another process, or the queue, it takes the queue: submit returns at once."""
    lock = FairFileLock(f"{path}-lock")
    with lock:
        first = kv.submit(_thread, brief=True)
        second = kv.submit(_thread, brief=True)
        assert not first.done()
    assert threading.get_ident() not in (first.result(TIMEOUT_S), second.result(TIMEOUT_S))
    lock.close()
    assert get(kv, b"count") == b"2"


def test_brief_beside_a_foreign_transaction(impatient: SqliteKV, path: str) -> None:
    """Where SQLite's own lock is taken the caller does not wait for it either."""
    foreign = apsw.Connection(path)
    foreign.execute("BEGIN IMMEDIATE")
    future = impatient.submit(_thread, brief=True)
    assert not future.done()
    foreign.execute("ROLLBACK")
    foreign.close()
    assert future.result(TIMEOUT_S) != threading.get_ident()


def test_brief_that_fails(kv: SqliteKV) -> None:
    """What it raises is its outcome; nothing of it stays, and the next ones are not touched."""
    future = kv.submit(_fail, brief=True)
    assert isinstance(future.exception(0), Planned)
    assert scan_all(kv) == []
    assert kv.submit(increment, brief=True).result(0) == 1


def test_brief_interrupted_by_a_signal(kv: SqliteKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises between the steps of a commit leaves no transaction open."""

    def interrupted(self: object, batch: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sqlite_writer.SqliteWriter, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kv.submit(increment, brief=True)
    monkeypatch.undo()
    assert kv.submit(increment, brief=True).result(0) == 1
    assert kv.transact(increment) == 2


def test_brief_after_closing(path: str) -> None:
    """A closed engine refuses it like any other."""
    kv = SqliteKV(path, create=False)
    kv.close()
    with pytest.raises(MetadataUnavailable, match="closed"):
        kv.submit(increment, brief=True)


def test_brief_of_many_threads_and_clients(path: str) -> None:
    """Callers that collide all the time lose no update."""
    clients = [SqliteKV(path, create=False) for _ in range(2)]

    def count(kv: SqliteKV) -> Callable[[], None]:
        def run() -> None:
            for _ in range(300):
                kv.submit(increment, brief=True).result(TIMEOUT_S)

        return run

    in_threads(*map(count, clients * 2))
    assert get(clients[0], b"count") == b"1200"
    for kv in clients:
        kv.close()


@pytest.mark.alone  # the device is to keep up
def test_log_stays_small_under_brief_ones(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller leaves a checkpoint that is due to the writer's thread, and lets it come."""
    monkeypatch.setattr(sqlite_writer, "SQLITE_WAL_PAGES", 20)
    kv = SqliteKV(path, create=False)
    at_once = 0
    for number in range(400):
        future = kv.submit(_put(b"%d" % number, 4000), brief=True)
        at_once += future.done()
        assert future.result(TIMEOUT_S) == "done"
    assert at_once > 200
    assert os.path.getsize(f"{path}-wal") // 4096 < 200, "400 pages or more were written"
    kv.close()


# --- checkpoints ------------------------------------------------------------------------------


@pytest.mark.alone  # the device is to keep up
def test_log_stays_small(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady writes of two clients do not let the log grow; closing the last removes it."""
    monkeypatch.setattr(sqlite_writer, "SQLITE_WAL_PAGES", 20)
    clients = [SqliteKV(path, create=False) for _ in range(2)]

    def write(kv: SqliteKV) -> Callable[[], None]:
        def run() -> None:
            for number in range(400):
                put_all(kv, {b"%d" % number: b"v" * 4000})

        return run

    in_threads(*map(write, clients))
    pages = os.path.getsize(f"{path}-wal") // 4096
    assert pages < 200, "1,600 pages or more were written"
    for kv in clients:
        kv.close()
    assert not os.path.exists(f"{path}-wal")
    kv = SqliteKV(path, create=False)
    assert len(scan_all(kv)) == 400
    kv.close()


def test_failing_checkpoint_loses_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that fails is logged; transactions go on."""
    monkeypatch.setattr(sqlite_writer, "SQLITE_WAL_PAGES", 5)

    def fail(self: object, connection: object) -> None:
        raise apsw.FullError("database or disk is full")

    monkeypatch.setattr(sqlite_writer.SqliteWriter, "_move_pages", fail)
    kv = SqliteKV(path, create=False)
    for number in range(20):
        put_all(kv, {b"%d" % number: b"v" * 4000})
    assert len(scan_all(kv)) == 20
    kv.close()
    assert "checkpoint failed" in caplog.text


# --- what is at the path ----------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    """Without create, a missing file is VolumeNotFound and stays missing; so is a directory's."""
    path = tmp_path / "meta.db"
    for read_only in (False, True):
        with pytest.raises(VolumeNotFound, match=r"meta\.db"):
            SqliteKV(path, create=False, read_only=read_only)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VolumeNotFound, match="nowhere"):
        SqliteKV(tmp_path / "nowhere" / "meta.db", create=True)


def test_concurrent_creation(tmp_path: Path) -> None:
    """Many that create the same volume at once all get it, and leave one file."""
    path = tmp_path / "meta.db"

    def create() -> None:
        kv = SqliteKV(path, create=True)
        kv.transact(increment)
        kv.close()

    in_threads(*[create] * 8)
    kv = SqliteKV(path, create=False)
    assert get(kv, b"count") == b"8"
    kv.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["meta.db", "meta.db-lock"]


def test_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation that fails half-way leaves no file, so that the next one starts clean."""

    def link(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(NoSpace, match="No space"):
        SqliteKV(tmp_path / "meta.db", create=True)
    assert list(tmp_path.iterdir()) == []


def _foreign_database(path: str) -> None:
    connection = apsw.Connection(path)
    connection.execute("CREATE TABLE bookmarks (title)")
    connection.close()


def _newer_schema(path: str) -> None:
    SqliteKV(path, create=True).close()
    connection = apsw.Connection(path)
    connection.pragma("user_version", 2)
    connection.close()


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize(
    ("make", "expected", "words"),
    [
        (lambda path: Path(path).mkdir(), BadURL, "directory"),
        (lambda path: Path(path).write_bytes(b""), BadURL, "not the metadata"),
        (lambda path: Path(path).write_bytes(b"a text file\n" * 1000), CorruptRecord, "not a data"),
        (_foreign_database, BadURL, "not the metadata"),
        (_newer_schema, FormatTooNew, "schema 2"),
    ],
)
def test_something_else_at_the_path(
    tmp_path: Path,
    make: Callable[[str], None],
    expected: type[TectonicError],
    words: str,
    create: bool,
) -> None:
    """What is not a volume's database is refused with its name, and left as it is."""
    path = tmp_path / "meta.db"
    make(str(path))
    before = path.read_bytes() if path.is_file() else None
    for read_only in (False, True):
        with pytest.raises(expected, match=rf"meta\.db.*{words}"):
            SqliteKV(path, create=create, read_only=read_only)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_corrupt_pages(path: str) -> None:
    """Overwritten pages are CorruptRecord for reads and writes, never other data."""
    kv = SqliteKV(path, create=False)
    put_all(kv, {b"%04d" % number: b"v" * 500 for number in range(200)})
    kv.close()
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    kv = SqliteKV(path, create=False)
    with pytest.raises(CorruptRecord, match=r"meta\.db"):
        get(kv, b"0001")
    with pytest.raises(CorruptRecord, match=r"meta\.db"):
        kv.transact(lambda transaction: transaction.get(b"0001"))
    kv.close()


def test_read_only_with_a_live_writer(path: str) -> None:
    """A read-only client sees what others commit, creates nothing and refuses to write."""
    writer = SqliteKV(path, create=False)
    reader = SqliteKV(path, create=False, read_only=True)
    put_all(writer, {b"a": b"1"})
    assert get(reader, b"a") == b"1"
    with pytest.raises(ReadOnly):
        reader.submit(increment)
    writer.close()
    assert get(reader, b"a") == b"1"
    reader.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EROFS, ReadOnly),
        (errno.EACCES, ReadOnly),
        (errno.ENOENT, VolumeNotFound),
        (errno.EIO, MetadataUnavailable),
        (errno.EMFILE, MetadataUnavailable),
    ],
)
def test_errors_of_the_operating_system(number: int, expected: type[TectonicError]) -> None:
    """Each errno has its error, named after the file."""
    error = sqlite_connection.translate(OSError(number, os.strerror(number)), "/x/meta.db")
    assert type(error) is expected
    assert "/x/meta.db" in str(error)


def test_old_library_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite before 3.51.3 may corrupt a database that several processes write: not used."""
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(MetadataUnavailable, match=r"3\.51\.3"):
        SqliteKV(path, create=False)
