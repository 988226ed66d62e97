"""Where a path of this machine lies in a mounted volume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from fusefs import registry
from fusefs.mounttable import FSTYPE, Mount, parse_mountinfo
from tectonic_client.errors import MountError


class Place(NamedTuple):
    """A path in a volume; `volume` is its metadata URL."""

    volume: str
    path: str


def locate(path: str) -> Place:
    """The place of a path, which need not exist; a symbolic link at its end is not followed.

    Raises MountError where it lies in no volume that is mounted here, or the volume's URL would
    need a password, which nobody keeps.
    """
    if not path:
        raise MountError("a path is '': give the path below a mount")
    parent, name = os.path.split(os.path.abspath(path))
    real = os.path.normpath(os.path.join(os.path.realpath(parent), name))
    mount = _mount_of(real)
    if mount is None or mount.fstype != FSTYPE:
        raise MountError(
            f"{path} is not below a mount of tectonicfs: give two paths below one mount, or with"
            " --volume META_URL two paths in that volume"
        )
    with registry.living_daemon(mount.directory, mount.user_id) as daemon:
        url = None if daemon is None else daemon.state.volume
    if url is None:
        raise MountError(
            f"{mount.directory} is a stale mount whose daemon is gone: run tectonicfs umount"
            f" {mount.directory} and mount it again"
        )
    if "***" in url:
        raise MountError(
            f"the mount on {mount.directory} does not tell the password of {url}: put it into"
            " ~/.pgpass and mount without it, or give --volume META_URL and two paths in the volume"
        )
    return Place(url, "/" + real[len(mount.directory) :].lstrip("/"))


def _mount_of(path: str) -> Mount | None:
    """The mount that a path lies in: of those that hold it the longest, of these the topmost."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    holding = [
        mount
        for mount in parse_mountinfo(text)
        if path == mount.directory or path.startswith(mount.directory.rstrip("/") + "/")
    ]
    longest = max((len(mount.directory) for mount in holding), default=0)
    return next((m for m in reversed(holding) if len(m.directory) == longest), None)
