"""Small file systems that lose their power, freeze, fill up or become read-only, for root only."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

for_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small device")

_TIMEOUT_S: Final = 60

_SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN of linux/ext4.h."""

_WITHOUT_LOG: Final = struct.pack("I", 2)
"""EXT4_GOING_FLAGS_NOLOGFLUSH: what is not on the device yet never gets there."""


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)


class Device:
    """A file system mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remount(self, mode: str) -> None:
        """`ro` or `rw`."""
        _run("mount", "-o", f"remount,{mode}", self.path)

    def fill(self) -> Path:
        """Use up all space; returns the file that does."""
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(64 << 10))
            except OSError:
                os.fsync(file.fileno())
        return filler


@contextmanager
def memory_device(path: Path, size: str) -> Iterator[Device]:
    """A tmpfs of that size."""
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", path)
    try:
        yield Device(path)
    finally:
        _run("umount", path)


class Disk(Device):
    """An ext4 file system on a loop device, as it would be on a disk."""

    def __init__(self, path: Path, image: Path) -> None:
        super().__init__(path)
        self._image = image

    def attach(self) -> None:
        """Mount it; after a power loss its journal is replayed."""
        _run("mount", "-o", "loop", self._image, self.path)

    def detach(self) -> None:
        """Unmount it; nobody may use it."""
        _run("umount", self.path)

    def lose_power(self) -> None:
        """From now on nothing reaches the device: what was not synced is lost (ext4(5)).

        The device's own cache is taken for durable, so a sync that does not flush it goes unseen.
        """
        directory = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, _WITHOUT_LOG)
        finally:
            os.close(directory)

    def freeze(self) -> None:
        """From now on every write hangs, uninterruptibly."""
        _run("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """What hangs goes on."""
        _run("fsfreeze", "--unfreeze", self.path)


@contextmanager
def disk(path: Path, size_mib: int = 128) -> Iterator[Disk]:
    """A new disk, mounted; it must be mounted at the end, too."""
    image = path.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    _run("mkfs.ext4", "-q", "-F", image)
    path.mkdir()
    made = Disk(path, image)
    made.attach()
    try:
        yield made
    finally:
        made.detach()
        image.unlink()
