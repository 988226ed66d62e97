"""How `tectonicfs stats` shows what a mount tells: tables for people, from one look or from two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tectonic_client.cli.parameters import format_size
from tectonic_client.metrics import Measured

Stats = Mapping[str, Any]

_COLUMNS: Final = ("calls", "/s", "MB/s", "p50", "p99", "max", "errors")


def view(stats: Stats, earlier: Stats | None) -> RenderableType:
    """One mount. Rates and percentiles are those since `earlier`, or since the mount."""
    parts: list[RenderableType] = [Text(_headline(stats), style="bold")]
    parts += [Text(line) for line in _lines(stats)]
    parts += [Text(), _operations(stats, earlier), Text(), _below(stats, earlier)]
    if stats["under_way"]:
        parts += [Text(), _under_way(stats)]
    return Group(*parts)


def _headline(stats: Stats) -> str:
    session, beat = stats["session"]["id"], stats["session"]["heartbeat_age_s"]
    lives = "" if beat is None else f", heartbeat {beat:.0f} s ago"
    return (
        f"{stats['volume']} on {stats['directory']}: pid {stats['pid']},"
        f" up {_duration(stats['uptime_s'])}, session {session}{lives}"
    )


def _lines(stats: Stats) -> Iterator[str]:
    memory, cache, files, opens = (stats[k] for k in ("memory", "cache", "files", "opens"))
    yield (
        f"memory  {format_size(memory['used_bytes'])} of {format_size(memory['pool_bytes'])}"
        f" buffers, peak {format_size(memory['peak_bytes'])}, {memory['waiting']} waiting,"
        f" {memory['waits']['calls']} waits so far"
    )
    yield (
        f"cache   {_share(cache['hits'], cache['misses'])} hits of {cache['chunks']} chunks,"
        f" {cache['prefetches']} read ahead; pages kept at"
        f" {_share(opens['pages_kept'], opens['pages_dropped'])} of opens;"
        f" read amplification {_amplification(stats)}"
    )
    yield (
        f"files   {files['open']} open, {files['dirty']} with"
        f" {format_size(files['dirty_bytes'])} to be flushed;"
        f" metadata retries {stats['metadata']['retries']}; log level {stats['log_level']}"
    )


def _share(yes: int, no: int) -> str:
    return f"{yes / (yes + no):.0%}" if yes + no else "-"


def _amplification(stats: Stats) -> str:
    """Bytes that came from the stores for each byte that programs got from this mount."""
    got = stats["operations"].get("read", {}).get("transferred_bytes", 0)
    fetched = sum(
        store["get_into"]["transferred_bytes"]
        for store in stats["stores"].values()
        if "get_into" in store
    )
    return f"{fetched / got:.2f}" if got else "-"


# --- tables -----------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _operations(stats: Stats, earlier: Stats | None) -> Table:
    table = _table("requests", *_COLUMNS)
    before = earlier["operations"] if earlier else {}
    for name, fields in stats["operations"].items():
        cells = _cells(fields, before.get(name), _interval_s(stats, earlier))
        errors = stats["errors"].get(name, {})
        cells[-1] = ", ".join(f"{count} {number}" for number, count in errors.items())
        table.add_row(name, *cells)
    return table


def _below(stats: Stats, earlier: Stats | None) -> Table:
    table = _table("waited for", *_COLUMNS, "running", "queued")
    interval_s = _interval_s(stats, earlier)
    for kind in ("read", "transaction"):
        before = earlier["metadata"].get(kind) if earlier else None
        table.add_row(f"metadata {kind}", *_cells(stats["metadata"][kind], before, interval_s))
    for store_id, store in stats["stores"].items():
        seen = earlier["stores"].get(store_id, {}) if earlier else {}
        for operation, kind in (("get_into", "reads"), ("put", "writes"), ("delete", "writes")):
            if operation in store:
                cells = _cells(store[operation], seen.get(operation), interval_s)
                load = store[kind]
                lost = f" ({load['lost']} lost)" if load["lost"] else ""
                name = f"{store['name']} {operation.removesuffix('_into')}"
                table.add_row(name, *cells, f"{load['running']}{lost}", str(load["queued"]))
    return table


def _under_way(stats: Stats) -> Table:
    table = _table("under way", "s", "inode", "offset", "size", "waiting for", "store")
    for row in stats["under_way"]:
        table.add_row(
            row["operation"], f"{row['seconds']:.3f}", str(row["inode"]), str(row["offset"]),
            str(row["size"]), ", ".join(row["waiting_for"]) or "-", row["store"] or "",
        )  # fmt: skip
    return table


def _interval_s(stats: Stats, earlier: Stats | None) -> float:
    since = earlier["uptime_s"] if earlier else 0.0
    return max(float(stats["uptime_s"] - since), 1e-3)


def _cells(fields: Stats, before: Stats | None, interval_s: float) -> list[str]:
    measured = Measured.from_json(fields)
    recent = measured.since(Measured.from_json(before)) if before else measured
    times = [_time(recent.quantile_s(share)) for share in (0.5, 0.99)]
    return [
        str(measured.calls),
        f"{recent.calls / interval_s:.0f}",
        f"{recent.transferred_bytes / interval_s / 1e6:.1f}",
        *(times if recent.calls else ["-", "-"]),
        _time(measured.max_ns / 1e9),
        str(measured.errors or ""),
    ]


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
