"""What the checkpoint benchmark measures, by name, and the figures that were promised.

Pure: rows in, bars out. A bar whose rows were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.report import Bar, Row, at_least, at_most, find_row
from bench.runner import Metric
from tectonic_client.limits import DEFAULT_MEMORY_LIMIT_BYTES, MiB

WRITE: Final = Metric("write", "GB/s")
READ: Final = Metric("cold read", "GB/s")
MEMORY: Final = Metric("peak memory", "MiB")

RAW: Final = "raw"
API: Final = "api"
DCP: Final = "dcp"
TORCH: Final = "torch"
SAFETENSORS: Final = "safetensors"
MOUNT: Final = "mount"
MOUNT_FILE: Final = "mount-file"
NULL_FILE: Final = "null-file"

CASES: Final = {
    RAW: "the same bytes by O_DIRECT, fdatasync for each 8 MiB file: the limit",
    API: "CheckpointManager, all ranks",
    DCP: "torch.distributed.checkpoint's FileSystemWriter and Reader over gloo, all ranks",
    TORCH: "torch.save with fsync and torch.load, a file for each rank",
    SAFETENSORS: "save_file with fsync and load_file, a file for each rank",
    MOUNT: "through the mount, a file for each rank: 4 MiB writes, fsync",
    MOUNT_FILE: "through the mount, one file by one rank",
    NULL_FILE: "the same through a FUSE file system that stores nothing",
}

REFERENCES: Final = (RAW, DCP, TORCH, SAFETENSORS, NULL_FILE)

_RAW_SHARE: Final = 0.80
_MOUNT_RAW_SHARE: Final = 0.60
_MOUNT_NULL_SHARE: Final = 0.80


def checkpoint_bars(rows: Sequence[Row]) -> tuple[Bar, ...]:
    """The bars that these rows decide."""
    return tuple(_bars(rows))


def _bars(rows: Sequence[Row]) -> Iterator[Bar]:
    if (share := _ratio(rows, WRITE, API, RAW)) is not None:
        yield at_least("save / raw write", share, _RAW_SHARE)
    for other in (DCP, TORCH, SAFETENSORS):
        if (share := _ratio(rows, WRITE, API, other)) is not None:
            yield at_least(f"save / {other}", share, 1.0)
    if (share := _ratio(rows, READ, API, RAW)) is not None:
        yield at_least("load / raw read", share, _RAW_SHARE)
    if (share := _ratio(rows, WRITE, MOUNT_FILE, RAW)) is not None:
        yield at_least("write through the mount / raw", share, _MOUNT_RAW_SHARE)
    yield from _mount_read(rows)
    for case, owner in ((API, "a rank's client"), (MOUNT, "the mount with 8 writers")):
        if (row := find_row(rows, case, MEMORY.name)) is not None:
            limit_mib = DEFAULT_MEMORY_LIMIT_BYTES / MiB
            yield at_most(f"peak memory of {owner} (MiB)", max(row.samples), limit_mib)


def _mount_read(rows: Sequence[Row]) -> Iterator[Bar]:
    """Beside the device; or, where FUSE itself is the limit, beside FUSE itself."""
    raw = _ratio(rows, READ, MOUNT_FILE, RAW)
    null = _ratio(rows, READ, MOUNT_FILE, NULL_FILE)
    if null is not None and (raw is None or raw < _MOUNT_RAW_SHARE):
        yield at_least("cold read through the mount / null FUSE", null, _MOUNT_NULL_SHARE)
    elif raw is not None:
        yield at_least("cold read through the mount / raw", raw, _MOUNT_RAW_SHARE)


def _ratio(rows: Sequence[Row], metric: Metric, case: str, other: str) -> float | None:
    found, reference = find_row(rows, case, metric.name), find_row(rows, other, metric.name)
    if found is None or reference is None:
        return None
    return found.median / reference.median
