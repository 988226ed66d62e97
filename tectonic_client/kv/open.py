"""From a metadata URL to an engine: the only place that knows which engines there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote, urlsplit

from tectonic_client.errors import BadURL, VolumeNotFound
from tectonic_client.kv.memory import MemoryData, MemoryKV
from tectonic_client.kv.port import KV
from tectonic_client.kv.sqlite import SqliteKV
from tectonic_client.kv.urls import display_url

__all__ = ["display_url", "open_kv"]

_FORMS: Final = "a path, sqlite:///PATH, postgresql://USER@HOST/DATABASE or memory://NAME"

_memories: Final[dict[str, MemoryData]] = {}
"""Named memory engines live as long as the process, so that a test can reopen them."""

_memories_lock: Final = threading.Lock()


def open_kv(url: str, *, create: bool = False, read_only: bool = False) -> KV:
    """The engine that `url` names.

    Forms: a path; `sqlite:///path` (always absolute); `postgresql://` or `postgres://` as libpq
    takes it, plus `schema=NAME` (default tectonicfs); `memory://NAME`, one per process and name.

    Raises BadURL, VolumeNotFound (nothing there and not `create`), and what the engine raises.
    """
    scheme, separator, _ = url.partition("://")
    engine = _ENGINES.get(scheme) if separator else _open_path
    if engine is None or not url:
        raise BadURL(f"metadata URL {display_url(url)!r}: give {_FORMS}")
    return engine(url, create, read_only)


def _open_path(path: str, create: bool, read_only: bool) -> KV:
    return SqliteKV(path, create=create, read_only=read_only)


def _open_sqlite(url: str, create: bool, read_only: bool) -> KV:
    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        raise BadURL(f"metadata URL {url!r}: give sqlite:///PATH with an absolute path")
    return _open_path("/" + unquote(parts.path).lstrip("/"), create, read_only)


def _open_memory(url: str, create: bool, read_only: bool) -> KV:
    with _memories_lock:
        if create and url not in _memories:
            _memories[url] = MemoryData()
        data = _memories.get(url)
    if data is None:
        raise VolumeNotFound(f"no volume at {url}")
    return MemoryKV(data, read_only=read_only)


def _open_postgresql(url: str, create: bool, read_only: bool) -> KV:
    # Loading libpq takes longer than opening an embedded volume; only those who use it wait.
    from tectonic_client.kv.postgresql import PostgresKV

    return PostgresKV(url, create=create, read_only=read_only)


_ENGINES: Final[dict[str, Callable[[str, bool, bool], KV]]] = {
    "sqlite": _open_sqlite,
    "memory": _open_memory,
    "postgresql": _open_postgresql,
    "postgres": _open_postgresql,
}
