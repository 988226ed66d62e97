"""A chunk store in memory, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, StoreUsage
from tectonic_client.errors import ChunkMissing, Exists, NoSpace
from tectonic_client.limits import GiB


class MemoryStore:
    """See `port.ChunkStore`; full after `capacity_bytes`."""

    def __init__(self, name: str, capacity_bytes: int = GiB) -> None:
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._chunks: dict[ChunkKey, bytes] = {}
        self._used_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        data = b"".join(parts)
        with self._lock:
            if key in self._chunks:
                raise Exists(f"{self.name}: chunk {key} exists")
            if self._used_bytes + len(data) > self._capacity_bytes:
                raise NoSpace(f"{self.name} is full")
            self._chunks[key] = data
            self._used_bytes += len(data)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        data = self._find(key)[offset : offset + len(target)]
        target[: len(data)] = data
        return len(data)

    def head(self, key: ChunkKey) -> int:
        return len(self._find(key))

    def _find(self, key: ChunkKey) -> bytes:
        with self._lock:
            data = self._chunks.get(key)
        if data is None:
            raise ChunkMissing(f"{self.name}: chunk {key} is missing")
        return data

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._used_bytes -= len(self._chunks.pop(key, b""))

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        with self._lock:
            found = sorted(
                ChunkInfo(key, len(data))
                for key, data in self._chunks.items()
                if first_block_id <= key.block_id < end_block_id
            )
        return iter(found)

    def usage(self) -> StoreUsage:
        return StoreUsage(self._capacity_bytes, self._capacity_bytes - self._used_bytes)

    def close(self) -> None:
        """Nothing is held that would need closing."""
