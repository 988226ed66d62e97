"""`tectonicfs bench fs` from the command line, with little data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_COMMAND = "from tectonic_client.cli.main import main; main()"
_BENCH = (sys.executable, "-c", _COMMAND, "bench", "fs")


def bench(
    directory: Path, *arguments: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the benchmark once with its quick sizes; `path`: the only directory with programs."""
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(
        [*_BENCH, str(directory), "--quick", "--repeat", "1", *arguments],
        capture_output=True, text=True, timeout=110, check=False, env=environment,
    )  # fmt: skip


def measure(directory: Path, *arguments: str, path: Path | None = None) -> dict[str, Any]:
    """The result of a run, which must leave nothing behind."""
    file = directory / "result.json"
    done = bench(directory, "--json", str(file), *arguments, path=path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    assert list(directory.iterdir()) == [], "left files behind"
    assert str(directory) not in Path("/proc/self/mountinfo").read_text(), "left a mount behind"
    return found


@pytest.mark.fuse
@pytest.mark.slow
def test_every_case_is_measured_beside_the_device_and_fuse(disk_path: Path) -> None:
    """A whole run has a row for each metric of each place, ratios, and all bars but the peers'."""
    result = measure(disk_path)
    assert result.keys() == {"bench", "commit", "machine", "config", "rows", "bars"}
    assert result["bench"] == "fs"
    assert result["config"]["unavailable"] == {}
    rows = {(row["case"], row["metric"]): row for row in result["rows"]}
    for metric in ("seq-write-1", "seq-read-1", "seq-write-4", "seq-read-4"):
        assert rows["mount", metric]["vs"].keys() == {"raw", "null"}
    for metric in ("mmap-read", "random-read-cold", "random-read-warm", "random-write", "create",
                   "ls-l", "stat", "unlink", "small-write", "small-read"):  # fmt: skip
        assert rows["mount", metric]["vs"].keys() == {"null"}
    for metric in ("untar", "git-status", "du", "rm-r"):
        assert rows["mount", metric]["median"] > 0
    for case in ("seq-1", "seq-4", "random", "names", "small", "tree"):
        assert rows["mount", f"{case} peak memory"]["median"] > 10
    assert rows["mount", "seq-write-1 CPU"]["unit"] == "s/GiB"
    assert len(result["bars"]) == 9


@pytest.mark.fuse
def test_another_directory_is_measured_too(disk_path: Path) -> None:
    """A directory to compare with gets the same work and is left as it was."""
    directory, other = disk_path / "measured", disk_path / "other"
    directory.mkdir()
    other.mkdir()
    (other / "kept").write_text("mine")
    result = measure(directory, "--only", "small", "--compare", str(other))
    found = {(row["case"], row["metric"]) for row in result["rows"]}
    assert {(str(other), "small-write"), (str(other), "small-read")} <= found
    assert (str(other), "small-write CPU") not in found
    assert [path.name for path in other.iterdir()] == ["kept"]


@pytest.mark.fuse
def test_a_peer_that_is_not_there_is_left_out_and_named(disk_path: Path) -> None:
    """What cannot be compared with is said, with the way to get it; the rest is measured."""
    directory, programs = disk_path / "measured", disk_path / "programs"
    directory.mkdir()
    programs.mkdir()
    for program in ("fusermount3", "umount"):
        found = shutil.which(program)
        assert found is not None
        (programs / program).symlink_to(found)
    arguments = ("--only", "small", "--peers", "juicefs-sqlite,s3fs")
    result = measure(directory, *arguments, path=programs)
    assert result["config"]["unavailable"] == {
        "juicefs-sqlite": "juicefs is not installed: repeat with --install-peers",
        "s3fs": "s3fs is not installed: repeat with --install-peers",
    }
    assert {row["case"] for row in result["rows"]} == {"null", "mount"}


@pytest.mark.fuse
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_nothing(number: signal.Signals, disk_path: Path) -> None:
    """Ctrl-C and SIGTERM end a run with nothing mounted, running or left on disk."""
    with subprocess.Popen(
        [*_BENCH, disk_path, "--quick", "--repeat", "1000", "--only", "seq-4"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any("repeat 1" in line for line in said)
        os.killpg(process.pid, number)
        assert list(said)[-1] == "tectonicfs: interrupted\n"
    assert process.returncode == 130
    assert list(disk_path.iterdir()) == []


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    """A mistyped directory, case or peer is an error of usage, and nothing is made."""
    assert bench(tmp_path / "missing").returncode == 2
    assert bench(tmp_path, "--only", "nothing").returncode == 2
    unknown = bench(tmp_path, "--peers", "rclone,nfs")
    assert unknown.returncode == 2
    assert "no such peer: nfs" in unknown.stderr
    assert list(tmp_path.iterdir()) == []
