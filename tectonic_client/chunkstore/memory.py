"""A chunk store in memory, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, StoreUsage
from tectonic_client.errors import ChunkMissing, Exists, NoSpace, ReadOnly
from tectonic_client.limits import GiB


@dataclass(slots=True)
class MemoryChunks:
    """What the stores opened on it share; full after `capacity_bytes`."""

    capacity_bytes: int = GiB
    used_bytes: int = 0
    chunks: dict[ChunkKey, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore:
    """See `port.ChunkStore`."""

    def __init__(
        self, name: str, data: MemoryChunks | None = None, *, read_only: bool = False
    ) -> None:
        self.name = name
        self._data = data or MemoryChunks()
        self._chunks = self._data.chunks
        self._read_only = read_only

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self._refuse_if_read_only()
        content = b"".join(parts)
        with self._data.lock:
            if key in self._chunks:
                raise Exists(f"store {self.name}, chunk {key} exists")
            if self._data.used_bytes + len(content) > self._data.capacity_bytes:
                raise NoSpace(f"store {self.name}, chunk {key}: the store is full")
            self._chunks[key] = content
            self._data.used_bytes += len(content)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        part = self._find(key)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def head(self, key: ChunkKey) -> int:
        return len(self._find(key))

    def _find(self, key: ChunkKey) -> bytes:
        with self._data.lock:
            content = self._chunks.get(key)
        if content is None:
            raise ChunkMissing(f"store {self.name}, chunk {key} is missing")
        return content

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        self._refuse_if_read_only()
        with self._data.lock:
            for key in keys:
                self._data.used_bytes -= len(self._chunks.pop(key, b""))

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        with self._data.lock:
            found = sorted(
                ChunkInfo(key, len(content))
                for key, content in self._chunks.items()
                if first_block_id <= key.block_id < end_block_id
            )
        return iter(found)

    def usage(self) -> StoreUsage:
        free_bytes = self._data.capacity_bytes - self._data.used_bytes
        return StoreUsage(self._data.capacity_bytes, free_bytes)

    def close(self) -> None:
        """Nothing is held that would need closing."""

    def _refuse_if_read_only(self) -> None:
        if self._read_only:
            raise ReadOnly(f"store {self.name} was opened read-only")
