"""Workloads that move bytes in large files: in sequence, through a mapping, at random places."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench import caches
from bench.errors import BenchError
from bench.fs.places import JOBS, RATE, SPEED, Place, Recorder
from bench.ranks import Rank
from bench.workloads import (
    REQUEST_BYTES,
    DirectFiles,
    DirectWork,
    direct_buffer,
    read_direct,
    read_sequentially,
    sequential_buffer,
    write_direct,
    write_sequentially,
)
from tectonic_client.limits import DEFAULT_MEMORY_LIMIT_BYTES, KiB

RANDOM_BYTES: Final = 4 * KiB

_COLD_SHARE: Final = 0.9
"""Part of its bytes that a cold read of ours must have made the device read."""


# --- in sequence ------------------------------------------------------------------------------


def sequential_one(recorder: Recorder) -> None:
    """Write one file, read it cold, read it cold through a mapping."""
    path, size = recorder.place.directory / "sequential", recorder.tools.sizes.file_bytes
    buffer = sequential_buffer()
    with recorder.phase("seq-write-1", SPEED, size):
        write_sequentially(path, size, buffer)
    with _from_device(recorder.place, size), recorder.phase("seq-read-1", SPEED, size):
        read_sequentially(path, size, buffer)
    with _from_device(recorder.place, size), recorder.phase("mmap-read", SPEED, size):
        _read_mapped(path, size, buffer)
    path.unlink()


def sequential_four(recorder: Recorder) -> None:
    """The same bytes in several files, written and read at once."""
    directory, jobs = recorder.place.directory, recorder.tools.jobs
    share = recorder.tools.sizes.file_bytes // JOBS
    jobs.call(_make_buffer)
    with recorder.phase("seq-write-4", SPEED, share * JOBS):
        jobs.timed(_write_share, directory, share)
    with recorder.phase("seq-read-4", SPEED, share * JOBS):
        jobs.timed(_read_share, directory, share)
    for number in range(JOBS):
        _share_path(directory, number).unlink()


def raw_one(recorder: Recorder) -> None:
    """The device's own figures, for what is compared with `sequential_one`."""
    _raw(recorder, "seq-write-1", "seq-read-1")


def raw_four(recorder: Recorder) -> None:
    """The device's own figures, for what is compared with `sequential_four`."""
    _raw(recorder, "seq-write-4", "seq-read-4")


def _raw(recorder: Recorder, write_name: str, read_name: str) -> None:
    files = DirectFiles(recorder.place.directory, recorder.tools.sizes.file_bytes)
    shares = [list(files.share(worker, JOBS)) for worker in range(JOBS)]
    buffers = [direct_buffer() for _ in shares]
    with ThreadPoolExecutor(JOBS) as executor:
        with recorder.phase(write_name, SPEED, files.total_bytes):
            _all_at_once(executor, write_direct, buffers, shares)
        with recorder.phase(read_name, SPEED, files.total_bytes):
            _all_at_once(executor, read_direct, buffers, shares)
    for path, _ in (file for share in shares for file in share):
        path.unlink()


def _all_at_once(
    executor: ThreadPoolExecutor, work: DirectWork, buffers: list[memoryview],
    shares: list[list[tuple[Path, int]]],
) -> None:  # fmt: skip
    for _ in executor.map(work, buffers, shares):
        pass


def _read_mapped(path: Path, size: int, buffer: memoryview) -> None:
    """Copy a file out of a mapping, piece after piece, as safetensors does."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as mapped,
    ):
        for offset in range(0, size, REQUEST_BYTES):
            with mapped[offset : offset + REQUEST_BYTES] as piece:
                buffer[: len(piece)] = piece


def _share_path(directory: Path, number: int) -> Path:
    return directory / f"share-{number}"


def _make_buffer(rank: Rank) -> None:
    rank.objects["buffer"] = sequential_buffer()


def _write_share(rank: Rank, directory: Path, size: int) -> None:
    write_sequentially(_share_path(directory, rank.number), size, rank.objects["buffer"])


def _read_share(rank: Rank, directory: Path, size: int) -> None:
    read_sequentially(_share_path(directory, rank.number), size, rank.objects["buffer"])


@contextmanager
def _from_device(place: Place, size: int) -> Iterator[None]:
    """Raise BenchError if what our mount reads in the block did not come from the device.

    It may keep what its memory limit allows; no dropping of caches takes that away.
    """
    if not (place.ours and place.servers):
        yield
        return
    before = sum(map(caches.device_read_bytes, place.servers))
    yield
    came = sum(map(caches.device_read_bytes, place.servers)) - before
    if came < _COLD_SHARE * (size - DEFAULT_MEMORY_LIMIT_BYTES):
        raise BenchError(
            f"{place.name}: only {came} of {size} bytes of a cold read came from the device"
        )


# --- at random places -------------------------------------------------------------------------


def random_places(recorder: Recorder) -> None:
    """Small reads of a cold and a warm file, then small writes with fsync, by several jobs."""
    sizes, jobs = recorder.tools.sizes, recorder.tools.jobs
    path, size, count = recorder.place.directory / "random", sizes.file_bytes, sizes.random_reads
    buffer = sequential_buffer()
    write_sequentially(path, size, buffer)
    jobs.call(_choose, size, count)
    with recorder.phase("random-read-cold", RATE, count * JOBS):
        jobs.timed(_read_randomly, path)
    read_sequentially(path, size, buffer)
    with recorder.phase("random-read-warm", RATE, count * JOBS, warm=True):
        jobs.timed(_read_randomly, path)
    with recorder.phase("random-write", RATE, count * JOBS):
        jobs.timed(_write_randomly, path)
    path.unlink()


def _choose(rank: Rank, size: int, count: int) -> None:
    """The offsets of one job, the same in each run."""
    chosen = random.Random(rank.number)
    pieces = size // RANDOM_BYTES
    rank.objects["offsets"] = [RANDOM_BYTES * chosen.randrange(pieces) for _ in range(count)]


def _offsets(rank: Rank) -> Iterable[int]:
    found: list[int] = rank.objects["offsets"]
    return found


def _read_randomly(rank: Rank, path: Path) -> None:
    buffer = bytearray(RANDOM_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset in _offsets(rank):
            if os.preadv(descriptor, [buffer], offset) != RANDOM_BYTES:
                raise BenchError(f"{path}: a short read at offset {offset}")
    finally:
        os.close(descriptor)


def _write_randomly(rank: Rank, path: Path) -> None:
    piece = os.urandom(RANDOM_BYTES)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for offset in _offsets(rank):
            if os.pwrite(descriptor, piece, offset) != RANDOM_BYTES:
                raise BenchError(f"{path}: a short write at offset {offset}")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
