"""The metadata engine of tests: sorted keys in memory, one lock.

Owns nothing but memory. The lock is held while a function runs, so transactions are serial and a
read is a snapshot; an undo log takes back what a failed function wrote. Several `MemoryKV` over
one `MemoryData` behave like several clients of one database; closing one leaves the data.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from tectonic_client.errors import MetadataUnavailable, ReadOnly
from tectonic_client.kv.pairs import check_pair
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import METADATA_DEADLINE_S

T = TypeVar("T")


class MemoryData:
    """Keys in order, and their values. Whoever reads or writes holds `lock`."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.keys: Final[list[bytes]] = []
        self.values: Final[dict[bytes, bytes]] = {}
        self.listeners: Final[dict[str, set[MemoryListener]]] = {}

    def set(self, key: bytes, value: bytes | None) -> bytes | None:
        """Set or (None) remove `key`; returns what it was."""
        before = self.values.get(key)
        if value is None:
            if before is not None:
                del self.values[key]
                del self.keys[bisect_left(self.keys, key)]
            return before
        if before is None:
            insort(self.keys, key)
        self.values[key] = value
        return before

    def range(self, start: bytes, end: bytes) -> list[bytes]:
        """Keys with start <= key < end, in order."""
        return self.keys[bisect_left(self.keys, start) : bisect_left(self.keys, end)]


class MemoryListener:
    """Hears calls through an eventfd."""

    def __init__(self, data: MemoryData, topic: str) -> None:
        self._data = data
        self._topic = topic
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with data.lock:
            data.listeners.setdefault(topic, set()).add(self)

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        with self._data.lock:
            self._data.listeners[self._topic].discard(self)
        os.close(self._event)


class _MemoryReadTransaction:
    def __init__(self, data: MemoryData) -> None:
        self._data: MemoryData | None = data

    @property
    def _open(self) -> MemoryData:
        if self._data is None:
            raise RuntimeError("transaction used outside its function")
        return self._data

    def end(self) -> None:
        self._data = None

    def get(self, key: bytes) -> bytes | None:
        return self._open.values.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        data = self._open
        keys = data.range(start, end)
        if reverse:
            keys.reverse()
        return [(key, data.values[key]) for key in keys[:limit]]

    def now_ns(self) -> int:
        return time.time_ns()


class _MemoryTransaction(_MemoryReadTransaction):
    """Writes go straight to the data; the undo log remembers what they replaced."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self._undo: list[tuple[bytes, bytes | None]] = []

    def undo(self) -> None:
        for key, before in reversed(self._undo):
            self._open.set(key, before)

    def put(self, key: bytes, value: bytes) -> None:
        check_pair(key, value)
        self._undo.append((key, self._open.set(key, value)))

    def delete(self, key: bytes) -> None:
        self._undo.append((key, self._open.set(key, None)))

    def delete_range(self, start: bytes, end: bytes) -> None:
        for key in self._open.range(start, end):
            self.delete(key)


class MemoryKV:
    """One client of `data`. Nothing is durable; `durable` is accepted and ignored."""

    reads_may_block = False

    def __init__(self, data: MemoryData | None = None, *, read_only: bool = False) -> None:
        self._data = MemoryData() if data is None else data
        self._read_only = read_only
        self._closed = False

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        with self._locked() as data:
            transaction = _MemoryReadTransaction(data)
            try:
                return fn(transaction)
            finally:
                transaction.end()

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        if self._read_only:
            raise ReadOnly("memory metadata was opened read-only")
        with self._locked() as data:
            transaction = _MemoryTransaction(data)
            try:
                return fn(transaction)
            except BaseException:
                transaction.undo()
                raise
            finally:
                transaction.end()

    def submit(
        self, fn: Callable[[Transaction], T], *, durable: bool = False, brief: bool = False
    ) -> Future[T]:
        """As `transact`, at once; the future is done on return."""
        future: Future[T] = Future()
        try:
            future.set_result(self.transact(fn, durable=durable))
        except Exception as error:  # noqa: BLE001  (whatever the function raised is its outcome)
            future.set_exception(error)
        return future

    def listen(self, topic: str) -> MemoryListener:
        with self._locked() as data:
            pass
        return MemoryListener(data, topic)

    def call(self, topic: str) -> None:
        with self._locked() as data:
            for listener in data.listeners.get(topic, ()):
                listener.wake()

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _locked(self) -> Iterator[MemoryData]:
        if self._closed:
            raise MetadataUnavailable("memory metadata is closed")
        # The bound turns a function that calls its own engine into an error, not a hang.
        if not self._data.lock.acquire(timeout=METADATA_DEADLINE_S):
            raise MetadataUnavailable(f"memory metadata was busy for {METADATA_DEADLINE_S:.0f} s")
        try:
            yield self._data
        finally:
            self._data.lock.release()
