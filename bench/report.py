"""What a benchmark found: the JSON object that every `bench` command writes, and its table.

Owns the shape of a result, the ratios between rows, and how both are shown. Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """The samples of one metric of one case. `vs`: its median over that of each named case."""

    case: str
    metric: str
    unit: str
    samples: tuple[float, ...]
    vs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"{self.case}, {self.metric}: no samples")

    @property
    def median(self) -> float:
        """Middle sample."""
        return median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        """The row as written to JSON."""
        return {
            "case": self.case, "metric": self.metric, "unit": self.unit,
            "median": self.median, "min": min(self.samples), "max": max(self.samples),
            "samples": list(self.samples), "vs": dict(self.vs),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that was promised, as this run computes it; the name says at least or at most."""

    name: str
    value: float
    target: float
    ok: bool


def at_least(name: str, value: float, target: float) -> Bar:
    """A bar to reach."""
    return Bar(f"{name}, at least", value, target, value >= target)


def at_most(name: str, value: float, target: float) -> Bar:
    """A bar not to exceed."""
    return Bar(f"{name}, at most", value, target, value <= target)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one benchmark."""

    bench: str
    commit: str
    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as written to JSON."""
        return {
            "bench": self.bench, "commit": self.commit, "machine": dict(self.machine),
            "config": dict(self.config), "rows": [row.as_dict() for row in self.rows],
            "bars": [asdict(bar) for bar in self.bars],
        }  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether every bar was reached."""
        return all(bar.ok for bar in self.bars)


def find_row(rows: Iterable[Row], case: str, metric: str) -> Row | None:
    """The row of a case's metric, None if it was not measured."""
    return next((row for row in rows if (row.case, row.metric) == (case, metric)), None)


def with_ratios(rows: Iterable[Row], references: Iterable[str]) -> tuple[Row, ...]:
    """The rows, each with its ratios to the same metric of the reference cases."""
    rows, references = tuple(rows), tuple(references)
    return tuple(replace(row, vs=_ratios(row, rows, references)) for row in rows)


def _ratios(row: Row, rows: tuple[Row, ...], references: tuple[str, ...]) -> dict[str, float]:
    found = {name: find_row(rows, name, row.metric) for name in references if name != row.case}
    return {
        # CPU time is counted in ticks, and may be none at all.
        name: row.median / other.median
        for name, other in found.items()
        if other is not None and other.median
    }


# --- output -----------------------------------------------------------------------------------


def write_json(result: Result, path: Path) -> None:
    """Write the result as one JSON object."""
    path.write_text(json.dumps(result.as_dict(), indent=2) + "\n")


def print_result(result: Result, console: Console, *, side_by_side: bool = False) -> None:
    """Show rows, ratios and bars; `side_by_side`: medians only, a column for each case."""
    table = _cases_table if side_by_side else _rows_table
    console.print(table(result.rows))
    if result.bars:
        console.print()
        console.print(_bars_table(result.bars))


def _rows_table(rows: tuple[Row, ...]) -> Table:
    references = list(dict.fromkeys(name for row in rows for name in row.vs))
    table = Table("case", "metric", box=None, padding=(0, 2, 0, 0))
    for title in ("median", "min", "max", *(f"/{name}" for name in references)):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        figures = (row.median, min(row.samples), max(row.samples))
        ratios = (f"{row.vs[name]:.2f}" if name in row.vs else "" for name in references)
        table.add_row(row.case, f"{row.metric}, {row.unit}", *map(_number, figures), *ratios)
    return table


def _cases_table(rows: tuple[Row, ...]) -> Table:
    cases = list(dict.fromkeys(row.case for row in rows))
    medians = {(row.metric, row.unit, row.case): row.median for row in rows}
    table = Table("metric", box=None, padding=(0, 2, 0, 0))
    for case in cases:
        table.add_column(case, justify="right")
    for metric, unit in dict.fromkeys((row.metric, row.unit) for row in rows):
        found = (medians.get((metric, unit, case)) for case in cases)
        figures = ("" if median is None else _number(median) for median in found)
        table.add_row(f"{metric}, {unit}", *figures)
    return table


def _bars_table(bars: tuple[Bar, ...]) -> Table:
    table = Table("bar", box=None, padding=(0, 2, 0, 0))
    for title in ("value", "target"):
        table.add_column(title, justify="right")
    table.add_column("")
    for bar in bars:
        verdict = "[green]ok[/]" if bar.ok else "[red]missed[/]"
        table.add_row(bar.name, _number(bar.value), _number(bar.target), verdict)
    return table


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
