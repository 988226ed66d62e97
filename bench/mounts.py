"""Mounts that a benchmark makes: a volume of its own by the command as users run it, and the null
file system. Each is a context manager; what is mounted is unmounted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.errors import BenchError
from tectonic_client.limits import DEFAULT_MEMORY_LIMIT_BYTES, KiB

_COMMAND: Final = (sys.executable, "-c", "from tectonic_client.cli.main import main; main()")

_TIMEOUT_S: Final = 300.0

_DAEMON_MODULES: Final = ("fusefs.mounting", "fusefs.session", "tectonic_client.volume")
"""What a mount's daemon has imported before it opens its volume."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system and the process that serves it."""

    directory: Path
    pid: int


def format_volume(base: Path) -> str:
    """A new volume with its metadata and one store below `base`; returns its URL."""
    base.mkdir()
    url = str(base / "meta.db")
    _run("format", url, "--name", "bench", "--store", str(base / "store"))
    return url


@contextmanager
def mounted_volume(base: Path) -> Iterator[Mount]:
    """A new volume, mounted."""
    url = format_volume(base)
    directory = base / "mount"
    directory.mkdir()
    options = f"log_file={base / 'mount.log'},memory_limit={DEFAULT_MEMORY_LIMIT_BYTES}"
    said = _run("mount", url, str(directory), "-o", options)
    found = re.search(r"pid (\d+)", said)
    if found is None:
        raise BenchError(f"tectonicfs mount did not tell its daemon's pid: {said.strip()!r}")
    try:
        yield Mount(directory, int(found[1]))
    except BaseException:
        _run("umount", "--force", str(directory))
        raise
    _run("umount", str(directory))


@contextmanager
def mounted_null(base: Path) -> Iterator[Mount]:
    """The file system that stores nothing."""
    base.mkdir()
    command = [sys.executable, "-m", "bench.nullfs", str(base)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchError(f"the null file system cannot be mounted at {base}")
        try:
            yield Mount(base, process.pid)
        finally:
            # It unmounts and ends; leaving the block waits for that.
            process.stdin.close()


def daemon_baseline_bytes() -> int:
    """Resident memory of a process that has imported what a mount's daemon needs, and no more."""
    code = f"import {', '.join(_DAEMON_MODULES)}\nprint(open('/proc/self/status').read())"
    status = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None, "a process without VmRSS"
    return int(found[1]) * KiB


def why_no_mounts() -> str | None:
    """Why nothing can be mounted here; None if it can."""
    try:
        import pyfuse3  # noqa: F401
    except ImportError as error:
        return f"pyfuse3 cannot be loaded ({error})"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened ({error.strerror})"
    return None


def _run(*arguments: str) -> str:
    """Run the tectonicfs command; returns what it said. Raises BenchError with its error."""
    result = subprocess.run(
        [*_COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if result.returncode != 0:
        said = result.stderr.strip().removeprefix("tectonicfs: ")
        raise BenchError(f"tectonicfs {arguments[0]}: {said}")
    return result.stdout
