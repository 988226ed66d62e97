"""The embedded metadata engine: one SQLite file in WAL mode.

Safe for any number of threads and for several processes of one machine. Writes go through the
group commit of `sqlite_writer`; reads run in the calling thread on one of a few read connections
and never wait for a writer.

Beside `path` lie SQLite's `path-wal` and `path-shm` while it is open, and `path-lock`
(`filelock`). The file must not be on a network file system.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import apsw

from tectonic_client.errors import MetadataUnavailable, ReadOnly, UnknownOutcome, UsedAfterFork
from tectonic_client.kv import sqlite_connection
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.kv.sqlite_writer import SqliteWriter
from tectonic_client.limits import (
    METADATA_DEADLINE_S,
    SQLITE_READ_CACHE_BYTES,
    SQLITE_READ_CONNECTIONS,
)

T = TypeVar("T")


class _ReadConnections:
    """A bounded stack of read connections: the last one used is the next, its cache is warm."""

    def __init__(self, path: str, wait_s: float, *, read_only: bool) -> None:
        self._path = path
        self._wait_s = wait_s
        self._read_only = read_only
        self._idle: list[apsw.Connection] = []
        self._opened = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def take(self) -> apsw.Connection:
        with self._changed:
            if not self._changed.wait_for(self._may_take, self._wait_s):
                raise MetadataUnavailable(
                    f"{self._path}: {SQLITE_READ_CONNECTIONS} reads have been running"
                    f" for {self._wait_s:.0f} s"
                )
            if self._closed:
                raise MetadataUnavailable(f"{self._path} is closed")
            if self._idle:
                return self._idle.pop()
            self._opened += 1
        return self._open()

    def give(self, connection: apsw.Connection) -> None:
        with self._changed:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()

    def _may_take(self) -> bool:
        return self._closed or bool(self._idle) or self._opened < SQLITE_READ_CONNECTIONS

    def _open(self) -> apsw.Connection:
        try:
            return sqlite_connection.connect(
                self._path,
                cache_bytes=SQLITE_READ_CACHE_BYTES,
                wait_s=self._wait_s,
                read_only=self._read_only,
            )
        except BaseException:
            with self._changed:
                self._opened -= 1
                self._changed.notify()
            raise


class SqliteKV:
    """The embedded engine on the file `path`; `deadline_s` bounds every call, in seconds.

    With `create` the file is made if it is missing; else VolumeNotFound. Further errors of the
    constructor: BadURL (some other database), CorruptRecord, FormatTooNew, ReadOnly, NoSpace.
    """

    reads_may_block = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool,
        read_only: bool = False,
        deadline_s: float = METADATA_DEADLINE_S,
    ) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._deadline_s = deadline_s
        self._process = os.getpid()
        if create and not read_only:
            sqlite_connection.create(self._path)
        self._writer = None if read_only else SqliteWriter(self._path, deadline_s)
        self._readers = _ReadConnections(self._path, deadline_s, read_only=read_only)
        if read_only:
            self.read(lambda transaction: transaction.get(b""))  # fails now where it cannot be read

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        self._check_process()
        connection = self._readers.take()
        try:
            return sqlite_connection.read_snapshot(connection, self._path, fn)
        finally:
            self._readers.give(connection)

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        future = self.submit(fn, durable=durable)
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            return self._late_outcome(future)

    def submit(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> Future[T]:
        """As `transact`, without waiting: the future gets the result or the error.

        `future.cancel()` takes a transaction back that has not begun. Callbacks of the future run
        in the writer's thread and must not wait. Raises ReadOnly, and MetadataUnavailable where
        the queue is full or the engine closed.
        """
        self._check_process()
        if self._writer is None:
            raise ReadOnly(f"{self._path} was opened read-only")
        return self._writer.submit(fn, durable)

    def close(self) -> None:
        self._check_process()
        self._readers.close()
        if self._writer is not None:
            self._writer.close()

    def _late_outcome(self, future: Future[T]) -> T:
        """The outcome after the deadline: none if it has not begun, else it must be near."""
        if future.cancel():
            raise MetadataUnavailable(
                f"{self._path}: other transactions held the lock for {self._deadline_s:.0f} s"
            )
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            if future.done():  # the function itself raised it
                return future.result()
            raise UnknownOutcome(
                f"{self._path}: the commit got no answer in {2 * self._deadline_s:.0f} s"
            ) from None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsedAfterFork(f"{self._path} was opened before a fork; open it in the child")
