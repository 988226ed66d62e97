"""A mount whose store or database goes away: errors by a deadline, and all is well again after."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.fusefs.devices import disk, for_root, memory_device
from tests.fusefs.mounts import MountedVolume, format_volume, mounted, tectonicfs
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]

_TIMEOUTS = ("store_timeout=1", "metadata_timeout=1")

_BY_S = 10.0
"""A call on a mount with these timeouts fails by then: it may need several of them."""


def _error_of(call: Callable[[], object]) -> int | None:
    """The errno of what must not take long; None where it succeeds."""
    started = time.monotonic()
    try:
        call()
    except OSError as error:
        return error.errno
    finally:
        assert time.monotonic() - started < _BY_S
    return None


def _written_and_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _await(path: Path, data: bytes) -> None:
    """Write and sync, which succeeds soon after what was gone is back."""
    until = time.monotonic() + 4 * _BY_S
    while _error_of(lambda: _written_and_synced(path, data)) is not None:
        assert time.monotonic() < until, "it did not recover"


@contextmanager
def _surviving(url: str, directory: Path) -> Iterator[MountedVolume]:
    """A mount that something happens to: what it acknowledged before and after that is there, for
    itself and for the next mount."""
    data = os.urandom(300_000)
    names = ("synced", "closed", "after")

    def check(root: Path) -> None:
        for name in names:
            assert (root / name).read_bytes() == data

    with mounted(url, directory, *_TIMEOUTS) as mount:
        _written_and_synced(mount.path / "synced", data)
        (mount.path / "closed").write_bytes(data)
        yield mount
        _await(mount.path / "after", data)
        check(mount.path)
        tectonicfs("umount", mount.path)
    with mounted(url, directory) as mount:
        check(mount.path)
        tectonicfs("umount", mount.path)


# --- stores -----------------------------------------------------------------------------------


@for_root
def test_a_store_whose_device_freezes(tmp_path: Path) -> None:
    """Every write hangs in the kernel: the writer gets EIO by the deadline, other calls go on, and
    when the device is back so is the mount."""
    with disk(tmp_path / "disk") as device:
        url = format_volume(device.path, str(tmp_path / "meta.db"))
        with _surviving(url, tmp_path / "mnt") as mount:
            device.freeze()
            try:
                lost = mount.path / "lost"
                assert _error_of(lambda: _written_and_synced(lost, b"x")) == errno.EIO
                assert _error_of(lambda: os.mkdir(mount.path / "directory")) is None
                assert _error_of(lambda: os.listdir(mount.path)) is None
                assert "has not answered" in mount.log_file.read_text()
            finally:
                device.thaw()


def test_a_store_on_a_mount_whose_daemon_stops(tmp_path: Path) -> None:
    """A store directory that is itself a network or FUSE mount without an answer: reads and writes
    fail by the deadline, and work again when it answers."""
    below = format_volume(tmp_path)
    with mounted(below, tmp_path / "below") as carrier:
        upper = tmp_path / "upper"
        upper.mkdir()
        url = format_volume(carrier.path, str(upper / "meta.db"))
        with _surviving(url, upper / "mnt") as mount:
            content = os.urandom(100_000)
            _written_and_synced(mount.path / "cold", content)
            os.kill(carrier.pid, signal.SIGSTOP)
            try:
                assert _error_of(lambda: _written_and_synced(mount.path / "l", b"x")) == errno.EIO
                with (mount.path / "cold").open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    assert _error_of(lambda: file.read(1)) == errno.EIO
            finally:
                os.kill(carrier.pid, signal.SIGCONT)
            _await(mount.path / "l", b"y")
            assert (mount.path / "cold").read_bytes() == content
        tectonicfs("umount", carrier.path)


@for_root
def test_a_store_that_becomes_read_only(tmp_path: Path) -> None:
    """Writers get EROFS, readers read on; once it is writable again so is the mount."""
    with memory_device(tmp_path / "device", "32m") as device:
        url = format_volume(device.path, str(tmp_path / "meta.db"))
        with _surviving(url, tmp_path / "mnt") as mount:
            device.remount("ro")
            lost = mount.path / "lost"
            assert _error_of(lambda: _written_and_synced(lost, b"x")) == errno.EROFS
            assert _error_of((mount.path / "synced").read_bytes) is None
            device.remount("rw")


def test_a_store_directory_that_is_moved_away_and_back(tmp_path: Path) -> None:
    """The mount holds its store open: it neither notices nor writes into what takes its place."""
    url = format_volume(tmp_path)
    store, away = tmp_path / "store", tmp_path / "away"
    with _surviving(url, tmp_path / "mnt") as mount:
        store.rename(away)
        store.mkdir()
        _written_and_synced(mount.path / "meanwhile", b"x")
        assert os.listdir(store) == []
        store.rmdir()
        away.rename(store)


@for_root
def test_a_store_whose_device_fails_every_request(tmp_path: Path) -> None:
    """EIO at once, for reads too; after a restart of both everything that was synced is there."""
    content = os.urandom(100_000)
    with disk(tmp_path / "disk") as device:
        url = format_volume(device.path, str(tmp_path / "meta.db"))
        with mounted(url, tmp_path / "mnt", *_TIMEOUTS) as mount:
            _written_and_synced(mount.path / "synced", content)
            device.lose_power()
            assert _error_of(lambda: _written_and_synced(mount.path / "l", b"x")) == errno.EIO
            tectonicfs("umount", mount.path)
        device.detach()
        device.attach()
        with mounted(url, tmp_path / "mnt") as mount:
            assert (mount.path / "synced").read_bytes() == content
            tectonicfs("umount", mount.path)


# --- metadata ---------------------------------------------------------------------------------


@for_root
def test_an_embedded_database_whose_disk_is_full(tmp_path: Path) -> None:
    """Changes get ENOSPC, reads go on, and nothing is lost; with room again all is well."""
    with memory_device(tmp_path / "device", "8m") as device:
        url = format_volume(tmp_path, str(device.path / "meta.db"))
        with _surviving(url, tmp_path / "mnt") as mount:
            filler = device.fill()
            for number in range(10_000):
                error = _error_of(lambda n=number: os.mkdir(mount.path / f"d{n}"))  # type: ignore[misc]
                if error is not None:
                    break
            assert error == errno.ENOSPC
            assert _error_of((mount.path / "synced").read_bytes) is None
            filler.unlink()
            made = {name for name in os.listdir(mount.path) if name.startswith("d")}
            assert made == {f"d{n}" for n in range(number)}


@contextmanager
def _stopped(server: PostgresServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@contextmanager
def _frozen(server: PostgresServer) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.parametrize("gone", [_stopped, _frozen])
def test_a_database_server_that_goes_away(
    postgres_server: PostgresServer,
    tmp_path: Path,
    gone: Callable[[PostgresServer], AbstractContextManager[None]],
) -> None:
    """Stopped or frozen: calls fail by the deadline; what an open file holds is kept, and is there
    when the server is back."""
    url = format_volume(tmp_path, postgres_server.fresh_url())
    with _surviving(url, tmp_path / "mnt") as mount:
        with (mount.path / "open").open("wb", buffering=0) as file:
            file.write(b"kept")
            with gone(postgres_server):
                assert _error_of(lambda: os.mkdir(mount.path / "d")) in (errno.EIO, errno.ETIMEDOUT)
                assert _error_of(lambda: os.fsync(file.fileno())) == errno.EIO
            _await(mount.path / "l", b"x")
            os.fsync(file.fileno())
        assert (mount.path / "open").read_bytes() == b"kept"
