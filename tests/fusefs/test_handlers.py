"""Handlers over a file system that misbehaves: the mount lives on, whatever they raise."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.mounttable import find_mount

pytestmark = pytest.mark.fuse


class _Server:
    """The in-memory file system, served by a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        directory.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fusefs.memoryfs", str(directory), "memory, with (signs)"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def stop(self) -> str:
        """End it; returns what it logged."""
        self.process.terminate()
        return self.process.communicate(timeout=60)[1]


@pytest.fixture
def server(fuse: None, tmp_path: Path) -> Iterator[_Server]:
    """A served in-memory file system."""
    server = _Server(tmp_path / "mnt")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
        if find_mount(str(server.path)):
            subprocess.run(["umount", "--lazy", str(server.path)], check=True)


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


def test_the_mount_table_shows_type_and_name(server: _Server) -> None:
    """fstype is fuse.tectonicfs; the source is the volume's name without what libfuse minds."""
    mount = find_mount(str(server.path))
    assert mount is not None
    assert (mount.fstype, mount.source) == ("fuse.tectonicfs", "memory__with__signs_")
