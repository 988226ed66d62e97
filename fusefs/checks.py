"""What can be known before mounting, each with what to do about it."""

from __future__ import annotations

import os
import shutil
import stat
from importlib.util import find_spec
from pathlib import Path

from fusefs import registry
from fusefs.mounttable import FSTYPE, find_mount, mount_point
from fusefs.options import MountOptions
from tectonic_client.errors import MountError


def check(directory: str, options: MountOptions) -> str:
    """The directory's normalised path. Raises MountError that says what to do first."""
    _check_pyfuse3()
    _check_metrics(options)
    _check_device()
    _check_helper(options)
    place = mount_point(directory)
    _check_unmounted(place, options)
    _check_directory(place, options)
    return place


def _check_pyfuse3() -> None:
    try:
        import pyfuse3  # noqa: F401
    except ImportError as error:
        raise MountError(
            f"mounting needs pyfuse3 ({error}): ./run install installs it with what it needs,"
            " or apt install fuse3 libfuse3-dev pkg-config gcc, then pip install pyfuse3"
        ) from error


def _check_metrics(options: MountOptions) -> None:
    if options.metrics is not None and find_spec("prometheus_client") is None:
        raise MountError("-o metrics needs prometheus_client: pip install prometheus_client")


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise MountError(
            "there is no /dev/fuse: load the module (modprobe fuse); in a container start it with"
            " --device /dev/fuse --cap-add SYS_ADMIN"
        ) from error
    except OSError as error:
        raise MountError(
            f"cannot open /dev/fuse: {error.strerror}; let everybody open it (chmod 666 /dev/fuse);"
            " in a container start it with --device /dev/fuse --cap-add SYS_ADMIN"
        ) from error


def _check_helper(options: MountOptions) -> None:
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise MountError("fusermount3 is missing: apt install fuse3, or mount as root")
    if options.allow_other and not may_allow_others():
        raise MountError(
            "allow_other is for root only, unless /etc/fuse.conf has the line user_allow_other"
        )


def may_allow_others(config: Path = Path("/etc/fuse.conf")) -> bool:
    """Whether users other than root may mount with allow_other (mount.fuse3(8))."""
    try:
        lines = config.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def _check_unmounted(place: str, options: MountOptions) -> None:
    found = find_mount(place)
    if found is None:
        return
    if found.fstype == FSTYPE:
        with registry.living_daemon(place, found.user_id) as living:
            if living is not None:
                raise MountError(f"{place} is already a mount of volume {found.source}")
        raise MountError(
            f"{place} is a stale mount whose daemon is gone: first run tectonicfs umount {place}"
        )
    if not options.nonempty:
        raise MountError(
            f"{place} is already a mount point ({found.fstype}); -o nonempty mounts over it"
        )


def _check_directory(place: str, options: MountOptions) -> None:
    try:
        if not stat.S_ISDIR(os.stat(place).st_mode):
            raise MountError(f"{place} is not a directory")
        if not options.nonempty and os.listdir(place):
            raise MountError(
                f"{place} is not empty and its files would be hidden; -o nonempty allows it"
            )
    except FileNotFoundError as error:
        raise MountError(f"{place} does not exist: first run mkdir -p {place}") from error
    except OSError as error:
        raise MountError(f"cannot look into {place}: {error.strerror}") from error
