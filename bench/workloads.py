"""Plain functions that move bytes: straight to the device, and as programs use a file system.

The direct ones are the reference for all throughput here: files of one chunk, `O_DIRECT` from and
to reused aligned memory, `fdatasync` each. They know nothing of what they are compared with.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.errors import BenchError
from tectonic_client.limits import ALIGNMENT_BYTES, DEFAULT_CHUNK_BYTES, MiB

DIRECT_FILE_BYTES: Final = DEFAULT_CHUNK_BYTES

REQUEST_BYTES: Final = 4 * MiB
"""What programs that care about speed pass to one read or write."""

_STAMP_BYTES: Final = 8

_HUGE_PAGE_BYTES: Final = 2 * MiB


# --- straight to the device -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DirectFiles:
    """Files of `DIRECT_FILE_BYTES`, `total_bytes` in all, in one directory."""

    directory: Path
    total_bytes: int

    def share(self, worker: int, workers: int) -> Iterator[tuple[Path, int]]:
        """Path and size of each file that one of `workers` workers moves."""
        count = -(-self.total_bytes // DIRECT_FILE_BYTES)
        for number in range(worker, count, workers):
            size = min(DIRECT_FILE_BYTES, self.total_bytes - number * DIRECT_FILE_BYTES)
            yield self.directory / f"{number:06d}", -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


DirectWork = Callable[[memoryview, Iterable[tuple[Path, int]]], None]


def direct_buffer() -> memoryview:
    """Memory for one worker in huge pages, touched.

    A request from small pages is cut into hundreds of segments; on virtual disks that halves the
    speed. Kernels without huge pages refuse the advice, and small pages are their best.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, DIRECT_FILE_BYTES + _HUGE_PAGE_BYTES, flags=flags)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    memory = memoryview(mapping)[start : start + DIRECT_FILE_BYTES]
    memory[:] = os.urandom(MiB) * (DIRECT_FILE_BYTES // MiB)
    return memory


def write_direct(buffer: memoryview, files: Iterable[tuple[Path, int]]) -> None:
    """Create each file with the buffer's bytes, durable."""
    for path, size in files:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            _expect(os.pwrite(descriptor, buffer[:size], 0), size, path)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def read_direct(buffer: memoryview, files: Iterable[tuple[Path, int]]) -> None:
    """Read each file into the buffer."""
    for path, size in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            _expect(os.preadv(descriptor, [buffer[:size]], 0), size, path)
        finally:
            os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- as programs use a file system ------------------------------------------------------------


def sequential_buffer() -> memoryview:
    """Memory for one sequential reader or writer, touched."""
    return memoryview(bytearray(os.urandom(MiB)) * (REQUEST_BYTES // MiB))


def write_sequentially(path: Path, size_bytes: int, buffer: memoryview) -> None:
    """Create a file of the buffer's bytes, write after write, then fsync.

    Each write begins with its offset, so that `check_contents` finds bytes in a wrong place.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for offset in range(0, size_bytes, len(buffer)):
            buffer[:_STAMP_BYTES] = offset.to_bytes(_STAMP_BYTES)
            size = min(len(buffer), size_bytes - offset)
            _expect(os.write(descriptor, buffer[:size]), size, path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_sequentially(path: Path, size_bytes: int, buffer: memoryview) -> None:
    """Read a file of `size_bytes` into the buffer, read after read."""
    for _offset in _reads(path, size_bytes, buffer):
        pass


def check_contents(path: Path, size_bytes: int, expected: memoryview) -> None:
    """Raise BenchError unless the file is as `write_sequentially` with that buffer left it."""
    buffer = memoryview(bytearray(len(expected)))
    for offset in _reads(path, size_bytes, buffer):
        size = min(len(buffer), size_bytes - offset)
        stamp = int.from_bytes(buffer[:_STAMP_BYTES])
        if stamp != offset or buffer[_STAMP_BYTES:size] != expected[_STAMP_BYTES:size]:
            raise BenchError(f"{path} reads back wrong at offset {offset}")


def _reads(path: Path, size_bytes: int, buffer: memoryview) -> Iterator[int]:
    """Fill the buffer piece by piece from the file; yields the offset of each piece."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset in range(0, size_bytes, len(buffer)):
            size = min(len(buffer), size_bytes - offset)
            _expect(os.readv(descriptor, [buffer[:size]]), size, path)
            yield offset
    finally:
        os.close(descriptor)


def _expect(moved: int, size: int, path: Path) -> None:
    if moved != size:
        raise BenchError(f"{path}: moved {moved} of {size} bytes")
