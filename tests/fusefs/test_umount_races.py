"""umount, mount and stats that meet each other half-way, on one directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import pytest

from fusefs import mounttable, registry, unmounting
from fusefs.mounttable import find_mount
from fusefs.unmounting import unmount
from tectonic_client.errors import MountError
from tests.fusefs.mounts import COMMAND, TIMEOUT_S, mounted, refused, tectonicfs

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]


# --- two umounts ------------------------------------------------------------------------------


def test_an_umount_that_comes_second_waits_for_the_flush_too(
    volume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one takes the mount off between its look and its turn, nothing is wrong."""
    detach = mounttable.detach

    def detach_as_second(place: str, *, lazy: bool) -> None:
        detach(place, lazy=lazy)
        detach(place, lazy=lazy)

    monkeypatch.setattr(unmounting, "detach", detach_as_second)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert "everything is flushed" in unmount(str(mount.path))
        mount.wait_gone()


def test_an_umount_that_comes_too_late_does_not_speak_of_a_dead_daemon(
    volume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that ended in order after the look at the mount was not gone without flushing."""
    with mounted(volume, tmp_path / "mnt") as mount:

        def find_then_lose(directory: str) -> mounttable.Mount | None:
            monkeypatch.undo()
            found = find_mount(directory)
            tectonicfs("umount", mount.path)
            return found

        monkeypatch.setattr(unmounting, "find_mount", find_then_lose)
        with pytest.raises(MountError, match="is not mounted"):
            unmount(str(mount.path))


def test_many_umounts_at_once(volume: str, tmp_path: Path) -> None:
    """Each succeeds or finds nothing mounted any more; none speaks of a busy mount."""
    for _ in range(3):
        with mounted(volume, tmp_path / "mnt") as mount:
            said: list[str] = []

            def end(directory: str = str(mount.path), said: list[str] = said) -> None:
                try:
                    said.append(unmount(directory))
                except MountError as error:
                    said.append(str(error))

            threads = [threading.Thread(target=end) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            allowed = ("everything is flushed", "is not mounted")
            assert len(said) == len(threads)
            assert all(line.endswith(allowed) for line in said), said
            assert any(line.endswith(allowed[0]) for line in said), said
            mount.wait_gone()


def test_a_mount_that_is_held_for_a_moment_is_not_busy(
    volume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody in sight holds is tried again; another umount holds it while it works."""
    with mounted(volume, tmp_path / "mnt") as mount:
        refusals = iter(["target is busy"] * 2)
        run_helper = mounttable._run_helper
        monkeypatch.setattr(
            mounttable,
            "_run_helper",
            lambda command, place: next(refusals, None) or run_helper(command, place),
        )
        assert "everything is flushed" in unmount(str(mount.path))


# --- while it starts --------------------------------------------------------------------------


class _Starting:
    """A `mount` whose daemon waits for the database, which somebody else writes, until `go`."""

    def __init__(self, volume: str, directory: Path, *arguments: str) -> None:
        directory.mkdir()
        self.directory = directory
        self._writer = apsw.Connection(volume)
        self._writer.execute("BEGIN IMMEDIATE")
        command = [sys.executable, "-c", COMMAND, "mount", *arguments, volume, str(directory)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.pid = self._pid_once_signals_are_caught()

    def _pid_once_signals_are_caught(self) -> int:
        while self.process.poll() is None:
            with (
                suppress(MountError),
                registry.living_daemon(str(self.directory), os.getuid()) as daemon,
            ):
                if daemon is not None and _catches(daemon.state.pid, signal.SIGTERM):
                    return daemon.state.pid
        raise AssertionError("the mount ended")

    def go(self) -> tuple[int, str]:
        """Let it start; returns the exit status of `mount` and what it said."""
        self._writer.execute("ROLLBACK")
        said, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, said

    def clean_up(self) -> None:
        self._writer.close()
        self.process.kill()
        self.process.communicate()
        if find_mount(str(self.directory)):
            tectonicfs("umount", "--force", self.directory)


@contextmanager
def _starting(volume: str, directory: Path, *arguments: str) -> Iterator[_Starting]:
    start = _Starting(volume, directory, *arguments)
    try:
        yield start
    finally:
        start.clean_up()


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << (number - 1))


def test_umount_and_stats_of_a_mount_that_is_starting(volume: str, tmp_path: Path) -> None:
    """They say so at once; the mount comes up as if nobody had asked."""
    with _starting(volume, tmp_path / "mnt", "-o", f"log_file={tmp_path}/log") as start:
        assert "is just being mounted" in refused("umount", start.directory)
        assert "is just being mounted" in refused("stats", start.directory)
        status, said = start.go()
        assert (status, "mounted at" in said) == (0, True)
        tectonicfs("umount", start.directory)


@pytest.mark.parametrize("times", [1, 2])
def test_a_daemon_that_is_told_to_end_while_it_starts(
    volume: str, tmp_path: Path, times: int
) -> None:
    """It ends in order when it can, nothing stays mounted, and `mount` fails with a reason."""
    with _starting(volume, tmp_path / "mnt", "-o", f"log_file={tmp_path}/log") as start:
        for _ in range(times):
            os.kill(start.pid, signal.SIGTERM)
        status, said = start.go()
        assert status == 1
        assert "the daemon was told to end before the mount answered" in said
        assert find_mount(str(start.directory)) is None
        assert "is unmounted and flushed" in (tmp_path / "log").read_text()


def test_a_daemon_that_is_killed_while_it_starts(volume: str, tmp_path: Path) -> None:
    """`mount` names the signal, and the next one finds nothing in its way."""
    with _starting(volume, tmp_path / "mnt", "-o", f"log_file={tmp_path}/log") as start:
        os.kill(start.pid, signal.SIGKILL)
        status, said = start.go()
        assert (status, said.count("\n")) == (1, 1)
        assert "the daemon was killed while mounting (Killed)" in said
    with mounted(volume, tmp_path / "mnt") as mount:
        tectonicfs("umount", mount.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_mount_in_the_foreground_is_interrupted_while_it_starts(
    volume: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C before the mount answers ends it in order, without a traceback."""
    with _starting(volume, tmp_path / "mnt", "-f") as start:
        os.kill(start.pid, number)
        status, said = start.go()
        assert status == 0
        assert "Traceback" not in said
        assert find_mount(str(start.directory)) is None


def test_looking_does_not_keep_a_mount_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks whether a daemon lives holds its lock for a moment: the daemon tries again."""
    try_lock = registry._try_lock
    refusals = iter([False] * 3)
    monkeypatch.setattr(
        registry, "_try_lock", lambda descriptor: next(refusals, True) and try_lock(descriptor)
    )
    claim = registry.claim(str(tmp_path), "volume", None)
    claim.finish(registry.CLEAN)


# --- stats ------------------------------------------------------------------------------------


def test_stats_during_the_last_flush(volume: str, tmp_path: Path) -> None:
    """Of a mount that is detached and still flushes stats tell just that."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with (mount.path / "f").open("wb", buffering=0) as file:
            file.write(b"x")
            tectonicfs("umount", "--lazy", mount.path)
            said = refused("stats", mount.path)
            assert f"unmounted already; its daemon (pid {mount.pid}) ends when" in said
        mount.wait_gone()
        assert "is not a mount of tectonicfs" in refused("stats", mount.path)
