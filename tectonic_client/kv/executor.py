"""A metadata engine for trio: nothing here makes the event loop wait for a disk or a network.

Owns where calls run. Reads of engines that never wait run inline; others in threads. Writes go to
the engine's own queue where it has one (`submit`), so that a waiting transaction costs no thread
and one commit serves many; else into threads. A brief one runs inline too where that engine is free
at this moment: two changes of threads take five times as long as the transaction itself. A look
at what else is ready (a trio checkpoint polls all descriptors) takes as long as a read: calls that
run inline let other tasks run once in INLINE_TURN_S, not each time.

A transaction that has been handed to the engine is not given up when its task is cancelled: the
call returns its outcome, and the cancellation arrives at the task's next checkpoint. The engine's
deadline bounds how long that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import trio

from tectonic_client.activity import METADATA, Waiting
from tectonic_client.errors import MetadataUnavailable, UnknownOutcome
from tectonic_client.kv.listening import AsyncListener
from tectonic_client.kv.port import KV, ReadTransaction, Transaction
from tectonic_client.limits import (
    INLINE_TURN_S,
    METADATA_DEADLINE_S,
    METADATA_READ_THREADS,
    METADATA_WRITE_THREADS,
)
from tectonic_client.metrics import Meter

T = TypeVar("T")


@runtime_checkable
class SubmittingKV(KV, Protocol):
    """An engine that queues transactions itself."""

    def submit(
        self, fn: Callable[[Transaction], T], *, durable: bool = False, brief: bool = False
    ) -> Future[T]:
        """As `transact`, without waiting; cancelling the future takes back what has not begun.

        A `brief` one may be done on return, if nothing had to be waited for.
        """


class AsyncKV:
    """`kv` for the tasks of one trio loop; `deadline_s` as the engine's own."""

    def __init__(self, kv: KV, *, deadline_s: float = METADATA_DEADLINE_S) -> None:
        self._kv = kv
        # Looked up once: isinstance() of a protocol costs as much as a read.
        self._queue = kv if isinstance(kv, SubmittingKV) else None
        self._deadline_s = deadline_s
        # Apart from each other, so that writers that wait for a lock leave room to read.
        self._read_threads = trio.CapacityLimiter(METADATA_READ_THREADS)
        self._write_threads = trio.CapacityLimiter(METADATA_WRITE_THREADS)
        self.reads = Meter()
        self.transactions = Meter()
        """With their waiting for threads, locks and each other."""
        self._turn_ended = time.monotonic()
        """When inline calls last let other tasks run."""
        self.retries = 0
        """Times that a transaction's function was run again, because what it had done was lost."""

    @property
    def sync(self) -> KV:
        """The engine itself, for threads."""
        return self._kv

    async def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        """As `KV.read`."""
        if self._kv.reads_may_block:
            with Waiting(METADATA, self.reads):
                return await trio.to_thread.run_sync(self._kv.read, fn, limiter=self._read_threads)
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._give_way()
        with Waiting(METADATA, self.reads):
            return self._kv.read(fn)

    async def transact(
        self, fn: Callable[[Transaction], T], *, durable: bool = False, brief: bool = False
    ) -> T:
        """As `KV.transact`. A cancelled call either did nothing or returns the outcome.

        `brief` says that `fn` touches a handful of rows: the event loop may run it itself.
        """
        runs = 0

        def counted(tx: Transaction) -> T:
            nonlocal runs
            runs += 1
            return fn(tx)

        with Waiting(METADATA, self.transactions):
            try:
                return await self._transact(counted, durable=durable, brief=brief)
            finally:
                self.retries += max(runs - 1, 0)

    async def _transact(self, fn: Callable[[Transaction], T], *, durable: bool, brief: bool) -> T:
        if self._queue is None:
            call = partial(self._kv.transact, fn, durable=durable)
            return await trio.to_thread.run_sync(call, limiter=self._write_threads)
        await trio.lowlevel.checkpoint_if_cancelled()
        future = self._queue.submit(fn, durable=durable, brief=brief)
        if future.done():
            await self._give_way()
        else:
            with trio.CancelScope(shield=True):
                await self._settle(future)
        return future.result()

    async def _give_way(self) -> None:
        """Let other tasks run if inline calls have had the loop for long enough."""
        if time.monotonic() - self._turn_ended >= INLINE_TURN_S:
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._turn_ended = time.monotonic()

    def listen(self, topic: str) -> AsyncListener:
        """Hear calls to `topic`; the first `wait` begins it."""
        return AsyncListener(self._kv, topic)

    async def call(self, topic: str) -> None:
        """As `KV.call`. Raises MetadataUnavailable."""
        if self._kv.reads_may_block:
            await trio.to_thread.run_sync(self._kv.call, topic, limiter=self._write_threads)
        else:
            self._kv.call(topic)

    async def _settle(self, future: Future[T]) -> None:
        """Wait until `future` is done. Raises MetadataUnavailable, UnknownOutcome if it is not."""
        settled = trio.Event()
        token = trio.lowlevel.current_trio_token()
        future.add_done_callback(lambda _: token.run_sync_soon(settled.set))
        with trio.move_on_after(self._deadline_s):
            await settled.wait()
            return
        if future.cancel():
            raise MetadataUnavailable(
                f"metadata transaction did not begin in {self._deadline_s:.0f} s"
            )
        with trio.move_on_after(self._deadline_s):
            await settled.wait()
            return
        raise UnknownOutcome(f"metadata commit got no answer in {2 * self._deadline_s:.0f} s")
