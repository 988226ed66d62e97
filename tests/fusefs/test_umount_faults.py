"""umount of a mount that is being written, or whose store or database is gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fusefs.devices import disk, for_root
from tests.fusefs.mounts import MountedVolume, format_volume, mounted, refused, tectonicfs
from tests.fusefs.witness import Writers
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]

_TIMEOUTS = ("store_timeout=1", "metadata_timeout=1")

_BY_S = 20.0
"""With these timeouts umount ends by then."""


_HOLDER = """
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(bytes(1000))
    print("written", flush=True)
    sys.stdin.read()
"""


@contextmanager
def _dirty(mount: MountedVolume) -> Iterator[None]:
    """A file that is open, with bytes that nobody has flushed.

    By a process of its own: starting a child closes the child's copies of all descriptors, and
    each close flushes.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, mount.path / "dirty"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"written\n"
        try:
            yield
        finally:
            holder.kill()


def _forced(mount: MountedVolume) -> str:
    """What a forced umount, which must fail, says within its time."""
    started = time.monotonic()
    ended = tectonicfs("umount", "--force", mount.path, check=False)
    assert time.monotonic() - started < _BY_S
    assert ended.returncode == 1, ended.stdout
    return ended.stderr.splitlines()[-1]


def test_umount_while_programs_write(tmp_path: Path) -> None:
    """It is refused as busy; forced, it ends at once, the writers get errors, and all that was
    acknowledged is there."""
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        writers = Writers(mount.path, 3, random.Random(1))
        writers.start()
        with _dirty(mount):
            writers.work(30)
            assert "is busy" in refused("umount", mount.path)
            writers.work(60)
            assert "everything is flushed" in tectonicfs("umount", "--force", mount.path).stdout
            writers.join()
        mount.wait_gone()
    with mounted(url, tmp_path / "mnt") as mount:
        writers.check_after_crash()
        tectonicfs("umount", mount.path)


@for_root
def test_umount_while_the_store_hangs(tmp_path: Path) -> None:
    """It ends by the deadline with an error, although a thread hangs in the kernel for good; the
    log names the file; and what was synced is there when the device is back."""
    with disk(tmp_path / "disk") as device:
        url = format_volume(device.path, str(tmp_path / "meta.db"))
        with mounted(url, tmp_path / "mnt", *_TIMEOUTS) as mount:
            (mount.path / "kept").write_bytes(b"kept")
            with _dirty(mount):
                device.freeze()
                try:
                    said = _forced(mount)
                finally:
                    device.thaw()
            mount.wait_gone()
            log = mount.log_file.read_text()
        assert "is unmounted, but its daemon ended with an error" in said
        assert "has not answered" in said
        assert "/dirty could not be flushed" in log
        with mounted(url, tmp_path / "mnt") as mount:
            assert (mount.path / "kept").read_bytes() == b"kept"
            tectonicfs("umount", mount.path)


@pytest.mark.postgres
def test_umount_while_the_database_is_gone(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """The same with a stopped server: an error by the deadline, and the log names what is lost."""
    url = format_volume(tmp_path, postgres_server.fresh_url())
    with mounted(url, tmp_path / "mnt", *_TIMEOUTS) as mount:
        (mount.path / "kept").write_bytes(b"kept")
        with _dirty(mount):
            inode = (mount.path / "dirty").stat().st_ino
            postgres_server.stop()
            try:
                said = _forced(mount)
            finally:
                postgres_server.start()
        mount.wait_gone()
        log = mount.log_file.read_text()
    assert "ended with an error" in said
    assert f"lost, because they could not be flushed: inodes [{inode}]" in log
    with mounted(url, tmp_path / "mnt") as mount:
        assert (mount.path / "kept").read_bytes() == b"kept"
        assert (mount.path / "dirty").read_bytes() == b""
        tectonicfs("umount", mount.path)


def test_umount_of_a_stopped_daemon_gives_up_and_says_so(tmp_path: Path) -> None:
    """A daemon that does not run at all costs the given time, not for ever; once it runs again it
    flushes and ends as it was told."""
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        (mount.path / "kept").write_bytes(b"kept")
        os.kill(mount.pid, signal.SIGSTOP)
        try:
            assert "still flushing" in refused("umount", "--force", "--timeout", "1", mount.path)
        finally:
            os.kill(mount.pid, signal.SIGCONT)
        mount.wait_gone()
        assert "is unmounted and flushed" in mount.log_file.read_text()
