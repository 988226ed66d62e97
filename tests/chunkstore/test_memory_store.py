"""The store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tectonic_client.chunkstore.memory import MemoryChunks, MemoryStore
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.errors import NoSpace
from tests.contracts.chunkstore import (
    KEY,
    PAGE,
    ChunkStoreContract,
    OpenStore,
    closing,
    filled,
    list_all,
)


class TestMemoryStore(ChunkStoreContract):
    store_class = MemoryStore

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        data = MemoryChunks()
        yield from closing(lambda read_only: MemoryStore("m", data, read_only=read_only))


def test_full() -> None:
    """Beyond its capacity a store takes nothing, and takes it again after a delete."""
    store = MemoryStore("m", MemoryChunks(capacity_bytes=3 * PAGE))
    store.put(KEY, [filled(2 * PAGE)])
    other = ChunkKey(KEY.block_id, 9)
    with pytest.raises(NoSpace):
        store.put(other, [filled(2 * PAGE)])
    assert [info.key for info in list_all(store)] == [KEY]
    assert store.usage().free_bytes == PAGE
    store.delete([KEY])
    store.put(other, [filled(3 * PAGE)])
    assert store.usage().free_bytes == 0
