"""How much memory our client takes for itself, at its peak: as a rank, and as a mount's daemon.

Measured in processes of their own: one that has run other things before has free memory that the
client would take without being seen to grow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench import memory
from bench.mounts import Mount, daemon_baseline_bytes
from bench.ranks import Rank, RankPool
from bench.targets import CheckpointTarget, make_state, tell, use
from bench.workloads import read_sequentially, sequential_buffer, write_sequentially

MOUNT_WRITERS: Final = 8

_TARGET: Final = "footprint"

_STEP: Final = 1


def rank_growth_bytes(pool: RankPool, target: CheckpointTarget, total_bytes: int) -> list[int]:
    """Peak of each rank over open, save, load and close, above its memory before.

    `pool` is a new one. Before: the client is imported, the state and memory to load it into are
    there.
    """
    pool.call(make_state, total_bytes, 0)
    before = pool.call(_start)
    pool.call(use, _TARGET, target)
    for action in ("prepare", "save", "load", "check"):
        pool.call(tell, _TARGET, action, _STEP)
    peaks = pool.call(_peak)
    pool.call(tell, _TARGET, "close")
    return [peak - start for peak, start in zip(peaks, before, strict=True)]


def _start(rank: Rank) -> int:
    importlib.import_module("tectonic_client.checkpoint")
    memory.reset_peak()
    return memory.resident_bytes()


def _peak(rank: Rank) -> int:
    return memory.peak_resident_bytes()


def mount_growth_bytes(mount: Mount, total_bytes: int) -> int:
    """Peak of a new mount's daemon while several programs write at once, then read at once.

    Above a process that has imported the daemon's modules.
    """
    size = total_bytes // MOUNT_WRITERS
    buffers = [sequential_buffer() for _ in range(MOUNT_WRITERS)]
    for work in (write_sequentially, read_sequentially):
        _all_at_once(work, mount.directory, size, buffers)
    return memory.peak_resident_bytes(mount.pid) - daemon_baseline_bytes()


def _all_at_once(
    work: Callable[[Path, int, memoryview], None], directory: Path, size: int,
    buffers: list[memoryview],
) -> None:  # fmt: skip
    with ThreadPoolExecutor(len(buffers)) as executor:
        futures = [
            executor.submit(work, directory / f"writer-{number}", size, buffer)
            for number, buffer in enumerate(buffers)
        ]
        for future in futures:
            future.result()
