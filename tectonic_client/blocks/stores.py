"""The stores of an open volume, and the few threads that wait for them.

Every call runs in a worker thread and is not given up when its task is cancelled: the thread may be
using a buffer that the task would give back. It ends with the device; a store that hangs the thread
holds up only those who need that store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import trio

from tectonic_client.chunkstore.port import ChunkStore, StoreUsage
from tectonic_client.errors import StoreUnavailable
from tectonic_client.limits import STORE_READ_THREADS, STORE_WRITE_THREADS

T = TypeVar("T")


class StoreSet:
    """Store id -> store. Used from the event loop only."""

    def __init__(self, stores: Mapping[int, ChunkStore]) -> None:
        self._stores = dict(stores)
        self._writers = trio.CapacityLimiter(STORE_WRITE_THREADS)
        self._readers = trio.CapacityLimiter(STORE_READ_THREADS)

    def ids(self) -> list[int]:
        """Ids of the stores that are open."""
        return sorted(self._stores)

    def get(self, store_id: int) -> ChunkStore:
        """The store. Raises StoreUnavailable where the volume has none of this id open."""
        store = self._stores.get(store_id)
        if store is None:
            raise StoreUnavailable(f"store {store_id} is not open")
        return store

    async def write(self, work: Callable[[], T]) -> T:
        """Result of `work` in one of the writing threads."""
        return await trio.to_thread.run_sync(work, limiter=self._writers)

    async def read(self, work: Callable[[], T]) -> T:
        """Result of `work` in one of the reading threads."""
        return await trio.to_thread.run_sync(work, limiter=self._readers)

    async def run(self, store_id: int, work: Callable[[ChunkStore], T]) -> T:
        """Result of `work(store)` in one of the writing threads."""
        return await self.write(partial(work, self.get(store_id)))

    async def usage(self) -> StoreUsage:
        """Space of all stores together."""
        found = [await self.run(store_id, lambda store: store.usage()) for store_id in self.ids()]
        return StoreUsage(sum(u.total_bytes for u in found), sum(u.free_bytes for u in found))

    async def close(self) -> None:
        """Close all stores."""
        for store in self._stores.values():
            await self.write(store.close)
        self._stores.clear()
