"""From a metadata URL to an engine: the only place that knows which engines there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from tectonic_client.errors import BadURL, VolumeNotFound
from tectonic_client.kv.memory import MemoryData, MemoryKV
from tectonic_client.kv.port import KV
from tectonic_client.kv.sqlite import SqliteKV
from tectonic_client.kv.urls import display_url
from tectonic_client.limits import METADATA_DEADLINE_S

__all__ = ["display_url", "open_kv"]

_FORMS: Final = "a path, sqlite:///PATH, postgresql://USER@HOST/DATABASE or memory://NAME"

_memories: Final[dict[str, MemoryData]] = {}
"""Named memory engines live as long as the process, so that a test can reopen them."""

_memories_lock: Final = threading.Lock()


def open_kv(
    url: str, *, create: bool = False, read_only: bool = False,
    deadline_s: float = METADATA_DEADLINE_S,
) -> KV:  # fmt: skip
    """The engine that `url` names; `deadline_s` bounds each of its transactions, in seconds.

    Forms: a path; `sqlite:///path` (always absolute); `postgresql://` or `postgres://` as libpq
    takes it, plus `schema=NAME` (default tectonicfs); `memory://NAME`, one per process and name.

    Raises BadURL, VolumeNotFound (nothing there and not `create`), and what the engine raises.
    """
    scheme, separator, _ = url.partition("://")
    engine = _ENGINES.get(scheme) if separator else _open_path
    if engine is None or not url:
        raise BadURL(f"metadata URL {display_url(url)!r}: give {_FORMS}")
    return engine(url, _Settings(create, read_only, deadline_s))


class _Settings(NamedTuple):
    create: bool
    read_only: bool
    deadline_s: float


def _open_path(path: str, settings: _Settings) -> KV:
    return SqliteKV(path, **settings._asdict())


def _open_sqlite(url: str, settings: _Settings) -> KV:
    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        raise BadURL(f"metadata URL {url!r}: give sqlite:///PATH with an absolute path")
    return _open_path("/" + unquote(parts.path).lstrip("/"), settings)


def _open_memory(url: str, settings: _Settings) -> KV:
    with _memories_lock:
        if settings.create and url not in _memories:
            _memories[url] = MemoryData()
        data = _memories.get(url)
    if data is None:
        raise VolumeNotFound(f"no volume at {url}")
    return MemoryKV(data, read_only=settings.read_only)


def _open_postgresql(url: str, settings: _Settings) -> KV:
    # Loading libpq takes longer than opening an embedded volume; only those who use it wait.
    from tectonic_client.kv.postgresql import PostgresKV

    return PostgresKV(url, **settings._asdict())


_ENGINES: Final[dict[str, Callable[[str, _Settings], KV]]] = {
    "sqlite": _open_sqlite,
    "memory": _open_memory,
    "postgresql": _open_postgresql,
    "postgres": _open_postgresql,
}
