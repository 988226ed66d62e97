"""From store URLs to chunk stores: the only place that knows the kinds."""

from __future__ import annotations

import os
from urllib.parse import unquote

from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.marker import StoreMarker
from tectonic_client.chunkstore.memory import MemoryChunks, MemoryStore
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.errors import BadURL, StoreMismatch
from tectonic_client.records import StoreRecord

_FILE = "file://"
_MEMORY = "memory://"

_memory_stores: dict[str, tuple[StoreMarker, MemoryChunks]] = {}
"""One per process and name, like the memory engine's databases."""


def normalise_store_url(url: str) -> str:
    """The form in which a store is recorded: an absolute path or memory://NAME. Raises BadURL."""
    if url.startswith(_MEMORY) and url != _MEMORY:
        return url
    path = unquote(url.removeprefix(_FILE), errors="surrogateescape")
    if url.startswith(_FILE) and path.startswith("/"):
        return os.path.abspath(path)
    if url and "://" not in url:
        return os.path.abspath(url)
    raise BadURL(
        f"store URL {url!r} is not a directory: a path, file:///PATH and memory://NAME are accepted"
    )


def check_store(url: str, *, force: bool = False) -> None:
    """Raise what `initialise_store` would raise before it changes anything."""
    if not url.startswith(_MEMORY):
        FlashStore.check(url, force=force)
    elif url in _memory_stores and not force:
        raise StoreMismatch(f"{url} is {_memory_stores[url][0]} already: --force removes it")


def initialise_store(url: str, volume_uuid: bytes, store_id: int, *, force: bool = False) -> None:
    """Prepare a store for a new volume; `force` destroys the one that is there.

    `url` is normalised. Raises StoreMismatch, ReadOnly, NoSpace, StoreUnavailable.
    """
    if not url.startswith(_MEMORY):
        FlashStore.initialise(url, volume_uuid, store_id, force=force)
        return
    check_store(url, force=force)
    _memory_stores[url] = StoreMarker(volume_uuid, store_id), MemoryChunks()


def open_store(record: StoreRecord, volume_uuid: bytes, *, read_only: bool = False) -> ChunkStore:
    """The store behind a record. Raises StoreMismatch, FormatTooNew, ReadOnly, StoreUnavailable."""
    if not record.url.startswith(_MEMORY):
        return FlashStore(
            record.url, volume_uuid=volume_uuid, store_id=record.store_id, read_only=read_only
        )
    expected = StoreMarker(volume_uuid, record.store_id)
    found, chunks = _memory_stores.get(record.url, (None, MemoryChunks()))
    if found != expected:
        raise StoreMismatch(f"{record.url} is {found or 'not there'}, expected {expected}")
    return MemoryStore(record.url, chunks, read_only=read_only)
