"""Makes reads cold: empties the page cache between phases, and tells what came from the device.

A virtual machine with free page reporting gives memory back to its host within seconds of its
being freed, and pays about 10 us a page to get it again: as much as reading it from flash. What
dropped caches leave is such memory, so whatever filled the page cache next would measure the
host. `drop` therefore touches free memory before a phase, for every place alike.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from tectonic_client.limits import GiB, KiB

_DROP_CACHES: Final = "/proc/sys/vm/drop_caches"

_WARM_MEMORY_BYTES: Final = 3 * GiB // 2
"""The page cache of a phase (1 GiB of file), and some for the processes."""

_AVAILABLE_SHARE: Final = 4
"""At most one part in so many of the memory that is available."""


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
    else:
        for path in directory.rglob("*"):
            if path.is_file():
                _forget(path)
    _warm_free_memory(min(_WARM_MEMORY_BYTES, _available_bytes() // _AVAILABLE_SHARE))


def _available_bytes() -> int:
    """Memory that can be had without swapping (proc(5), /proc/meminfo, MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * KiB
    raise AssertionError("the kernel does not tell the available memory")


def _warm_free_memory(size_bytes: int) -> None:
    """Make the host back that much free memory: take it, touched by the kernel, and free it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, size_bytes, flags).close()


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
