"""The stores of an open volume, and the few threads that wait for them.

Each store has slots of its own, for reads and for writes, so that one which hangs holds up only
those who need it, and those only until the deadline (`blocks.calls`). Readers take their slot
first, then memory: what is free is never held by one that only waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeVar

import trio

from tectonic_client.blocks.calls import Lane, Slot
from tectonic_client.chunkstore.port import ChunkStore, StoreUsage
from tectonic_client.errors import StoreUnavailable
from tectonic_client.limits import STORE_DEADLINE_S, STORE_READ_THREADS, STORE_WRITE_THREADS
from tectonic_client.metrics import Measured

_log = logging.getLogger(__name__)

T = TypeVar("T")


def _nobody_listens(block_id: int) -> None:
    """For stores whose leftovers somebody else looks for."""


class LaneLoad(NamedTuple):
    """Calls at a moment: `queued` wait for a slot, `lost` got no answer in time; and all waits for
    slots so far."""

    running: int
    queued: int
    lost: int
    queue_waits: Measured


class StoreLoad(NamedTuple):
    """How busy a store is."""

    name: str
    reads: LaneLoad
    writes: LaneLoad


def _load_of(lane: Lane) -> LaneLoad:
    return LaneLoad(lane.running, lane.queued, lane.lost, lane.queue_waits.measured())


class StoreSet:
    """Store id -> store. Used from the event loop only.

    A call that gets no answer for `deadline_s` (seconds) fails. `on_debris` is told of blocks of
    which a store may keep chunks because such a call was to put or delete them.
    """

    def __init__(
        self, stores: Mapping[int, ChunkStore], *, deadline_s: float = STORE_DEADLINE_S,
        on_debris: Callable[[int], None] = _nobody_listens,
    ) -> None:  # fmt: skip
        self._stores = dict(stores)
        self._writers = {
            store_id: Lane(store, STORE_WRITE_THREADS, deadline_s, on_debris)
            for store_id, store in self._stores.items()
        }
        self._readers = {
            store_id: Lane(store, STORE_READ_THREADS, deadline_s, on_debris)
            for store_id, store in self._stores.items()
        }

    def ids(self) -> list[int]:
        """Ids of the stores that are open."""
        return sorted(self._stores)

    def load(self) -> dict[int, StoreLoad]:
        """How busy each store is at this moment."""
        return {
            store_id: StoreLoad(
                store.name, _load_of(self._readers[store_id]), _load_of(self._writers[store_id])
            )
            for store_id, store in self._stores.items()
        }

    def unanswered(self, longer_than_s: float) -> str:
        """Which store has owed an answer to a put or delete for longest, if for this long; else
        empty."""
        lanes = [(lane.waited_s, lane.store.name) for lane in self._writers.values()]
        waited_s, name = max(lanes, default=(0.0, ""))
        if waited_s < longer_than_s:
            return ""
        return f"store {name} has not answered for {waited_s:.1f} s"

    def get(self, store_id: int) -> ChunkStore:
        """The store. Raises StoreUnavailable where the volume has none of this id open."""
        store = self._stores.get(store_id)
        if store is None:
            raise StoreUnavailable(f"store {store_id} is not open")
        return store

    def writing(self, store_id: int) -> AbstractAsyncContextManager[Slot]:
        """One of the store's slots for puts and deletes. Raises StoreUnavailable."""
        self.get(store_id)
        return self._writers[store_id].slot()

    def reading(self, store_id: int) -> AbstractAsyncContextManager[Slot]:
        """One of the store's slots for gets. Raises StoreUnavailable."""
        self.get(store_id)
        return self._readers[store_id].slot()

    async def run(self, store_id: int, work: Callable[[ChunkStore], T]) -> T:
        """Result of `work(store)` in a thread, in a slot for puts and deletes."""
        async with self.writing(store_id) as slot:
            return await slot.call(work)

    async def usage(self) -> StoreUsage:
        """Space of all stores together; that of a device counts once. Raises StoreUnavailable."""
        found = []
        for store_id in self.ids():
            async with self.reading(store_id) as slot:
                found.append(await slot.call(lambda store: store.usage()))
        shared = {usage.device: usage for usage in found if usage.device is not None}
        counted = [*shared.values(), *(usage for usage in found if usage.device is None)]
        return StoreUsage(sum(u.total_bytes for u in counted), sum(u.free_bytes for u in counted))

    async def close(self) -> None:
        """Close all stores, but for those that threads still wait for."""
        for store_id, store in self._stores.items():
            lost = self._writers[store_id].lost + self._readers[store_id].lost
            if lost:
                _log.error("store %s is left with %d calls that never ended", store.name, lost)
            else:
                await trio.to_thread.run_sync(store.close)
        self._stores.clear()
