"""Group commit: how a process writes to the embedded engine's database.

Owns the write connection, the queue of transactions and the thread that serves it. A commit goes
like this:

    wait for a transaction -> wait for this process's turn (FairFileLock) -> BEGIN IMMEDIATE
    -> take all that is queued -> each function in a SAVEPOINT -> COMMIT -> next process's turn
    -> fdatasync of the WAL if any member is durable -> deliver the outcomes

A brief transaction that need not be durable does the same in its caller's thread when all of that
is free: it costs a fifth of what two changes of threads do, and writes to memory only (the page
cache).

Invariants:

* Nothing is delivered as done before it is committed; a durable member not before the sync.
* The WAL is one file that all processes append to, so syncing it makes every earlier commit
  durable, whichever process made it, also when this transaction wrote nothing. SQLite syncs the
  WAL before a checkpoint and the database after it, before the WAL may be overwritten: a commit
  is always whole in one or the other. (So synchronous=NORMAL and a sync of our own promise what
  synchronous=FULL does, and other processes commit during the sync. They may see a transaction
  before it is durable. Who acts on what it saw outside the database, by deleting a chunk for
  instance, makes a durable transaction first.)
* A transaction is claimed, and can no longer be cancelled, only once the write lock is held.
* FairFileLock only orders the processes; SQLite's lock, which BEGIN IMMEDIATE takes, protects.
* The connection and the lock between processes belong to the thread that holds `_writing`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import apsw

from tectonic_client.errors import MetadataUnavailable, NoSpace, TectonicError, UnknownOutcome
from tectonic_client.kv.filelock import FairFileLock
from tectonic_client.kv.port import Transaction
from tectonic_client.kv.sqlite_connection import (
    SqliteTransaction,
    connect,
    sync_directory_of,
    translate,
)
from tectonic_client.limits import (
    MAX_TRANSACTIONS_PER_COMMIT,
    MAX_TRANSACTIONS_WAITING,
    SQLITE_READ_CACHE_BYTES,
    SQLITE_WAL_FILE_BYTES,
    SQLITE_WAL_PAGES,
    SQLITE_WRITE_CACHE_BYTES,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """One transaction, from the queue to its delivery."""

    fn: Callable[[Transaction], Any]
    durable: bool
    future: Future[Any] = field(default_factory=Future)
    result: Any = None
    own_error: BaseException | None = None
    """What the function raised: it was rolled back, whatever becomes of the commit."""
    commit_error: TectonicError | None = None

    @property
    def committed(self) -> bool:
        return self.own_error is None and self.commit_error is None

    def deliver(self) -> None:
        error = self.own_error or self.commit_error
        if error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(error)


class _TransactionLost(Exception):
    """SQLite rolled the whole transaction back under a member (disk full, I/O error)."""


class SqliteWriter:
    """The writer of one `SqliteKV`; `wait_s` bounds waits for locks and for closing.

    Raises from the constructor as `connect` does.
    """

    def __init__(self, path: str, wait_s: float) -> None:
        self._path = path
        self._wait_s = wait_s
        self._connection = connect(path, cache_bytes=SQLITE_WRITE_CACHE_BYTES, wait_s=wait_s)
        self._connection.pragma("journal_size_limit", SQLITE_WAL_FILE_BYTES)
        self._connection.set_wal_hook(self._note_wal_pages)
        self._checkpointer = connect(path, cache_bytes=SQLITE_READ_CACHE_BYTES, wait_s=wait_s)
        self._wal_pages = 0
        self._checkpointed_pages = 0
        try:
            # The WAL stays the same file as long as any connection is open.
            self._wal = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            sync_directory_of(path)  # whoever created the WAL need not have synced its name
            self._turn = FairFileLock(f"{path}-lock")
        except OSError as error:
            self._checkpointer.close()
            self._connection.close()
            raise translate(error, path) from error
        self._queue: queue.SimpleQueue[_Member | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._admission = threading.Lock()
        self._closed = False
        self._sync_failure: str | None = None
        self._thread: Final = threading.Thread(target=self._serve, name="kv-writer", daemon=True)
        self._thread.start()

    def submit(
        self, fn: Callable[[Transaction], Any], *, durable: bool, brief: bool
    ) -> Future[Any]:
        """Queue a transaction, or run a `brief` one at once; its outcome arrives in the future.

        Raises MetadataUnavailable (closed, queue full).
        """
        member = _Member(fn, durable)
        if not (brief and not durable and self._commit_at_once(member)):
            self._enqueue(member)
        return member.future

    def _check_open(self) -> None:
        if self._closed:
            raise MetadataUnavailable(f"{self._path} is closed")
        if self._sync_failure is not None:
            raise MetadataUnavailable(self._sync_failure)

    def _enqueue(self, member: _Member) -> None:
        with self._admission:
            self._check_open()
            if self._queue.qsize() >= MAX_TRANSACTIONS_WAITING:
                raise MetadataUnavailable(
                    f"{self._path}: {MAX_TRANSACTIONS_WAITING} transactions are waiting already"
                )
            self._queue.put(member)

    def close(self) -> None:
        """Finish the queue. Raises MetadataUnavailable where that takes longer than `wait_s`."""
        with self._admission:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            raise MetadataUnavailable(
                f"{self._path}: another process has held the lock for {self._wait_s:.0f} s;"
                " what is queued was not finished"
            )

    # --- at once ------------------------------------------------------------------------------

    def _commit_at_once(self, member: _Member) -> bool:
        """Commit in this thread, if neither a thread nor a process has to be waited for."""
        # Behind a checkpoint that is due, for under a steady load of these it would never come.
        if not self._queue.empty() or self._is_checkpoint_due():
            return False
        if not self._writing.acquire(blocking=False):
            return False
        try:
            self._check_open()
            done = self._try_turn([member])
        finally:
            self._writing.release()
        if done:
            member.deliver()
        return done

    def _try_turn(self, batch: list[_Member]) -> bool:
        try:
            entered = self._turn.try_enter()
        except OSError:
            return False  # the thread meets it too, and tells
        if not entered:
            return False
        try:
            if done := self._try_begin():
                self._commit(batch)
            return done
        finally:
            self._roll_back()  # where a signal's handler raised in the main thread
            self._turn.leave()

    def _try_begin(self) -> bool:
        """Begin a transaction unless that takes waiting, or is refused: the thread tells why."""
        self._connection.set_busy_timeout(0)
        try:
            self._begin()
        except apsw.Error:
            return False
        finally:
            self._connection.set_busy_timeout(round(self._wait_s * 1000))
        return True

    def try_borrow(self) -> apsw.Connection | None:
        """The write connection for a read, if it is idle: end that by `give_back`.

        It knows what changed and keeps its pages, where a read connection has to drop all of its
        own at the first read after each commit.
        """
        if self._closed or not self._writing.acquire(blocking=False):
            return None
        return self._connection

    def give_back(self) -> None:
        """End what `try_borrow` began."""
        self._writing.release()

    # --- the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while (first := self._queue.get()) is not None:
            with self._writing:
                batch = self._commit_queued(first)
            self._finish(batch)
            self._checkpoint()
        self._writing.acquire()  # for good: nobody commits at once any more
        os.close(self._wal)
        self._turn.close()
        self._checkpointer.close()
        self._connection.close()

    def _commit_queued(self, first: _Member) -> list[_Member]:
        """Commit `first` and what is queued behind it; returns the members with their outcomes."""
        batch = None
        try:
            with self._turn:
                self._begin()
                batch = self._claim(first)
                self._commit(batch)
        except (apsw.Error, OSError) as error:
            failure = self._translate(error)
            batch = self._claim(first) if batch is None else batch
            for member in batch:
                member.commit_error = failure
        return batch

    def _claim(self, first: _Member) -> list[_Member]:
        """Take from the queue; from here on nobody can cancel."""
        members = [first]
        while len(members) < MAX_TRANSACTIONS_PER_COMMIT and not self._queue.empty():
            member = self._queue.get()
            if member is None:  # closing: nothing comes behind it, so it may go to the end again
                self._queue.put(None)
                break
            members.append(member)
        return [member for member in members if member.future.set_running_or_notify_cancel()]

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self, batch: list[_Member]) -> None:
        """Run the members in the transaction that is open, and commit it."""
        failure = self._try_commit(batch)
        for member in batch:
            member.commit_error = failure
        if isinstance(failure, NoSpace) and len(batch) > 1:
            # One large transaction must not fail the small ones, least of all a delete.
            for member in batch:
                member.commit_error = self._commit_alone(member)

    def _commit_alone(self, member: _Member) -> TectonicError | None:
        """As `_try_commit`; what fails here says nothing of the members before it."""
        try:
            self._begin()
        except apsw.Error as error:
            return self._translate(error)
        return self._try_commit([member])

    def _try_commit(self, batch: list[_Member]) -> TectonicError | None:
        try:
            if len(batch) == 1:
                self._run_alone(batch[0])
            else:
                for member in batch:
                    self._run_member(member)
        except (apsw.Error, _TransactionLost) as error:
            self._roll_back()
            return self._translate(error.__cause__ or error)
        try:
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")
        except apsw.IOError as error:
            failure = self._translate(error)
            self._roll_back()
            # The commit record may have reached the file; a recovery would find it there.
            return failure if isinstance(failure, NoSpace) else UnknownOutcome(str(failure))
        except apsw.Error as error:
            self._roll_back()
            return self._translate(error)
        return None

    def _run_alone(self, member: _Member) -> None:
        """Run the only member; where it fails nothing is left to commit."""
        self._run(member)
        if member.own_error is not None:
            self._connection.execute("ROLLBACK")

    def _run_member(self, member: _Member) -> None:
        self._connection.execute("SAVEPOINT member")
        self._run(member)
        if member.own_error is not None:
            self._connection.execute("ROLLBACK TO member")
        self._connection.execute("RELEASE member")

    def _run(self, member: _Member) -> None:
        """Run the member's function in the transaction that is open."""
        member.own_error = None
        transaction = SqliteTransaction(self._connection)
        try:
            member.result = member.fn(transaction)
        except BaseException as error:  # whatever it is, it belongs to the caller
            if not self._connection.in_transaction:
                raise _TransactionLost from error
            is_foreign = isinstance(error, apsw.Error)
            member.own_error = self._translate(error) if is_foreign else error
        finally:
            transaction.end()

    def _translate(self, error: BaseException) -> TectonicError:
        return translate(error, self._path, self._connection)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _finish(self, batch: list[_Member]) -> None:
        """Deliver the outcomes; those that must survive power loss after a sync."""
        durable = [member for member in batch if member.durable and member.committed]
        for member in batch:
            if not (member.durable and member.committed):
                member.deliver()
        if durable:
            failure = self._sync()
            for member in durable:
                member.commit_error = failure
                member.deliver()

    def _sync(self) -> TectonicError | None:
        """Make everything committed so far durable.

        After a failure the kernel may have dropped what it could not write, and would report
        success the next time; so this writer stops.
        """
        if self._sync_failure is not None:
            return UnknownOutcome(self._sync_failure)
        try:
            os.fdatasync(self._wal)
            reason = None if os.fstat(self._wal).st_nlink else "somebody removed it"
        except OSError as error:
            reason = str(error)
        if reason is None:
            return None
        self._sync_failure = f"{self._path}-wal could not be synced ({reason}); open it again"
        return UnknownOutcome(self._sync_failure)

    # --- checkpoints --------------------------------------------------------------------------

    def _note_wal_pages(self, connection: apsw.Connection, database: str, pages: int) -> int:
        self._wal_pages = pages
        if pages < self._checkpointed_pages:  # the WAL has started over
            self._checkpointed_pages = 0
        return int(apsw.SQLITE_OK)

    def _checkpoint(self) -> None:
        """Move the WAL's pages into the database now and then.

        Most of them while everybody goes on, by a connection of its own, one process at a time.
        The rest while all others wait (some milliseconds): if they went on appending, the end of
        the WAL would never be reached under steady load, and it would grow for ever. A long read
        somewhere lets the checkpoint stop short; it is then tried again later.
        """
        if not self._is_checkpoint_due():
            return
        pages = self._wal_pages
        try:
            with self._turn.side_lock() as alone:
                if alone:  # else another process is at it, for all
                    self._move_pages(self._checkpointer)
                    with self._writing, self._turn:
                        pages = self._wal_pages
                        self._move_pages(self._connection)
        except (apsw.Error, OSError) as error:
            # Nothing is lost, the WAL only grows; the next attempt comes with more pages.
            _log.warning("%s: checkpoint failed: %s", self._path, error)
        self._checkpointed_pages = pages

    def _move_pages(self, connection: apsw.Connection) -> None:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _is_checkpoint_due(self) -> bool:
        return self._wal_pages - self._checkpointed_pages >= SQLITE_WAL_PAGES
