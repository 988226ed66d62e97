"""kill -9 and power loss under load: what was acknowledged is there, nothing is wrong or leaks."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tectonic_client.volume import open_volume
from tests.fusefs.devices import disk, for_root
from tests.fusefs.mounts import format_volume, mounted, tectonicfs
from tests.fusefs.witness import Writers
from tests.leaks import assert_no_leaks, clean

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("fuse")]

_SHORT = range(3)
_LONG = range(100, 140)


def _seeds(count: range, *, stress: range) -> list[object]:
    return [*count, *(pytest.param(seed, marks=pytest.mark.stress) for seed in stress)]


def _check_leaks(url: str) -> None:
    async def main() -> None:
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(main)


@pytest.mark.parametrize("seed", _seeds(_SHORT, stress=_LONG))
def test_sigkill_of_the_daemon_loses_nothing_that_was_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    """After kill -9 under load every directory is as the last answered call left it, or as the one
    under way would have: close and fsync keep, rename is atomic, and nothing leaks."""
    rng = random.Random(seed)
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        writers = Writers(mount.path, 3, rng)
        writers.start()
        writers.work(rng.randrange(30, 300))
        signal.pidfd_send_signal(mount.lives, signal.SIGKILL)
        writers.join()
        mount.wait_gone()
        tectonicfs("umount", mount.path)
    with mounted(url, tmp_path / "mnt") as mount:
        writers.check_after_crash()
        tectonicfs("umount", mount.path)
    _check_leaks(url)


@for_root
@pytest.mark.parametrize("seed", _seeds(_SHORT, stress=_LONG))
def test_a_power_loss_takes_nothing_back_that_was_synced(tmp_path: Path, seed: int) -> None:
    """The disks with chunks and metadata lose power under load: each directory is in a state that
    it had since its last answered fsync, whole, and nothing leaks."""
    rng = random.Random(seed)
    # Two disks: a sync of one journal must not make the other's writes durable.
    with disk(tmp_path / "chunks") as chunks, disk(tmp_path / "metadata") as metadata:
        url = format_volume(chunks.path, str(metadata.path / "meta.db"))
        with mounted(url, tmp_path / "mnt") as mount:
            writers = Writers(mount.path, 3, rng)
            writers.start()
            writers.work(rng.randrange(30, 300))
            for device in (chunks, metadata):
                device.lose_power()
            signal.pidfd_send_signal(mount.lives, signal.SIGKILL)
            writers.join()
            mount.wait_gone()
            tectonicfs("umount", mount.path)
        for device in (chunks, metadata):
            device.detach()
            device.attach()
        with mounted(url, tmp_path / "mnt") as mount:
            writers.check_after_power_loss()
            tectonicfs("umount", mount.path)
        _check_leaks(url)


@for_root
def test_fsync_of_a_file_or_directory_is_what_survives_a_power_loss(tmp_path: Path) -> None:
    """fsync and fdatasync of a file keep its bytes, fsync of a directory keeps its names, and what
    was only closed after the last of them is gone: so it was these that kept the rest."""

    def sync(path: Path, how: Callable[[int], None]) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        how(descriptor)
        os.close(descriptor)

    with disk(tmp_path / "disk") as device:
        url = format_volume(device.path)
        with mounted(url, tmp_path / "mnt") as mount:
            for number, how in enumerate((os.fsync, os.fdatasync)):
                (mount.path / f"file{number}").write_bytes(b"kept")
                sync(mount.path / f"file{number}", how)
            (mount.path / "directory").mkdir()
            (mount.path / "file0").rename(mount.path / "directory" / "renamed")
            sync(mount.path / "directory", os.fsync)
            (mount.path / "closed").write_bytes(b"not kept")
            device.lose_power()
            signal.pidfd_send_signal(mount.lives, signal.SIGKILL)
            mount.wait_gone()
            tectonicfs("umount", mount.path)
        device.detach()
        device.attach()
        with mounted(url, tmp_path / "mnt") as mount:
            assert sorted(os.listdir(mount.path)) == ["directory", "file1"]
            assert (mount.path / "directory" / "renamed").read_bytes() == b"kept"
            assert (mount.path / "file1").read_bytes() == b"kept"
            tectonicfs("umount", mount.path)
