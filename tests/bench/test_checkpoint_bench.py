"""`tectonicfs bench checkpoint` from the command line, on a small checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.bars import CASES
from bench.cli import bench as bench_command
from bench.report import Bar, Result, Row

_COMMAND = "from tectonic_client.cli.main import main; main()"
_BENCH = (sys.executable, "-c", _COMMAND, "bench", "checkpoint")
_MOUNTED = ("mount", "mount-file", "null-file")


def bench(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on two ranks with 4 MiB."""
    return subprocess.run(
        [
            *_BENCH, "--dir", str(directory),
            "--ranks", "2", "--bytes", "4MiB", "--repeat", "1", *arguments,
        ],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def measure(directory: Path, *cases: str) -> dict[str, Any]:
    """The result of a run of some cases."""
    only = [part for case in cases for part in ("--only", case)]
    done = bench(directory, "--json", str(directory / "result.json"), *only)
    assert done.returncode == 0, done.stderr
    for case in cases:
        assert f"{case}: repeat 1 of 1" in done.stderr, "no progress shown"
    assert [path.name for path in directory.iterdir()] == ["result.json"], "left files behind"
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


@pytest.mark.slow
def test_the_cases_without_a_mount_are_measured_and_compared(disk_path: Path) -> None:
    """The API and every reference write, read back right and cold, and are set in relation."""
    cases = [case for case in CASES if case not in _MOUNTED]
    result = measure(disk_path, *cases)
    assert result["bench"] == "checkpoint"
    assert [(row["case"], row["metric"]) for row in result["rows"]] == [
        (case, metric) for case in cases for metric in ("write", "cold read")
    ]
    assert all(row["median"] > 0 for row in result["rows"])
    api = result["rows"][2]
    assert api["case"] == "api"
    assert api["vs"].keys() == {"raw", "dcp", "torch", "safetensors"}
    assert len(result["bars"]) == 5
    assert result["config"]["raw_write_threads"] in (2, 4, 8)


@pytest.mark.fuse
def test_the_mounts_are_measured_and_unmounted(disk_path: Path) -> None:
    """Our mount and the null file system serve the same files, and nothing stays mounted."""
    result = measure(disk_path, *_MOUNTED)
    assert {row["case"] for row in result["rows"]} == set(_MOUNTED)
    assert str(disk_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.fuse
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_cleans_up(number: signal.Signals, disk_path: Path) -> None:
    """Ctrl-C and SIGTERM to the whole job end it with nothing mounted, running or left on disk."""
    with subprocess.Popen(
        [*_BENCH, "--dir", disk_path, "--bytes", "64MiB", "--repeat", "100", "--only", "mount"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any("repeat 1" in line for line in said)
        os.killpg(process.pid, number)
        assert list(said)[-1] == "tectonicfs: interrupted\n"
    assert process.returncode == 130
    assert list(disk_path.iterdir()) == []


@pytest.mark.fuse
def test_memory_is_measured_for_each_rank_and_the_mount(disk_path: Path) -> None:
    """The memory rows have a sample for each rank, and the mount's peak under eight writers."""
    done = bench(disk_path, "--only", "memory", "--json", str(disk_path / "result.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((disk_path / "result.json").read_text())["rows"]
    assert [(row["case"], len(row["samples"])) for row in rows] == [("api", 2), ("mount", 1)]
    assert all(sample > 1 for row in rows for sample in row["samples"])


@pytest.mark.parametrize(
    ("ok", "unavailable", "exit_code"),
    [(True, {}, 0), (False, {}, 1), (True, {"mount": "no FUSE"}, 1)],
)
def test_a_missed_bar_is_an_exit_code_only_where_asked(
    ok: bool, unavailable: dict[str, str], exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--bar fails when a figure is missed or could not be measured; without it neither does."""
    rows = (Row("raw", "write", "GB/s", (1.0,)),)
    bars = (Bar("a figure, at least", 1.0, 2.0, ok),)
    result = Result("checkpoint", "abc", {}, {"unavailable": unavailable}, rows, bars)
    monkeypatch.setattr("bench.checkpoint.run_checkpoint", lambda settings: result)
    asked = CliRunner().invoke(bench_command, ["checkpoint", "--bar"])
    assert asked.exit_code == exit_code
    assert ("not measured: mount: no FUSE" in asked.output) == bool(unavailable)
    assert CliRunner().invoke(bench_command, ["checkpoint"]).exit_code == 0


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path: Path) -> None:
    """Too little data, too little space, an unknown case: an error that says what to do."""
    huge = bench(tmp_path, "--bytes", "900TiB")
    assert huge.returncode == 1
    assert "use fewer --bytes" in huge.stderr
    assert huge.stderr.count("\n") == 1
    assert bench(tmp_path, "--bytes", "1KiB").returncode == 2
    assert bench(tmp_path, "--only", "nothing").returncode == 2
    assert bench(tmp_path / "missing").returncode == 2
    assert list(tmp_path.iterdir()) == []
