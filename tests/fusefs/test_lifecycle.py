"""Mounting and unmounting as users do it: daemons, signals, errors that say what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.mounttable import find_mount
from tests.fusefs.mounts import COMMAND, TIMEOUT_S, mounted, refused, tectonicfs
from tests.fusefs.posixcalls import pattern

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]

_DATA = pattern(3, 3_000_000)


@contextmanager
def _left_open(path: Path) -> Iterator[int]:
    """A descriptor of a new file that outlives its mount, so that closing it fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        yield descriptor
    finally:
        with pytest.raises(OSError, match=r"not connected|aborted"):
            os.close(descriptor)


def _is_mounted(directory: Path) -> bool:
    return find_mount(str(directory)) is not None


# --- the normal life --------------------------------------------------------------------------


def test_the_mount_answers_when_the_command_returns(volume: str, tmp_path: Path) -> None:
    """`mount` returns when the mount answers, `umount` when all is flushed and the daemon gone."""
    with mounted(volume, tmp_path / "mnt") as mount:
        assert mount.path.stat().st_ino == 1
        (mount.path / "f").write_bytes(_DATA)
        said = tectonicfs("umount", mount.path).stdout
        assert "everything is flushed" in said
        mount.wait_gone()
        assert not _is_mounted(mount.path)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA


def test_a_daemon_is_detached_from_its_terminal(volume: str, tmp_path: Path) -> None:
    """A session of its own, working directory /, no inherited streams: nothing is held open."""
    with mounted(volume, tmp_path / "mnt") as mount:
        process = Path(f"/proc/{mount.pid}")
        assert os.getsid(mount.pid) == mount.pid
        assert os.readlink(process / "cwd") == "/"
        assert {os.readlink(process / f"fd/{number}") for number in range(3)} == {"/dev/null"}


def test_a_relative_url_and_directory_survive_the_change_of_directory(
    volume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are meant relative to where the command was called."""
    monkeypatch.chdir(tmp_path)
    with mounted("meta.db", Path("mnt")) as mount:
        (mount.path / "f").write_bytes(b"x")
        assert (tmp_path / "mnt" / "f").read_bytes() == b"x"
        tectonicfs("umount", "mnt")


def test_a_read_only_mount_refuses_every_change(volume: str, tmp_path: Path) -> None:
    """`-o ro` reads what is there and answers EROFS to changes."""
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "f").write_bytes(b"x")
        tectonicfs("umount", mount.path)
    with mounted(volume, tmp_path / "mnt", "ro") as mount:
        assert (mount.path / "f").read_bytes() == b"x"
        with pytest.raises(OSError, match="Read-only"):
            (mount.path / "g").touch()
        with pytest.raises(OSError, match="Read-only"):
            (mount.path / "f").unlink()
        tectonicfs("umount", mount.path)


def test_foreground_logs_to_stderr_and_ends_clean_on_interrupt(volume: str, tmp_path: Path) -> None:
    """`-f` stays, says on stderr that it is mounted, and Ctrl-C flushes and exits with 0."""
    directory = tmp_path / "mnt"
    directory.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "mount", "-f", volume, str(directory)],
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "mounted at" in first
        with _left_open(directory / "f") as descriptor:
            os.write(descriptor, _DATA)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
        assert "is unmounted and flushed" in process.stderr.read()
    assert not _is_mounted(directory)
    with mounted(volume, directory) as mount:
        assert (mount.path / "f").read_bytes() == _DATA


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_flushes_files_that_are_still_open(
    volume: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Nothing that a program wrote is lost when the daemon is told to end, even twice."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with _left_open(mount.path / "f") as descriptor:
            os.write(descriptor, _DATA)
            os.kill(mount.pid, number)
            os.kill(mount.pid, number)
            mount.wait_gone()
        assert not _is_mounted(mount.path)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA


def test_unmounting_from_outside_ends_the_daemon(volume: str, tmp_path: Path) -> None:
    """`fusermount3 -u` by anybody else: the daemon flushes and goes, `umount` has nothing to do."""
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "f").write_bytes(_DATA)
        subprocess.run(["fusermount3", "-u", mount.path], check=True, timeout=TIMEOUT_S)
        mount.wait_gone()
        assert "is unmounted and flushed" in mount.log_file.read_text()
        assert "is not mounted" in refused("umount", mount.path)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA


def test_two_mounts_of_a_volume_are_close_to_open(volume: str, tmp_path: Path) -> None:
    """What one mount closed or made, the other finds at its next open, whatever it cached."""
    with mounted(volume, tmp_path / "a") as one, mounted(volume, tmp_path / "b") as two:
        for number in range(5):
            text = b"v%d" % number * (number + 1)
            (one.path / "f").write_bytes(text)
            assert (two.path / "f").read_bytes() == text
        assert not (two.path / "h").exists()
        (one.path / "h").touch()
        assert (two.path / "h").exists()
        tectonicfs("umount", one.path)
        tectonicfs("umount", two.path)


def test_a_file_replaced_elsewhere_is_opened_anew(volume: str, tmp_path: Path) -> None:
    """A rename over a file by one mount is seen by the next open of another that cached the name,
    also while the replaced file lives on because it is open."""
    with mounted(volume, tmp_path / "a") as one, mounted(volume, tmp_path / "b") as two:
        (one.path / "f").write_bytes(b"old")
        assert (two.path / "f").read_bytes() == b"old"
        with (one.path / "f").open("rb"):
            (one.path / "new").write_bytes(b"new")
            (one.path / "new").rename(one.path / "f")
            assert (two.path / "f").read_bytes() == b"new"


# --- busy, lazy, forced -----------------------------------------------------------------------


def test_a_busy_mount_is_refused_naming_who_holds_it(volume: str, tmp_path: Path) -> None:
    """An open file keeps the mount; the message names the process, the file and the way out."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with (mount.path / "held").open("wb", buffering=0) as file:
            file.write(b"x")
            said = refused("umount", mount.path)
            assert f"pid {os.getpid()} " in said
            assert "held" in said
            assert "--lazy" in said
            file.write(b"y")
        tectonicfs("umount", mount.path)
        mount.wait_gone()


def test_a_lazy_unmount_lets_open_files_finish(volume: str, tmp_path: Path) -> None:
    """--lazy frees the directory at once; the daemon ends when the last file is closed."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with (mount.path / "f").open("wb", buffering=0) as file:
            file.write(_DATA)
            assert "detached" in tectonicfs("umount", "--lazy", mount.path).stdout
            assert not _is_mounted(mount.path)
            file.write(_DATA)
            assert "still runs" in refused("mount", volume, mount.path)
        mount.wait_gone()
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA * 2


def test_a_forced_unmount_flushes_what_was_written(volume: str, tmp_path: Path) -> None:
    """--force ends the daemon under open files: they get errors, what they wrote is kept."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with _left_open(mount.path / "f") as descriptor:
            os.write(descriptor, _DATA)
            tectonicfs("umount", "--force", mount.path)
            with pytest.raises(OSError, match=r"not connected|aborted"):
                os.write(descriptor, b"more")
        mount.wait_gone()
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA


def test_an_aborted_connection_leaves_no_dead_mount(volume: str, tmp_path: Path) -> None:
    """`umount -f` under open files cuts the kernel's connection: all is flushed and detached."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with _left_open(mount.path / "f") as descriptor:
            os.write(descriptor, _DATA)
            subprocess.run(["umount", "--force", mount.path], check=False, timeout=TIMEOUT_S)
            mount.wait_gone()
        assert not _is_mounted(mount.path)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA


# --- a daemon that died -----------------------------------------------------------------------


def test_a_stale_mount_is_named_by_mount_and_removed_by_umount(volume: str, tmp_path: Path) -> None:
    """After kill -9 `mount` says what to do, `umount` does it, and what was closed is there."""
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "f").write_bytes(_DATA)
        os.kill(mount.pid, signal.SIGKILL)
        mount.wait_gone()
        said = refused("mount", volume, mount.path)
        assert f"stale mount whose daemon is gone: first run tectonicfs umount {mount.path}" in said
        assert "daemon was gone already" in tectonicfs("umount", mount.path).stdout
        assert not _is_mounted(mount.path)
    with mounted(volume, tmp_path / "mnt") as mount:
        assert (mount.path / "f").read_bytes() == _DATA
        tectonicfs("umount", mount.path)


def test_umount_tells_when_the_daemon_dies_while_it_waits(volume: str, tmp_path: Path) -> None:
    """A daemon that is killed instead of flushing is not reported as a success."""
    with (
        mounted(volume, tmp_path / "mnt") as mount,
        _left_open(mount.path / "f") as descriptor,
    ):
        os.write(descriptor, b"x")
        tectonicfs("umount", "--lazy", mount.path)
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, "umount", str(mount.path)],
            stderr=subprocess.PIPE, text=True,
        ) as waiting:  # fmt: skip
            assert waiting.stderr is not None
            assert "waiting for the daemon" in waiting.stderr.readline()
            os.kill(mount.pid, signal.SIGKILL)
            assert waiting.wait(TIMEOUT_S) == 1
            assert "died before it had flushed" in waiting.stderr.read()


def test_umount_gives_up_waiting_at_its_timeout(volume: str, tmp_path: Path) -> None:
    """--timeout bounds the wait; the daemon is left alone."""
    with mounted(volume, tmp_path / "mnt") as mount:
        with (mount.path / "f").open("wb", buffering=0):
            tectonicfs("umount", "--lazy", mount.path)
            assert "is still flushing" in refused("umount", "--timeout", "0.1", mount.path)
        mount.wait_gone()


# --- bad input --------------------------------------------------------------------------------


def test_no_volume(tmp_path: Path) -> None:
    """A daemon that finds no volume reports it through the command, and leaves no mount."""
    (tmp_path / "mnt").mkdir()
    said = refused("mount", tmp_path / "none.db", tmp_path / "mnt",
                   "-o", f"log_file={tmp_path / 'log'}")  # fmt: skip
    assert "no volume at" in said
    assert not _is_mounted(tmp_path / "mnt")
    assert not (tmp_path / "none.db").exists()


def test_no_volume_in_the_foreground(tmp_path: Path) -> None:
    """The same error without a daemon."""
    (tmp_path / "mnt").mkdir()
    assert "no volume at" in refused("mount", "-f", tmp_path / "none.db", tmp_path / "mnt")


def test_a_directory_that_cannot_be_mounted_on(volume: str, tmp_path: Path) -> None:
    """Missing, a file, not empty, taken: each is refused with its reason."""
    assert "mkdir -p" in refused("mount", volume, tmp_path / "missing")
    assert "is not a directory" in refused("mount", volume, volume)
    assert "is not empty" in refused("mount", volume, tmp_path)
    assert "already a mount point (proc)" in refused("mount", volume, "/proc")
    with mounted(volume, tmp_path / "mnt") as mount:
        assert "already a mount of volume tests" in refused("mount", volume, mount.path)
        tectonicfs("umount", mount.path)


def test_nonempty_mounts_over_files_and_they_come_back(volume: str, tmp_path: Path) -> None:
    """-o nonempty hides the directory's files for the time of the mount."""
    directory = tmp_path / "mnt"
    directory.mkdir()
    (directory / "hidden").touch()
    with mounted(volume, directory, "nonempty") as mount:
        assert os.listdir(mount.path) == []
        tectonicfs("umount", mount.path)
    assert os.listdir(directory) == ["hidden"]


def test_bad_options(volume: str, tmp_path: Path) -> None:
    """Unknown options, too little memory and an unwritable log are refused before mounting."""
    directory = tmp_path / "mnt"
    directory.mkdir()
    assert "known are ro, rw" in refused("mount", volume, directory, "-o", "big_writes")
    log = f"log_file={tmp_path / 'log'}"
    assert "memory limit" in refused("mount", volume, directory, "-o", f"{log},memory_limit=1KiB")
    said = refused("mount", volume, directory, "-o", "log_file=/proc/none/log")
    assert "cannot write the log file /proc/none/log" in said
    assert not _is_mounted(directory)


@pytest.mark.parametrize(
    "arguments", [("mount", "", "."), ("umount", ""), ("stats", ""), ("log-level", "", "debug")]
)
def test_the_empty_name_is_not_the_working_directory(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable of a script names nothing: the line says so, not what is wrong with `.`."""
    monkeypatch.chdir(tmp_path)
    line = refused(*arguments)
    assert "''" in line
    assert str(tmp_path) not in line
    assert "'': give its path" in refused("mount", tmp_path / "meta.db", "")


def test_umount_of_what_is_no_mount_of_ours(tmp_path: Path) -> None:
    """A plain directory and another file system's mount are refused."""
    assert "is not mounted" in refused("umount", tmp_path)
    assert "is a mount of type proc" in refused("umount", "/proc")


def test_without_pyfuse3_the_message_says_how_to_install_it(volume: str, tmp_path: Path) -> None:
    """A missing pyfuse3 is one line with the command, not a traceback."""
    (tmp_path / "mnt").mkdir()
    hidden = f"import sys; sys.modules['pyfuse3'] = None; {COMMAND}"
    result = subprocess.run(
        [sys.executable, "-c", hidden, "mount", volume, str(tmp_path / "mnt")],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "./run install installs it" in result.stderr
    assert result.stderr.count("\n") == 1
