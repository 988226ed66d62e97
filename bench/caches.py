"""Makes reads cold: empties the page cache between phases, and tells what came from the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_DROP_CACHES: Final = "/proc/sys/vm/drop_caches"


def method() -> str:
    """How caches are dropped on this machine: `drop_caches`, or `posix_fadvise` without root."""
    return "drop_caches" if os.access(_DROP_CACHES, os.W_OK) else "posix_fadvise"


def drop(directory: Path) -> None:
    """Forget cached pages: all of the machine's as root, else those of files below `directory`.

    Dirty pages are written first, those of earlier work too, so that nobody else pays for them.
    """
    os.sync()
    if method() == "drop_caches":
        Path(_DROP_CACHES).write_text("3")
        return
    for path in directory.rglob("*"):
        if path.is_file():
            _forget(path)


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def device_read_bytes(pid: int | str = "self") -> int:
    """Bytes that a process has made the devices read since it started (proc(5), /proc/PID/io)."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise AssertionError("the kernel has no I/O accounting")
