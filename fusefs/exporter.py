"""Metrics of a mount for Prometheus, over HTTP: `-o metrics=ADDRESS:PORT`.

Names, units and buckets follow prometheus.io/docs/practices/naming. A scrape takes one look at the
stats on the event loop; the text is made in a thread. Few connections are served at once, each with
a deadline, and every request gets the metrics or an error and the end of its connection.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from tectonic_client.errors import MountError
from tectonic_client.limits import (
    MAX_SCRAPE_REQUEST_BYTES,
    MAX_SCRAPES,
    SCRAPE_TIMEOUT_S,
)
from tectonic_client.metrics import BUCKETS, Measured

_log = logging.getLogger(__name__)

Stats = Mapping[str, Any]

_EDGES: Final = range(4, 28, 2)
"""Exponents of the buckets that are exported: 16 microseconds to a minute, in steps of four."""


# --- from stats to metrics --------------------------------------------------------------------


def _histogram(
    name: str, about: str, labels: list[str], found: Iterable[tuple[list[str], Measured]]
) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, measured in found:
        counts = [*measured.buckets, *[0] * BUCKETS][:BUCKETS]
        edges = [(str(2**edge / 1e6), float(sum(counts[: edge + 1]))) for edge in _EDGES]
        buckets = [*edges, ("+Inf", float(measured.calls))]
        family.add_metric(values, buckets, sum_value=measured.total_ns / 1e9)
    return family


def _counter(
    name: str, about: str, labels: list[str], found: Iterable[tuple[list[str], float]]
) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for values, value in found:
        family.add_metric(values, value)
    return family


def _gauge(name: str, about: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(name, about)
    if value is not None:
        family.add_metric([], value)
    return family


def _meters(found: Mapping[str, Any]) -> list[tuple[list[str], Measured]]:
    return [([name], Measured.from_json(fields)) for name, fields in found.items()]


def metrics_of(stats: Stats) -> list[Metric]:
    """What `Inspection.stats` tells, as metric families."""
    about = {name: str(stats[name]) for name in ("volume", "directory", "version")}
    return [
        InfoMetricFamily("tectonicfs_mount", "The mount.", value=about),
        _gauge("tectonicfs_uptime_seconds", "Time since the mount.", stats["uptime_s"]),
        _gauge(
            "tectonicfs_heartbeat_age_seconds", "Time since the session last showed that it lives.",
            stats["session"]["heartbeat_age_s"],
        ),
        *_operations(stats), *_metadata(stats["metadata"]), *_stores(stats["stores"]),
        *_memory(stats["memory"]), *_caches(stats),
    ]  # fmt: skip


def _operations(stats: Stats) -> list[Metric]:
    meters = _meters(stats["operations"])
    errors = (
        ([operation, name], count)
        for operation, counts in stats["errors"].items()
        for name, count in counts.items()
    )
    oldest = max((row["seconds"] for row in stats["under_way"]), default=0.0)
    return [
        _histogram(
            "tectonicfs_operation_duration_seconds", "Requests of the kernel.", ["operation"],
            meters,
        ),
        _counter(
            "tectonicfs_operation_bytes", "Bytes read and written by programs.", ["operation"],
            ((values, m.transferred_bytes) for values, m in meters if m.transferred_bytes),
        ),
        _counter(
            "tectonicfs_operation_errors", "Requests that were answered with an errno.",
            ["operation", "errno"], errors,
        ),
        _gauge("tectonicfs_oldest_operation_seconds", "Age of the oldest request.", oldest),
    ]  # fmt: skip


def _metadata(found: Stats) -> list[Metric]:
    meters = _meters({"read": found["read"], "transaction": found["transaction"]})
    return [
        _histogram(
            "tectonicfs_metadata_duration_seconds", "Metadata transactions.", ["kind"], meters
        ),
        _counter(
            "tectonicfs_metadata_errors", "Metadata transactions that raised an error.", ["kind"],
            ((values, m.errors) for values, m in meters),
        ),
        _counter(
            "tectonicfs_metadata_retries", "Metadata transactions that were run again.", [],
            [([], found["retries"])],
        ),
    ]  # fmt: skip


def _stores(stores: Stats) -> list[Metric]:
    meters = [
        ([store_id, operation], Measured.from_json(fields))
        for store_id, store in stores.items()
        for operation, fields in store.items()
        if operation not in ("name", "reads", "writes")
    ]
    labels = ["store", "operation"]
    return [
        _histogram(
            "tectonicfs_store_duration_seconds", "Operations of a chunk store.", labels, meters
        ),
        _counter(
            "tectonicfs_store_bytes", "Bytes moved from and to a chunk store.", labels,
            ((values, m.transferred_bytes) for values, m in meters),
        ),
        _counter(
            "tectonicfs_store_errors", "Operations of a chunk store that failed.", labels,
            ((values, m.errors) for values, m in meters),
        ),
        *(_lanes(stores, state) for state in ("running", "queued", "lost")),
    ]  # fmt: skip


def _lanes(stores: Stats, state: str) -> Metric:
    meanings = {
        "running": "Calls to a chunk store under way.",
        "queued": "Calls that wait for their turn.",
        "lost": "Calls that were given up and have not come back.",
    }
    family = GaugeMetricFamily(
        f"tectonicfs_store_{state}", meanings[state], labels=["store", "kind"]
    )
    for store_id, store in stores.items():
        for kind in ("reads", "writes"):
            family.add_metric([store_id, kind], store[kind][state])
    return family


def _memory(memory: Stats) -> list[Metric]:
    waits = Measured.from_json(memory["waits"])
    return [
        _gauge("tectonicfs_memory_pool_bytes", "Size of the buffer pool.", memory["pool_bytes"]),
        _gauge("tectonicfs_memory_used_bytes", "Buffers in use.", memory["used_bytes"]),
        _gauge("tectonicfs_memory_waiting", "Callers that wait for memory.", memory["waiting"]),
        _histogram("tectonicfs_memory_wait_seconds", "Waits for memory.", [], [([], waits)]),
    ]


def _caches(stats: Stats) -> list[Metric]:
    cache, opens, files = stats["cache"], stats["opens"], stats["files"]
    return [
        _counter(
            "tectonicfs_cache_lookups", "Reads of chunks that are read as a whole.", ["outcome"],
            [(["hit"], cache["hits"]), (["miss"], cache["misses"])],
        ),
        _counter(
            "tectonicfs_opens", "Opens by what became of the kernel's pages.", ["pages"],
            [(["kept"], opens["pages_kept"]), (["dropped"], opens["pages_dropped"])],
        ),
        _gauge("tectonicfs_open_files", "Files that are open.", files["open"]),
        _gauge("tectonicfs_dirty_bytes", "Bytes written and not flushed.", files["dirty_bytes"]),
    ]  # fmt: skip


class _Snapshot(Collector):
    """One look, for the library's way of asking."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        return metrics_of(self._stats)


def exposition(stats: Stats) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


# --- serving ----------------------------------------------------------------------------------


@asynccontextmanager
async def exporting(
    host: str, port: int, stats: Callable[[], Stats]
) -> AsyncIterator[tuple[str, int]]:
    """Serve the metrics at this address meanwhile; gives the first address that is served.

    Raises MountError where the address cannot be had.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MountError(f"cannot serve metrics at {host} port {port}: {reason}") from error
    slots = trio.Semaphore(MAX_SCRAPES)

    async def answer(stream: trio.SocketStream) -> None:
        async with stream, slots:
            try:
                with trio.move_on_after(SCRAPE_TIMEOUT_S):
                    await _answer(stream, stats)
            except trio.BrokenResourceError as error:
                _log.debug("scrape: %s", error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        address = listeners[0].socket.getsockname()
        _log.info("metrics at http://%s:%d/metrics", *address[:2])
        try:
            yield address[:2]
        finally:
            nursery.cancel_scope.cancel()


async def _answer(stream: trio.SocketStream, stats: Callable[[], Stats]) -> None:
    """One request of HTTP/1.x (RFC 9112), whose headers do not matter."""
    request = bytearray()
    while b"\r\n\r\n" not in request and len(request) < MAX_SCRAPE_REQUEST_BYTES:
        data = await stream.receive_some(MAX_SCRAPE_REQUEST_BYTES)
        if not data:
            return
        request += data
    words = bytes(request).partition(b"\r\n")[0].split(b" ")
    if b"\r\n\r\n" not in request or len(words) != 3:
        await _reply(stream, "400 Bad Request", b"not a request\n")
    elif words[0] != b"GET":
        await _reply(stream, "405 Method Not Allowed", b"only GET\n")
    elif words[1].partition(b"?")[0] not in (b"/metrics", b"/"):
        await _reply(stream, "404 Not Found", b"see /metrics\n")
    else:
        body = await trio.to_thread.run_sync(exposition, stats())
        await _reply(stream, "200 OK", body, CONTENT_TYPE_LATEST)


async def _reply(
    stream: trio.SocketStream, status: str, body: bytes, content_type: str = "text/plain"
) -> None:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    await stream.send_all(head.encode() + body)
