"""From store URLs to chunk stores: the only place that knows the kinds."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.memory import MemoryStore
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.errors import BadURL
from tectonic_client.records import StoreRecord

_memory_stores: dict[str, MemoryStore] = {}


def normalise_store_url(url: str) -> str:
    """The form in which a store is recorded: an absolute path or memory://NAME. Raises BadURL."""
    parts = urlsplit(url)
    if "://" not in url and url:
        return os.path.abspath(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return os.path.abspath(unquote(parts.path))
    if parts.scheme == "memory" and parts.netloc:
        return url
    raise BadURL(f"store URL {url!r} is not a directory (also file:///DIR, memory://NAME)")


def initialise_store(url: str, volume_uuid: bytes, store_id: int, *, force: bool = False) -> None:
    """Prepare a store for a new volume. Raises StoreMismatch, ReadOnly, NoSpace."""
    if url.startswith("memory://"):
        _memory_stores[url] = MemoryStore(url)
    else:
        FlashStore.initialise(url, volume_uuid, store_id, force=force)


def open_store(record: StoreRecord, volume_uuid: bytes, *, read_only: bool = False) -> ChunkStore:
    """The store behind a record. Raises StoreMismatch, ReadOnly, StoreUnavailable."""
    if record.url.startswith("memory://"):
        return _memory_stores.setdefault(record.url, MemoryStore(record.url))
    return FlashStore(
        record.url, volume_uuid=volume_uuid, store_id=record.store_id, read_only=read_only
    )
