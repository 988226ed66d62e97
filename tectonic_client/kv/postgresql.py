"""The metadata engine of a cluster: one table in PostgreSQL, or a database that speaks like it.

Transactions are SERIALIZABLE and retried when they lose. A transaction is one libpq pipeline, so
BEGIN travels with the first read, and the writes with COMMIT: two round trips for reads followed
by writes, one for writes alone.

What is promised:

* Writes are buffered and sent as one upsert and one delete, in key order. A scan or delete_range
  sends what is buffered first; gets look into the buffer.
* A connection lost before COMMIT was sent: nothing happened, the transaction is tried again on
  another. Lost after: UnknownOutcome.
* Not durable: synchronous_commit=off, the server acknowledges before its log is on disk. Such a
  transaction survives any client, but a crash of the *server* may take back its last
  3 * wal_writer_delay (0.6 s). PostgreSQL has one log, and a commit with synchronous_commit=on
  flushes it up to its own record: a durable transaction makes all earlier ones durable. A commit
  that wrote no record flushes nothing, so a durable transaction always writes (`sync` table).
* Reads are SERIALIZABLE READ ONLY: at REPEATABLE READ a read-only transaction could see a state
  that no serial order of the writers has (Fekete, O'Neil, O'Neil 2004).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from tectonic_client.errors import (
    MetadataUnavailable,
    ReadOnly,
    TectonicError,
    TransientError,
    UnknownOutcome,
    UsedAfterFork,
)
from tectonic_client.kv.connections import Connections
from tectonic_client.kv.pairs import check_pair
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.kv.postgresql_connection import (
    Database,
    Link,
    connect,
    find_tables,
    parse_url,
)
from tectonic_client.kv.postgresql_listener import PostgresListener, channel_of
from tectonic_client.kv.watchdog import SocketWatchdog
from tectonic_client.limits import (
    METADATA_DEADLINE_S,
    METADATA_LAST_TRY_SHARE,
    METADATA_READ_THREADS,
    METADATA_RETRY_MAX_S,
    METADATA_RETRY_MIN_S,
    METADATA_WRITE_THREADS,
)

T = TypeVar("T")

_BEGIN_READ: Final = "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY"
_BEGIN: Final = "BEGIN ISOLATION LEVEL SERIALIZABLE"
_NOT_DURABLE: Final = "SET LOCAL synchronous_commit = off"
_NOW: Final = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_SYNC_TOKEN_BYTES: Final = 16


class _Statements:
    """The engine's SQL, composed once for its table."""

    def __init__(self, database: Database) -> None:
        def compose(text: str) -> sql.Composed:
            return sql.SQL(text).format(table=database.table, sync=database.sync_table)

        self.get = compose("SELECT value FROM {table} WHERE key = %b")
        self.get_many = compose("SELECT key, value FROM {table} WHERE key = ANY(%b)")
        scan = "SELECT key, value FROM {table} WHERE key >= %b AND key < %b"
        self.scan = compose(scan + " ORDER BY key LIMIT %b")
        self.scan_back = compose(scan + " ORDER BY key DESC LIMIT %b")
        self.put = compose(
            "INSERT INTO {table} (key, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        self.delete = compose("DELETE FROM {table} WHERE key = ANY(%b)")
        self.delete_range = compose("DELETE FROM {table} WHERE key >= %b AND key < %b")
        self.add_sync = compose("INSERT INTO {sync} (token) VALUES (%b)")
        self.remove_sync = compose("DELETE FROM {sync} WHERE token = %b")


class _PostgresReadTransaction:
    """Reads in the pipeline of a connection that is inside a transaction.

    Raises psycopg.Error; whoever runs the function translates it.
    """

    def __init__(self, link: Link, statements: _Statements) -> None:
        self._link: Link | None = link
        self._statements = statements
        self._now_ns: int | None = None

    def end(self) -> None:
        self._link = None

    def _execute(
        self, query: sql.Composed | LiteralString, *parameters: Any
    ) -> psycopg.Cursor[Any]:
        if self._link is None:
            raise RuntimeError("transaction used outside its function")
        return self._link.connection.execute(query, parameters, binary=True)

    def get(self, key: bytes) -> bytes | None:
        row = self._execute(self._statements.get, key).fetchone()
        return None if row is None else row[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        found = dict(self._execute(self._statements.get_many, list(keys)).fetchall())
        return [found.get(key) for key in keys]

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        statement = self._statements.scan_back if reverse else self._statements.scan
        return self._execute(statement, start, end, limit).fetchall()

    def now_ns(self) -> int:
        """The server's clock, read once per transaction; microsecond resolution."""
        if self._now_ns is None:
            self._now_ns = self._execute(_NOW).fetchall()[0][0] * 1000
        return self._now_ns


class _PostgresTransaction(_PostgresReadTransaction):
    """Reads and writes; writes wait in `_buffer` (None: deleted) until `flush`."""

    def __init__(self, link: Link, statements: _Statements) -> None:
        super().__init__(link, statements)
        self._buffer: dict[bytes, bytes | None] = {}
        self._put_sent = False

    def get(self, key: bytes) -> bytes | None:
        return self._buffer[key] if key in self._buffer else super().get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        unknown = [key for key in keys if key not in self._buffer]
        found = dict(zip(unknown, super().get_many(unknown), strict=True))
        return [self._buffer[key] if key in self._buffer else found[key] for key in keys]

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        self.flush()
        return super().scan(start, end, limit=limit, reverse=reverse)

    def put(self, key: bytes, value: bytes) -> None:
        check_pair(key, value)
        self._buffer[key] = value

    def delete(self, key: bytes) -> None:
        self._buffer[key] = None

    def delete_range(self, start: bytes, end: bytes) -> None:
        self.flush()
        self._execute(self._statements.delete_range, start, end)

    def flush(self) -> None:
        """Send the buffered writes. In key order, so that transactions do not deadlock."""
        items = sorted(self._buffer.items())
        puts = [(key, value) for key, value in items if value is not None]
        deletes = [key for key, value in items if value is None]
        self._buffer.clear()
        if puts:
            self._put_sent = True
            self._execute(self._statements.put, *map(list, zip(*puts, strict=True)))
        if deletes:
            self._execute(self._statements.delete, deletes)

    def ensure_log_record(self) -> None:
        """Write something if the transaction did not (a delete may find nothing to do)."""
        if not self._put_sent:
            token = os.urandom(_SYNC_TOKEN_BYTES)
            self._execute(self._statements.add_sync, token)
            self._execute(self._statements.remove_sync, token)


class _Attempt:
    """One try of one transaction on one connection."""

    def __init__(self, link: Link, statements: _Statements) -> None:
        self._link = link
        self._statements = statements
        self.commit_sent = False
        """From here on a lost connection leaves the outcome of the writes unknown."""

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        transaction = _PostgresReadTransaction(self._link, self._statements)

        def body() -> T:
            try:
                return fn(transaction)
            finally:
                transaction.end()

        return self._run(_BEGIN_READ, body)

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool) -> T:
        transaction = _PostgresTransaction(self._link, self._statements)

        def body() -> T:
            if not durable:
                self._link.connection.execute(_NOT_DURABLE)
            try:
                result = fn(transaction)
                transaction.flush()
                if durable:
                    transaction.ensure_log_record()
            finally:
                transaction.end()
            self.commit_sent = True
            return result

        return self._run(_BEGIN, body)

    def notify(self, channel: str) -> None:
        """Wake the channel's listeners."""
        self._link.connection.execute("SELECT pg_notify(%b, '')", (channel,))

    def _run(self, begin: LiteralString, body: Callable[[], T]) -> T:
        """BEGIN, `body`, COMMIT; leaving the pipeline waits for all answers.

        The first error counts; it must not leave the block, as psycopg would then log what the
        aborted pipeline answers.
        """
        connection = self._link.connection
        failure: BaseException | None = None
        try:
            with connection.pipeline():
                connection.execute(begin)
                try:
                    result = body()
                    connection.execute("COMMIT")
                except BaseException as error:  # noqa: BLE001  (raised below)
                    failure = error
                    with suppress(psycopg.Error):  # aborted already: see below
                        connection.execute("ROLLBACK")
        except psycopg.Error as error:
            failure = failure or error
        if failure is None:
            return result
        if connection.info.transaction_status in _UNFINISHED:
            connection.execute("ROLLBACK")
        raise failure


_UNFINISHED: Final = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


class _TryAgain(Exception):
    """An attempt that did not happen; `failure` is the answer if no time is left."""

    def __init__(self, failure: TectonicError) -> None:
        super().__init__(str(failure))
        self.failure = failure


class PostgresKV:
    """The engine on the database `url`; see `open_kv` for its form.

    `deadline_s` bounds a call, in seconds: no attempt begins later, and the last one gets no more
    than METADATA_LAST_TRY_SHARE of it beyond. Errors of the constructor: BadURL, VolumeNotFound,
    MetadataUnavailable, ReadOnly.
    """

    reads_may_block = True

    def __init__(
        self,
        url: str,
        *,
        create: bool,
        read_only: bool = False,
        deadline_s: float = METADATA_DEADLINE_S,
    ) -> None:
        self._database = parse_url(url, deadline_s)
        self._statements = _Statements(self._database)
        self._deadline_s = deadline_s
        self._read_only = read_only
        self._process = os.getpid()
        self._closed = False
        self._watchdog = SocketWatchdog()
        self._links = Connections(
            self._database.name,
            open_one=partial(connect, self._database, self._watchdog),
            close_one=Link.close,
            limit=METADATA_READ_THREADS + METADATA_WRITE_THREADS,
            wait_s=deadline_s,
        )
        try:
            self._find_tables(create and not read_only)
        except BaseException:
            self.close()
            raise

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        return self._retry(lambda attempt: attempt.read(fn))

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        if self._read_only:
            raise ReadOnly(f"{self._database.name} was opened read-only")
        return self._retry(lambda attempt: attempt.transact(fn, durable=durable))

    def listen(self, topic: str) -> PostgresListener:
        self._check_open()
        return PostgresListener(self._database, self._watchdog, topic)

    def call(self, topic: str) -> None:
        self._check_open()
        self._retry(lambda attempt: attempt.notify(channel_of(self._database, topic)))

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise MetadataUnavailable(f"{self._database.name} is closed")

    def close(self) -> None:
        """Transactions that are running finish; their connections close behind them."""
        self._check_process()
        self._closed = True
        self._links.close()
        self._watchdog.close()

    def _find_tables(self, create: bool) -> None:
        link = self._links.take()
        try:
            with self._watchdog.limit(link.wire, self._deadline_s):
                find_tables(link, self._database, create=create)
        finally:
            self._give_back(link)

    def _retry(self, run: Callable[[_Attempt], T]) -> T:
        """Try until it happens, fails for good, or the deadline is over."""
        self._check_process()
        give_up_at = time.monotonic() + self._deadline_s
        pause_s = METADATA_RETRY_MIN_S
        while True:
            try:
                return self._try_once(run, give_up_at)
            except _TryAgain as again:
                if self._closed or time.monotonic() + pause_s >= give_up_at:
                    raise again.failure from again.__cause__
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, METADATA_RETRY_MAX_S)

    def _try_once(self, run: Callable[[_Attempt], T], give_up_at: float) -> T:
        try:
            link = self._links.take(give_up_at - time.monotonic())
        except MetadataUnavailable as error:
            raise _TryAgain(error) from error
        attempt = _Attempt(link, self._statements)
        least_s = METADATA_LAST_TRY_SHARE * self._deadline_s
        try:
            with self._watchdog.limit(link.wire, max(give_up_at - time.monotonic(), least_s)):
                return run(attempt)
        except psycopg.Error as error:
            raise self._failure(error, attempt, link) from error
        finally:
            self._give_back(link)

    def _failure(self, error: psycopg.Error, attempt: _Attempt, link: Link) -> Exception:
        own = self._database.error(error)
        unanswered = link.connection.closed or error.sqlstate in _UNANSWERED
        if attempt.commit_sent and unanswered:
            return UnknownOutcome(f"{own} (while committing)")
        return _TryAgain(own) if isinstance(own, TransientError) else own

    def _give_back(self, link: Link) -> None:
        if link.connection.info.transaction_status == TransactionStatus.IDLE:
            self._links.give(link)
        else:
            self._links.discard(link)
            self._links.discard_idle()  # they are connected to the same server

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsedAfterFork(
                f"{self._database.name} was opened before a fork; open it in the child"
            )


_UNANSWERED: Final = (None, "40003")
"""No SQLSTATE: the error is the client's. 40003: CockroachDB does not know the outcome."""
