"""A checkpoint target as something to measure: write on all ranks, read back cold, check, remove.

Everything but the write and the read is outside the timing. A cold read that did not come from the
device is an error: its figure would be that of a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import caches
from bench.bars import RAW, READ, WRITE
from bench.errors import BenchError
from bench.ranks import RankPool
from bench.runner import Metric, OnStep
from bench.targets import CheckpointTarget, RawDevice, tell, use

_RAW_WORKERS: Final = (2, 4, 8)
"""Numbers of threads, over all ranks, of which the fastest is the raw device's figure."""

_RAW_TRIES: Final = 2

_COLD_SHARE: Final = 0.9
"""Part of its bytes that a cold read must have made the device read; the rest may be metadata
caches, or the last pages that a mount still had in hand."""


@dataclass(slots=True)
class TargetCase:
    """A target on all ranks of a pool, `size_bytes` in all.

    `device_reader` is the process that reads the device for the ranks (a mount's daemon; None: the
    ranks do), `on_device` whether there is a device at all.
    """

    name: str
    pool: RankPool
    size_bytes: int
    directory: Path
    device_reader: int | None = None
    on_device: bool = True
    _steps: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def open(self, target: CheckpointTarget) -> None:
        """Open the target on every rank."""
        self.pool.call(use, self.name, target)

    def close(self) -> None:
        """Close the target on every rank."""
        self.pool.call(tell, self.name, "close")

    def measure(self) -> Mapping[Metric, float]:
        """Write, read, check and remove one step."""
        step = next(self._steps)
        self.pool.call(tell, self.name, "prepare", step)
        caches.drop(self.directory)
        written = self.pool.timed(tell, self.name, "save", step)
        caches.drop(self.directory)
        read_s = self._read_cold(step)
        self.pool.call(tell, self.name, "check", step)
        self.pool.call(tell, self.name, "remove", step)
        return {WRITE: self._speed(written.seconds), READ: self._speed(read_s)}

    def _read_cold(self, step: int) -> float:
        before = caches.device_read_bytes(self.device_reader) if self.device_reader else 0
        timing = self.pool.timed(tell, self.name, "load", step)
        came = timing.device_read_bytes
        if self.device_reader:
            came = caches.device_read_bytes(self.device_reader) - before
        if self.on_device and came < _COLD_SHARE * self.size_bytes:
            raise BenchError(
                f"{self.name}: only {came} of {self.size_bytes} bytes of a cold read came from the"
                " device: something caches below or beside the page cache"
            )
        return timing.seconds

    def _speed(self, seconds: float) -> float:
        """GB/s."""
        return self.size_bytes / 1e9 / seconds


def fastest_raw(pool: RankPool, directory: Path, size_bytes: int, on_step: OnStep) -> RawDevice:
    """The raw device with the numbers of threads that are fastest here, for writes and for reads.

    Also the device's own warm-up.
    """
    best: dict[Metric, tuple[float, int]] = {}
    for workers in _RAW_WORKERS * _RAW_TRIES:
        on_step(f"{RAW}: {workers} threads")
        case = TargetCase(f"{RAW} with {workers} threads", pool, size_bytes, directory)
        case.open(RawDevice(directory, size_bytes, workers, workers))
        for metric, speed in case.measure().items():
            best[metric] = max(best.get(metric, (0.0, 0)), (speed, workers))
        case.close()
    return RawDevice(directory, size_bytes, best[WRITE][1], best[READ][1])


FASTEST_RAW_STEPS: Final = len(_RAW_WORKERS) * _RAW_TRIES
