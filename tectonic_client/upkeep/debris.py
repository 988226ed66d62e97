"""Remembers under which leases a store may hold chunks that nothing will ever name.

A put that failed may have left a torn chunk; a delete that failed left whole ones; a block whose
publishing got no answer may or may not be named. The next cleaner finds all of these by the lease's
record, so a session that ends in order must leave the records of such leases behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, ChunkStore, StoreUsage
from tectonic_client.errors import TectonicError
from tectonic_client.limits import IDS_PER_LEASE


class Debris:
    """Of one session. `note` may be called by any thread."""

    def __init__(self) -> None:
        self._leases: set[int] = set()

    def note(self, block_id: int) -> None:
        """Some store may keep chunks of this block."""
        self._leases.add(block_id // IDS_PER_LEASE)

    def note_leases(self, leases: Iterable[int]) -> None:
        """Anything may lie under these."""
        self._leases.update(leases)

    def clean_leases(self, leases: Iterable[int]) -> list[int]:
        """Those of the leases of which everything is accounted for."""
        return [lease for lease in leases if lease not in self._leases]

    def watch(self, store: ChunkStore) -> ChunkStore:
        """The same store, whose failures are noted."""
        return _WatchedStore(store, self)


class _WatchedStore:
    """Passes everything on."""

    def __init__(self, inner: ChunkStore, debris: Debris) -> None:
        self._inner = inner
        self._debris = debris
        self.name = inner.name

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        try:
            self._inner.put(key, parts)
        except TectonicError:
            self._debris.note(key.block_id)
            raise

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        return self._inner.get_into(key, offset, target)

    def head(self, key: ChunkKey) -> int:
        return self._inner.head(key)

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        doomed = tuple(keys)
        try:
            self._inner.delete(doomed)
        except TectonicError:
            for key in doomed:
                self._debris.note(key.block_id)
            raise

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        return self._inner.list(first_block_id, end_block_id)

    def usage(self) -> StoreUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()
