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
    parent, name = os.path.split(os.path.abspath(path))
    real = os.path.normpath(os.path.join(os.path.realpath(parent), name))
    mount = _mount_of(real)
    if mount is None or mount.fstype != FSTYPE:
        raise MountError(f"{path} is not in a mounted volume: name the volume with --volume")
    with registry.living_daemon(mount.directory, mount.user_id) as daemon:
        url = None if daemon is None else daemon.state.volume
    if url is None:
        raise MountError(f"the daemon of {mount.directory} is gone: name the volume with --volume")
    if "***" in url:
        raise MountError(f"{url} needs its password: name the volume with --volume")
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
