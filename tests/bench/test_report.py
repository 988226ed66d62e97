"""The result object, its ratios and the bars computed from it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.bars import API, DCP, MEMORY, MOUNT, MOUNT_FILE, NULL_FILE, RAW, READ, WRITE
from bench.bars import checkpoint_bars as bars
from bench.report import Result, Row, at_least, at_most, print_result, with_ratios, write_json
from bench.runner import Metric


def row(case: str, metric: Metric, *samples: float) -> Row:
    """A row of one case."""
    return Row(case, metric.name, metric.unit, samples)


def test_a_result_is_written_as_one_object_of_the_agreed_shape(tmp_path: Path) -> None:
    """--json has the fields that every benchmark promises, and figures that belong together."""
    rows = with_ratios([row("raw", WRITE, 4.0, 1.0, 2.0), row("api", WRITE, 1.0)], ["raw"])
    result = Result("checkpoint", "abc", {"cores": 2}, {"ranks": 4}, rows, bars(rows))
    write_json(result, tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found.keys() == {"bench", "commit", "machine", "config", "rows", "bars"}
    assert found["rows"][0] == {
        "case": "raw", "metric": "write", "unit": "GB/s", "median": 2.0, "min": 1.0, "max": 4.0,
        "samples": [4.0, 1.0, 2.0], "vs": {},
    }  # fmt: skip
    assert found["rows"][1]["vs"] == {"raw": 0.5}
    assert found["bars"] == [
        {"name": "save / raw write, at least", "value": 0.5, "target": 0.8, "ok": False}
    ]


def test_the_table_shows_every_case_and_verdict() -> None:
    """What is printed names each case, each ratio's reference and whether each bar was reached."""
    rows = with_ratios([row(RAW, WRITE, 2.0), row(API, WRITE, 1.9)], [RAW])
    console = Console(file=io.StringIO(), width=120)
    result = Result("checkpoint", "abc", {}, {}, rows, (*bars(rows), at_least("other", 1.0, 2.0)))
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    for text in ("raw", "api", "/raw", "0.95", "ok", "missed"):
        assert text in said


def test_ratios_compare_the_same_metric_only() -> None:
    """A write is never divided by a read, nor a case by itself."""
    rows = with_ratios([row(RAW, WRITE, 2.0), row(RAW, READ, 8.0), row(API, READ, 4.0)], [RAW])
    assert [dict(found.vs) for found in rows] == [{}, {}, {RAW: 0.5}]


def test_a_row_without_samples_is_refused() -> None:
    """A case that measured nothing cannot look like a result."""
    with pytest.raises(ValueError, match="no samples"):
        row("raw", WRITE)


@pytest.mark.parametrize(
    ("raw", "null", "name", "ok"),
    [
        (10.0, None, "raw", True),
        (10.1, None, "raw", False),
        (10.0, 100.0, "raw", True),
        (100.0, 7.5, "null FUSE", True),
        (100.0, 7.6, "null FUSE", False),
    ],
)
def test_the_mounts_read_may_be_held_against_the_device_or_fuse_itself(
    raw: float, null: float | None, name: str, ok: bool
) -> None:
    """0.60 of the device is enough; where that is out of reach, 0.80 of a null file system is."""
    rows = [row(RAW, READ, raw), row(MOUNT_FILE, READ, 6.0)]
    rows += [row(NULL_FILE, READ, null)] if null is not None else []
    (bar,) = bars(rows)
    assert name in bar.name
    assert bar.ok is ok


def test_bars_are_judged_by_medians_and_memory_by_its_peak() -> None:
    """One slow sample does not miss a bar; one rank above the limit does."""
    rows = [
        row(RAW, WRITE, 2.0), row(API, WRITE, 0.1, 2.0, 2.1), row(DCP, WRITE, 1.0),
        row(API, MEMORY, 10.0, 257.0), row(MOUNT, MEMORY, 256.0),
    ]  # fmt: skip
    assert [bar.ok for bar in bars(rows)] == [True, True, False, True]


def test_bars_hold_at_the_target_itself() -> None:
    """At least and at most include the figure that was promised."""
    assert at_least("x", 0.8, 0.8).ok
    assert at_most("x", 256, 256).ok
    assert not at_least("x", 0.79, 0.8).ok
    assert not at_most("x", 257, 256).ok
