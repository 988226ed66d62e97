"""`tectonicfs stats` and `log-level` on real mounts, SIGUSR1, and how figures are shown."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusefs import watching
from fusefs.statsview import view
from tectonic_client.cli.parameters import plain_console
from tectonic_client.errors import MountError
from tests.fusefs.mounts import (
    COMMAND,
    TIMEOUT_S,
    MountedVolume,
    format_volume,
    mounted,
    refused,
    tectonicfs,
)

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]


def _stats(target: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tectonicfs("stats", "--json", target).stdout)
    return found


def _rendered(stats: dict[str, Any], earlier: dict[str, Any] | None) -> str:
    console = plain_console()
    with console.capture() as captured:
        console.print(view(stats, earlier))
    return captured.get()


def test_stats_count_what_was_done(volume: str, tmp_path: Path) -> None:
    """Requests, bytes, memory, metadata and stores, as JSON and as tables."""
    with mounted(volume, tmp_path / "mnt", "memory_limit=100MiB") as mount:
        before = _stats(mount.path)
        (mount.path / "f").write_bytes(bytes(100_000))
        (mount.path / "f").read_bytes()
        assert not (mount.path / "missing").exists()
        stats = _stats(mount.path)
        assert stats["operations"]["create"]["calls"] == 1
        assert stats["operations"]["write"]["transferred_bytes"] == 100_000
        assert stats["operations"]["read"]["transferred_bytes"] >= 100_000
        assert stats["errors"]["lookup"]["ENOENT"] >= 1
        assert stats["memory"]["limit_bytes"] == 100 * 2**20
        assert stats["stores"]["0"]["put"]["calls"] >= 2
        assert stats["pid"] == mount.pid
        assert stats["under_way"] == []
        said = tectonicfs("stats", mount.path).stdout  # into a pipe: as --once
        assert f"tests on {mount.path}: pid {mount.pid}, up 0:00:0" in said
        assert "create" in said
        assert "ENOENT" in said
        assert "metadata transaction" in said
        assert "write" in _rendered(stats, before)
        tectonicfs("umount", mount.path)


def test_a_volume_names_all_its_mounts(volume: str, tmp_path: Path) -> None:
    """Given META_URL instead of a directory, every mount of it on this machine is shown."""
    said = refused("stats", volume)
    assert "no mount of" in said
    with mounted(volume, tmp_path / "a") as one, mounted(volume, tmp_path / "b") as two:
        lines = tectonicfs("stats", volume, "--json").stdout.splitlines()
        assert {json.loads(line)["directory"] for line in lines} == {str(one.path), str(two.path)}


def test_lines_come_at_the_interval(volume: str, tmp_path: Path) -> None:
    """--json --interval prints a whole object per line until it is interrupted."""
    with mounted(volume, tmp_path / "mnt") as mount:
        arguments = ["stats", str(mount.path), "--json", "--interval", "0.1"]
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            times = [json.loads(process.stdout.readline())["uptime_s"] for _ in range(3)]
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 130
        assert times[0] < times[1] < times[2]


def test_the_live_view_is_refreshed(volume: str, tmp_path: Path) -> None:
    """On a terminal the tables are drawn again and again, with what happened meanwhile."""
    with mounted(volume, tmp_path / "mnt") as mount:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", COMMAND, "stats", str(mount.path), "--interval", "0.1"]
        with subprocess.Popen(
            command, stdout=theirs, stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "60"},
        ) as process:  # fmt: skip
            os.close(theirs)
            _read_until(ours, b"metadata transaction")
            os.mkdir(mount.path / "directory")
            _read_until(ours, b"mkdir")
            process.send_signal(signal.SIGINT)
            with pytest.raises(OSError, match="Input/output error"):  # the end of a terminal
                _read_until(ours, b"there is no such text")
            assert process.wait(TIMEOUT_S) == 130
        os.close(ours)


def _read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    until = time.monotonic() + TIMEOUT_S
    while wanted not in seen:
        assert time.monotonic() < until, seen
        seen += os.read(terminal, 65_536)


def test_the_log_level_changes_while_it_runs(volume: str, tmp_path: Path) -> None:
    """`log-level DIR debug` shows in the log what was not logged before, and says what it was."""
    with mounted(volume, tmp_path / "mnt") as mount:
        for name in ("quiet", "loud"):
            (mount.path / name / "child").mkdir(parents=True)
        with pytest.raises(OSError, match="not empty"):
            (mount.path / "quiet").rmdir()
        said = tectonicfs("log-level", mount.path, "debug").stdout
        assert said == f"log level of {mount.path} is now DEBUG, was INFO\n"
        with pytest.raises(OSError, match="not empty"):
            (mount.path / "loud").rmdir()
        (line,) = (line for line in mount.log_file.read_text().splitlines() if "NotEmpty" in line)
        assert "b'loud'" in line
        assert "log level 'much' is none of debug" in refused("log-level", mount.path, "much")
        assert _stats(mount.path)["log_level"] == "DEBUG"


def test_those_without_a_daemon_are_told(volume: str, tmp_path: Path) -> None:
    """No mount, another file system and a mount whose daemon was killed: one clear line each."""
    assert "is not a mount of tectonicfs" in refused("stats", tmp_path)
    assert "is not a mount of tectonicfs" in refused("log-level", "/proc", "debug")
    with mounted(volume, tmp_path / "mnt") as mount:
        os.kill(mount.pid, signal.SIGKILL)
        mount.wait_gone()
        assert "stale mount whose daemon is gone" in refused("log-level", mount.path, "debug")


def test_the_next_daemon_takes_the_socket_of_a_killed_one(volume: str, tmp_path: Path) -> None:
    """After kill -9 and a new mount at the same place its stats are the new one's."""
    with mounted(volume, tmp_path / "mnt") as mount:
        os.kill(mount.pid, signal.SIGKILL)
        mount.wait_gone()
    with mounted(volume, tmp_path / "mnt") as mount:
        assert _stats(mount.path)["pid"] == mount.pid
        tectonicfs("umount", mount.path)


_SYNCED = "import os, sys; f = os.open(sys.argv[1], os.O_WRONLY); os.write(f, b'x'); os.fsync(f)"


def _touched(path: Path) -> int:
    path.touch()
    return path.stat().st_ino


def test_a_mount_that_hangs_says_for_what(tmp_path: Path) -> None:
    """While a store does not answer and a writer hangs, the stats and the flight recorder name the
    request, its file and the store that it waits for."""
    with mounted(format_volume(tmp_path), tmp_path / "below") as carrier:
        upper = tmp_path / "upper"
        upper.mkdir()
        url = format_volume(carrier.path, str(upper / "meta.db"))
        with mounted(url, upper / "mnt") as mount:
            inode = _touched(mount.path / "f")
            os.kill(carrier.pid, signal.SIGSTOP)
            try:
                # A process of its own: this one's children would wait to close its file.
                writer = subprocess.Popen([sys.executable, "-c", _SYNCED, str(mount.path / "f")])
                row = _await_request(mount.path, "fsync")
                assert (row["outcome"], row["waiting_for"]) == (None, ["store"])
                assert row["inode"] == inode
                os.kill(mount.pid, signal.SIGUSR1)
                about, *lines = _await_dump(mount)
                assert about["under_way"] >= 1
                assert "fsync" in [line["operation"] for line in lines if not line["outcome"]]
            finally:
                os.kill(carrier.pid, signal.SIGCONT)
            assert writer.wait(TIMEOUT_S) == 0
            assert (mount.path / "f").read_bytes() == b"x"
            tectonicfs("umount", mount.path)
        tectonicfs("umount", carrier.path)


@pytest.mark.parametrize(
    "told", [{}, {"pid": 1}, {"pid": []}, [], None, "stats", {"pid": 1, "operations": 7}]
)
def test_a_daemon_that_lies_about_its_stats(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version tells, or somebody who means harm, is one line and no traceback."""
    monkeypatch.setattr(watching, "_look", lambda target: [told])
    with pytest.raises(MountError, match="does not understand"):
        watching.show_once("/mnt")


def _await_request(directory: Path, operation: str) -> dict[str, Any]:
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for row in _stats(directory)["under_way"]:
            if row["operation"] == operation:
                return dict(row)
    raise AssertionError(f"no {operation} under way")


# --- the flight recorder ----------------------------------------------------------------------


def _await_dump(mount: MountedVolume, number: int = 0) -> list[dict[str, Any]]:
    path = mount.log_file.parent / f"tectonicfs-flight-{mount.pid}-{number}.jsonl"
    until = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < until, "no dump"
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sigusr1_writes_the_flight_recorder(volume: str, tmp_path: Path) -> None:
    """The dump lies beside the log and tells what was done, with inode, size and outcome."""
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "f").write_bytes(bytes(1000))
        inode = (mount.path / "f").stat().st_ino
        os.kill(mount.pid, signal.SIGUSR1)
        about, *lines = _await_dump(mount)
        assert about["reason"] == "signal"
        (write,) = (line for line in lines if line["operation"] == "write")
        assert (write["inode"], write["size"], write["outcome"]) == (inode, 1000, "OK")
        assert (mount.path / "f").read_bytes() == bytes(1000)
        tectonicfs("umount", mount.path)


def test_a_failed_request_writes_the_flight_recorder(volume: str, tmp_path: Path) -> None:
    """A read that answers EIO leaves a dump in which it stands."""
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "f").write_bytes(bytes(1000))
        tectonicfs("umount", mount.path)
    (chunk,) = filter(Path.is_file, (tmp_path / "store" / "chunks").rglob("*"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with mounted(volume, tmp_path / "mnt") as mount:
        with pytest.raises(OSError, match="Input/output error"):
            (mount.path / "f").read_bytes()
        about, *lines = _await_dump(mount)
        assert "EIO" in about["reason"]
        # The kernel asks once more, which may be under way.
        assert "EIO" in [line["outcome"] for line in lines if line["operation"] == "read"]
        tectonicfs("umount", mount.path)
