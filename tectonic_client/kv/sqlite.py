"""The embedded metadata engine: one SQLite file in WAL mode.

Safe for any number of threads and for several processes of one machine. Writes go through the
group commit of `sqlite_writer`; reads run in the calling thread on one of a few read connections
and never wait for a writer.

Beside `path` lie SQLite's `path-wal` and `path-shm` while it is open, `path-lock` (`filelock`) and
`path-call-TOPIC` (`wakefile`). The file must not be on a network file system.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import apsw

from tectonic_client.errors import MetadataUnavailable, ReadOnly, UnknownOutcome, UsedAfterFork
from tectonic_client.kv.connections import Connections
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.kv.sqlite_connection import connect, create_database, read_snapshot
from tectonic_client.kv.sqlite_writer import SqliteWriter
from tectonic_client.kv.wakefile import WakeFile, WakeFileListener
from tectonic_client.limits import (
    METADATA_DEADLINE_S,
    SQLITE_READ_CACHE_BYTES,
    SQLITE_READ_CONNECTIONS,
)

T = TypeVar("T")


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
            create_database(self._path)
        self._wake_files: dict[str, WakeFile] = {}
        self._calling = threading.Lock()
        self._closed = False
        self._writer = None if read_only else SqliteWriter(self._path, deadline_s)
        self._readers = Connections(
            self._path,
            open_one=lambda _: connect(
                self._path,
                cache_bytes=SQLITE_READ_CACHE_BYTES,
                wait_s=deadline_s,
                read_only=read_only,
            ),
            close_one=apsw.Connection.close,
            limit=SQLITE_READ_CONNECTIONS,
            wait_s=deadline_s,
        )
        if read_only:
            self._readers.give(self._readers.take())  # fails now where the file cannot be read

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        self._check_process()
        if self._writer is not None and (borrowed := self._writer.try_borrow()) is not None:
            try:
                return read_snapshot(borrowed, self._path, fn)
            finally:
                self._writer.give_back()
        connection = self._readers.take()
        try:
            return read_snapshot(connection, self._path, fn)
        finally:
            self._readers.give(connection)

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        future = self.submit(fn, durable=durable)
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            return self._late_outcome(future)

    def submit(
        self, fn: Callable[[Transaction], T], *, durable: bool = False, brief: bool = False
    ) -> Future[T]:
        """As `transact`, without waiting: the future gets the result or the error.

        One that is `brief` and not durable runs in the calling thread if nobody has the lock or
        waits for it; its future is done then.

        `future.cancel()` takes a transaction back that has not begun. Callbacks of the future run
        in the writer's thread and must not wait. Raises ReadOnly, and MetadataUnavailable where
        the queue is full or the engine closed.
        """
        self._check_process()
        if self._writer is None:
            raise ReadOnly(f"{self._path} was opened read-only")
        return self._writer.submit(fn, durable=durable, brief=brief)

    def listen(self, topic: str) -> WakeFileListener:
        self._check_open()
        return WakeFileListener(self._wake_path(topic))

    def call(self, topic: str) -> None:
        self._check_open()
        with self._calling:
            file = self._wake_files.setdefault(topic, WakeFile(self._wake_path(topic)))
            file.call()

    def _wake_path(self, topic: str) -> str:
        return f"{self._path}-call-{topic}"

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise MetadataUnavailable(f"{self._path} is closed")

    def close(self) -> None:
        self._check_process()
        with self._calling:
            self._closed = True
            while self._wake_files:
                self._wake_files.popitem()[1].close()
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
