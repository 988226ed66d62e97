"""Calls of a store in threads, which are given up where the store does not answer.

A thread that waits for a device cannot be stopped. Where one operation of a store takes longer than
the deadline, its call is *lost*: the caller gets StoreUnavailable, and the thread keeps its slot
and the buffers that were lent to it until it comes back, because it may still read or write them.
Coming back it ends at once, and deletes the chunk that it put: nothing will ever name that.

Only waiting for the store counts. Between two operations (checksums, compression, copies from and
to the caller's memory) a call cannot be lost, so it never touches the caller's memory afterwards.

While a call is lost its lane (the reads, or the writes, of a store) is silent: calls fail at once,
but for one every STORE_PROBE_INTERVAL_S that finds out whether the store is well again. So at most
the lane's slots are lost, and a store that hangs costs its callers one deadline, not one each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from tectonic_client.activity import STORE, Waiting
from tectonic_client.blocks.buffers import Buffer
from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, ChunkStore, StoreUsage
from tectonic_client.errors import StoreUnavailable
from tectonic_client.limits import STORE_PROBE_INTERVAL_S
from tectonic_client.metrics import Meter

if TYPE_CHECKING:
    from outcome import Outcome

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Wait:
    """A thread's waiting for its store: in which operation it is, and since when.

    A context manager around each operation, for the thread. It raises StoreUnavailable where the
    call was lost, when the thread comes back and before it begins anything else.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._since: float | None = None
        self.lost = False
        self.block_ids: Sequence[int] = ()
        """Blocks of which the operation at hand changes what the store keeps."""

    def __enter__(self) -> None:
        self._refuse_lost()
        with self._lock:
            self._since = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._since = None
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self.lost:
            raise StoreUnavailable(f"store {self._name} answered too late")

    def waited_s(self) -> float:
        """For how long the operation at hand has been waited for."""
        with self._lock:
            return 0.0 if self._since is None else time.monotonic() - self._since

    def left_s(self, deadline_s: float) -> float:
        """Seconds that the operation at hand has left; at 0 the call is lost from now on."""
        with self._lock:
            if self._since is None:
                return deadline_s
            left = self._since + deadline_s - time.monotonic()
            self.lost = left <= 0
            return max(left, 0.0)


class _AwaitedStore:
    """The store as one call sees it."""

    def __init__(self, inner: ChunkStore, wait: _Wait) -> None:
        self._inner = inner
        self._wait = wait
        self.name = inner.name

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self._wait.block_ids = (key.block_id,)
        stored = False
        try:
            with self._wait:
                self._inner.put(key, parts)
                stored = True
        except StoreUnavailable:
            if stored:
                self._inner.delete((key,))
            raise

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        with self._wait:
            return self._inner.get_into(key, offset, target)

    def head(self, key: ChunkKey) -> int:
        with self._wait:
            return self._inner.head(key)

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        doomed = tuple(keys)
        self._wait.block_ids = [key.block_id for key in doomed]
        with self._wait:
            self._inner.delete(doomed)

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        with self._wait:
            rows = iter(self._inner.list(first_block_id, end_block_id))
        while True:
            with self._wait:
                row = next(rows, None)
            if row is None:
                return
            yield row

    def usage(self) -> StoreUsage:
        with self._wait:
            return self._inner.usage()

    def close(self) -> None:
        self._inner.close()


class Slot:
    """The right to make one call after the other to the store of a lane."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.lost = False
        """Whether a call in it was lost: the slot is free again when its thread comes back."""

    async def call(self, work: Callable[[ChunkStore], T], lent: Sequence[Buffer] = ()) -> T:
        """Result of `work(store)` in a thread, which may use the memory of `lent`.

        Not given up when its task is cancelled, because the caller would take its memory back.
        Raises StoreUnavailable where the store does not answer by the deadline.
        """
        call: _Call[T] = _Call(self._lane, self, lent)
        return await call.run(work)


class _Call(Generic[T]):
    """One call that is under way. Belongs to the event loop, but for `_deliver`."""

    def __init__(self, lane: Lane, slot: Slot, lent: Sequence[Buffer]) -> None:
        self._lane = lane
        self._lent = lent
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._outcome: Outcome[T] | None = None
        self.slot = slot
        self.wait = _Wait(lane.store.name)

    async def run(self, work: Callable[[ChunkStore], T]) -> T:
        for buffer in self._lent:
            buffer.lend()
        store = _AwaitedStore(self._lane.store, self.wait)
        trio.lowlevel.start_thread_soon(partial(work, store), self._deliver)
        with Waiting(STORE, store=self._lane.store.name), self._lane.noted(self):
            await self._wait()
        if self._outcome is None:
            raise self._lane.lose(self)
        return self._outcome.unwrap()

    async def _wait(self) -> None:
        left_s = self._lane.deadline_s
        while self._outcome is None and left_s > 0:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + left_s):
                await self._ended.wait()
            left_s = self.wait.left_s(self._lane.deadline_s)

    def _deliver(self, outcome: Outcome[T]) -> None:
        """In the thread, at its end."""
        for buffer in self._lent:
            buffer.take_back()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._end, outcome)

    def _end(self, outcome: Outcome[T]) -> None:
        self._outcome = outcome
        self._ended.set()
        self._lane.came_back(self)


class Lane:
    """Calls of one kind to one store: at most `slots` at once. Used from the event loop only.

    `on_debris` is told of blocks of which the store may keep chunks after a call was lost.
    """

    def __init__(
        self, store: ChunkStore, slots: int, deadline_s: float, on_debris: Callable[[int], None]
    ) -> None:
        self.store = store
        self.deadline_s = deadline_s
        self._on_debris = on_debris
        self._slots = trio.CapacityLimiter(slots)
        self.queue_waits = Meter()
        """Of callers that had to wait for a slot."""
        self._queue: set[trio.CancelScope] = set()
        self._under_way: set[_Call[Any]] = set()
        self._lost: set[_Call[Any]] = set()
        self._silent_since: float | None = None
        self._probe_at = 0.0

    @property
    def lost(self) -> int:
        """Threads that have not come back from the store."""
        return len(self._lost)

    @property
    def running(self) -> int:
        """Slots that are taken, those of lost calls too."""
        return self._slots.borrowed_tokens

    @property
    def queued(self) -> int:
        """Callers that wait in line for a slot."""
        return len(self._queue)

    @property
    def waited_s(self) -> float:
        """For how long the store has owed an answer, to the call that waits longest."""
        return max((call.wait.waited_s() for call in self._under_way), default=0.0)

    @contextmanager
    def noted(self, call: _Call[Any]) -> Iterator[None]:
        """Meanwhile the call is under way."""
        self._under_way.add(call)
        try:
            yield
        finally:
            self._under_way.discard(call)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """A slot, waiting in line for it. Raises StoreUnavailable where the store is silent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._refuse_if_silent()
        slot = Slot(self)
        try:
            self._slots.acquire_on_behalf_of_nowait(slot)
        except trio.WouldBlock:
            await self._wait_in_line(slot)
        try:
            yield slot
        finally:
            if not slot.lost:
                self._slots.release_on_behalf_of(slot)

    async def _wait_in_line(self, slot: Slot) -> None:
        with trio.CancelScope() as waiting:
            self._queue.add(waiting)
            try:
                with Waiting(STORE, self.queue_waits, self.store.name):
                    await self._slots.acquire_on_behalf_of(slot)
            finally:
                self._queue.discard(waiting)
        if waiting.cancelled_caught:
            raise self._silence()

    # --- stores that do not answer ------------------------------------------------------------

    def _refuse_if_silent(self) -> None:
        """Let one caller through now and then, to see whether the store answers again."""
        if self._silent_since is None:
            return
        now = trio.current_time()
        if now < self._probe_at or not self._slots.available_tokens:
            raise self._silence()
        self._probe_at = now + STORE_PROBE_INTERVAL_S

    def _silence(self) -> StoreUnavailable:
        since = self._silent_since
        waited_s = self.deadline_s + (0 if since is None else trio.current_time() - since)
        return StoreUnavailable(f"store {self.store.name} has not answered for {waited_s:.0f} s")

    def lose(self, call: _Call[Any]) -> StoreUnavailable:
        """The call got no answer by its deadline; returns what its caller is told."""
        call.slot.lost = True
        self._lost.add(call)
        for block_id in call.wait.block_ids:
            self._on_debris(block_id)
        now = trio.current_time()
        self._probe_at = now + STORE_PROBE_INTERVAL_S
        if self._silent_since is None:
            self._silent_since = now
            _log.error("%s: calls fail until it does", self._silence())
            for waiting in self._queue:
                waiting.cancel()
        return self._silence()

    def came_back(self, call: _Call[Any]) -> None:
        """The call's thread is back from the store, in time or not."""
        if call in self._lost:
            self._lost.discard(call)
            self._slots.release_on_behalf_of(call.slot)
        if self._silent_since is not None:
            self._silent_since = None
            _log.warning("store %s answers again", self.store.name)
