"""Which machine and which commit a result belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("trio", "pyfuse3", "apsw", "crc32c", "numpy", "torch", "safetensors")

_GIT_TIMEOUT_S: Final = 10.0


def commit() -> str:
    """Commit of the checkout that this code runs from, `-dirty` if changed; else the version."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent, timeout=_GIT_TIMEOUT_S,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return f"version {version('tectonicfs')}"
    return described.stdout.strip()


def describe(directory: Path) -> dict[str, Any]:
    """Facts about this machine, and the disk that `directory` is on. Sizes in bytes."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "disk": _disk(directory),
        "python": platform.python_version(),
        "packages": dict(_versions()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _disk(directory: Path) -> dict[str, Any]:
    usage = os.statvfs(directory)
    found = {
        "bytes": usage.f_blocks * usage.f_frsize,
        "free_bytes": usage.f_bavail * usage.f_frsize,
    }
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            filesystem, source, options = after.split(" ")[:3]
            return found | {"filesystem": filesystem, "device": source, "options": options}
    return found


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
