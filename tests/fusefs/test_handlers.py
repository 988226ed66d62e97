"""Handlers over a file system that misbehaves: the mount lives on, whatever they raise."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.mounttable import find_mount

pytestmark = pytest.mark.fuse


class _Server:
    """The in-memory file system, served by a process of its own."""

    def __init__(self, directory: Path, fsname: str, options: str = "") -> None:
        self.path = directory
        directory.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fusefs.memoryfs", str(directory), fsname, options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def stop(self) -> str:
        """End it; returns what it logged."""
        self.process.terminate()
        return self.process.communicate(timeout=60)[1]

    def clean_up(self) -> None:
        self.process.kill()
        self.process.communicate()
        if find_mount(str(self.path)):
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@contextmanager
def _served(directory: Path, fsname: str = "memory", options: str = "") -> Iterator[_Server]:
    server = _Server(directory, fsname, options)
    try:
        yield server
    finally:
        server.clean_up()


@pytest.fixture
def server(fuse: None, tmp_path: Path) -> Iterator[_Server]:
    """A served in-memory file system."""
    with _served(tmp_path / "mnt") as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(
    ("name", "number", "logged"),
    [
        ("unexpected", errno.EIO, "ZeroDivisionError: a defect in a handler"),
        ("grouped", errno.ENOSPC, "lookup: NoSpace: the store is full"),
        ("corrupt", errno.EIO, "chunk 3 of block 7 in store 0 fails its checksum"),
    ],
)
def test_an_error_in_a_handler_never_ends_the_mount(
    server: _Server, name: str, number: int, logged: str
) -> None:
    """The caller gets an errno, the log the reason, and the mount goes on answering."""
    for _ in range(3):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the errno is checked
            (server.path / name).stat()
        assert raised.value.errno == number
    (server.path / "after").touch()
    assert os.listdir(server.path) == ["after"]
    assert logged in server.stop()
    assert server.process.returncode == 0


def test_creating_a_file_that_another_client_just_made_opens_it(server: _Server) -> None:
    """O_CREAT without O_EXCL opens the other's file; with O_EXCL it is refused."""
    # The memory file system makes "race..." itself right after it answered that there is none.
    os.close(os.open(server.path / "race1", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(FileExistsError):
        os.open(server.path / "race2", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert sorted(os.listdir(server.path)) == ["race1", "race2"]


def test_an_unchanged_file_keeps_its_pages_and_a_changed_one_does_not(server: _Server) -> None:
    """Reading again after reopening comes from the page cache until the file changes."""
    path = server.path / "f"
    path.write_bytes(b"x" * 10)
    assert path.read_bytes() == b"\x01" * 10
    assert path.read_bytes() == b"\x01" * 10
    os.close(os.open(path, os.O_WRONLY))
    assert path.read_bytes() == b"\x01" * 10
    os.utime(path, ns=(1, 1))
    assert path.read_bytes() == b"\x05" * 10


def test_missing_names_are_not_remembered_unless_asked_for(server: _Server, tmp_path: Path) -> None:
    """By default a file that another client makes is found at once; negative_timeout trades that
    for fewer look-ups."""
    # The memory file system makes "race..." itself right after it answered that there is none.
    assert not (server.path / "race").exists()
    assert (server.path / "race").exists()
    with _served(tmp_path / "other", options="negative_timeout=1000") as other:
        other.wait_ready()
        assert not (other.path / "race").exists()
        assert not (other.path / "race").exists()


@pytest.mark.usefixtures("fuse")
def test_a_mount_whose_root_cannot_be_read_is_given_up(tmp_path: Path) -> None:
    """A mount counts as ready only after a real stat: one that fails is an error and no mount."""
    with _served(tmp_path / "mnt", "broken") as server:
        output, log = server.process.communicate(timeout=60)
        assert server.process.returncode != 0
        assert output == ""
        assert "was mounted but its root cannot be read: Input/output error" in log
        assert find_mount(str(server.path)) is None


@pytest.mark.usefixtures("fuse")
def test_the_mount_table_shows_type_and_name(tmp_path: Path) -> None:
    """fstype is fuse.tectonicfs; the source is the volume's name without what libfuse minds."""
    with _served(tmp_path / "mnt", "memory, with (signs)") as server:
        server.wait_ready()
        mount = find_mount(str(server.path))
        assert mount is not None
        assert (mount.fstype, mount.source) == ("fuse.tectonicfs", "memory__with__signs_")
