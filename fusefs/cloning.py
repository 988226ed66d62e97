"""`tectonicfs clone`: a client of its own makes the clone, beside the mounts.

Only what was closed or flushed can be seen by it. The kernel lets a user look and write where he
may; a clone goes around the kernel, so that is asked first.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

from rich.console import Console

from fusefs.places import locate
from tectonic_client.blocking import BlockingVolume
from tectonic_client.errors import Exists, MountError, NotFound, NotPermitted
from tectonic_client.filesystem.cloning import CloneReport
from tectonic_client.types import Owner
from tectonic_client.volume import Volume, VolumeOptions


def clone(source: str, target: str, meta_url: str | None) -> CloneReport:
    """Clone by paths of this machine, or of the volume `meta_url`.

    Raises MountError (no mounted volume, two of them), Exists, NotFound, NotPermitted, and what
    `FileSystem.clone` raises.
    """
    if meta_url is not None:
        return _clone(meta_url, source, target)
    old, new = locate(source), locate(target)
    if old.volume != new.volume:
        raise MountError(f"{source} and {target} are in two volumes: copy it instead")
    _check_permissions(source, target)
    return _clone(old.volume, old.path, new.path)


def _check_permissions(source: str, target: str) -> None:
    if os.path.lexists(target):
        raise Exists(f"{target} exists: a clone gets a new name")
    parent = os.path.dirname(os.path.abspath(target))
    for path in (source, parent):
        if not os.path.lexists(path):
            raise NotFound(f"{path}: no such file or directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise NotPermitted(f"{parent} may not be written")
    if os.path.exists(source) and not os.access(source, os.R_OK):
        raise NotPermitted(f"{source} may not be read")


def _clone(meta_url: str, source: str, target: str) -> CloneReport:
    owner = None if os.geteuid() == 0 else Owner(os.geteuid(), os.getegid())
    parent, name = os.path.split(target.rstrip("/"))
    console = Console(stderr=True)

    with console.status("cloning") if console.is_terminal else nullcontext() as status:

        def show(report: CloneReport) -> None:
            if status is not None:
                status.update(f"cloning: {report.files} files, {report.directories} directories")

        async def work(volume: Volume) -> CloneReport:
            fs = volume.filesystem
            inode = await fs.resolve(source, follow=False)
            directory = await fs.resolve(parent or "/")
            return await fs.clone(inode, directory, os.fsencode(name), owner, show)

        with BlockingVolume(meta_url, VolumeOptions(client="clone")) as volume:
            return volume.run(work)
