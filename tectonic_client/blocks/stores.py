"""The stores of an open volume, and the few threads that wait for them.

Each store has slots of its own, so that one which hangs holds up only those who need it. Readers
take their slot first, then memory: what is free is never held by one that only waits.

A call in a thread is not given up when its task is cancelled, because the thread may be using a
buffer that the task would give back. It ends by the store's own deadline: below a directory
that is the request timeout of the device.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
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
        self._writers = {i: trio.CapacityLimiter(STORE_WRITE_THREADS) for i in self._stores}
        self._readers = {i: trio.CapacityLimiter(STORE_READ_THREADS) for i in self._stores}
        # The slots bound the threads already.
        self._threads = trio.CapacityLimiter(math.inf)

    def ids(self) -> list[int]:
        """Ids of the stores that are open."""
        return sorted(self._stores)

    def get(self, store_id: int) -> ChunkStore:
        """The store. Raises StoreUnavailable where the volume has none of this id open."""
        store = self._stores.get(store_id)
        if store is None:
            raise StoreUnavailable(f"store {store_id} is not open")
        return store

    @asynccontextmanager
    async def writing(self, store_id: int) -> AsyncIterator[ChunkStore]:
        """The store, with one of its slots for puts and deletes. Raises StoreUnavailable."""
        store = self.get(store_id)
        async with self._writers[store_id]:
            yield store

    @asynccontextmanager
    async def reading(self, store_id: int) -> AsyncIterator[ChunkStore]:
        """The store, with one of its slots for gets. Raises StoreUnavailable."""
        store = self.get(store_id)
        async with self._readers[store_id]:
            yield store

    async def call(self, work: Callable[[], T]) -> T:
        """Result of `work` in a thread, waited for whatever happens. The caller holds a slot."""
        return await trio.to_thread.run_sync(work, limiter=self._threads)

    async def run(self, store_id: int, work: Callable[[ChunkStore], T]) -> T:
        """Result of `work(store)` in a thread, in a slot for puts and deletes."""
        async with self.writing(store_id) as store:
            return await self.call(partial(work, store))

    async def usage(self) -> StoreUsage:
        """Space of all stores together. Raises StoreUnavailable."""
        found = []
        for store_id in self.ids():
            async with self.reading(store_id) as store:
                found.append(await self.call(store.usage))
        return StoreUsage(sum(u.total_bytes for u in found), sum(u.free_bytes for u in found))

    async def close(self) -> None:
        """Close all stores."""
        for store in self._stores.values():
            await self.call(store.close)
        self._stores.clear()
