"""The checkpoint benchmark: our API and mount beside the raw device and the usual tools.

Composition of one run: makes a directory of its own on the device in question, the rank processes,
volumes and mounts, hands the cases to the runner, and removes everything.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import caches, machine, mounts
from bench.bars import (
    API,
    CASES,
    MEMORY,
    MOUNT,
    MOUNT_FILE,
    NULL_FILE,
    REFERENCES,
    checkpoint_bars,
)
from bench.cases import FASTEST_RAW_STEPS, TargetCase, fastest_raw
from bench.errors import BenchError
from bench.footprint import MOUNT_WRITERS, mount_growth_bytes, rank_growth_bytes
from bench.ranks import RankPool
from bench.report import Result, Row, with_ratios
from bench.runner import OnStep, interleave, progress
from bench.targets import (
    CheckpointAPI,
    CheckpointTarget,
    DistributedCheckpoint,
    SafetensorsFiles,
    SequentialFiles,
    TorchFiles,
    make_state,
)
from bench.workloads import DIRECT_FILE_BYTES, REQUEST_BYTES, direct_buffer, write_direct
from tectonic_client.cli.parameters import format_size
from tectonic_client.limits import MiB

MEMORY_CASE: Final = "memory"

ALL_CASES: Final = (*CASES, MEMORY_CASE)

_MOUNTED: Final = frozenset({MOUNT, MOUNT_FILE, NULL_FILE})

_SEED: Final = 0
"""Of the states' contents; each rank adds its number."""

_FREE_STEPS: Final = 4
"""Steps' worth of space that must be free: each case removes its step, volumes a little later."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. `directory` is on the device that is measured."""

    directory: Path
    ranks: int
    total_bytes: int
    repeat: int
    cases: frozenset[str]


def run_checkpoint(settings: Settings) -> Result:
    """Run the benchmark. Raises BenchError, RankFailed."""
    unavailable = _unavailable(settings)
    chosen = [name for name in ALL_CASES if name in settings.cases and name not in unavailable]
    steps = (settings.repeat + 1) * len(chosen) + FASTEST_RAW_STEPS + 2
    with tempfile.TemporaryDirectory(prefix="tectonicfs-bench-", dir=settings.directory) as name:
        scratch = Path(name)
        _check_device(scratch, settings)
        with progress(steps) as on_step:
            run = _Run(settings, scratch, chosen, on_step)
            rows = run.throughput() + run.memory()
        config = {
            "directory": str(settings.directory), "ranks": settings.ranks,
            "bytes": settings.total_bytes, "repeat": settings.repeat, "seed": _SEED,
            "caches": caches.method(), "direct_file_bytes": DIRECT_FILE_BYTES,
            "request_bytes": REQUEST_BYTES, "unavailable": unavailable, **run.facts,
        }  # fmt: skip
        return Result(
            "checkpoint", machine.commit(), machine.describe(scratch), config,
            with_ratios(rows, REFERENCES), checkpoint_bars(rows),
        )  # fmt: skip


def _unavailable(settings: Settings) -> dict[str, str]:
    """Reasons of the cases that were asked for and cannot be run."""
    reason = mounts.why_no_mounts()
    return {} if reason is None else dict.fromkeys(settings.cases & _MOUNTED, reason)


def _check_device(scratch: Path, settings: Settings) -> None:
    try:
        write_direct(direct_buffer(), [(scratch / "probe", DIRECT_FILE_BYTES)])
    except OSError as error:
        raise BenchError(
            f"{settings.directory} does not take O_DIRECT ({error.strerror}):"
            " name a directory on a disk with --dir"
        ) from error
    needed = settings.total_bytes * (_FREE_STEPS + settings.repeat)
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise BenchError(
            f"{settings.directory} has {format_size(free)} free, and this run needs"
            f" {format_size(needed)}: name another directory with --dir, or use fewer --bytes"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a case works. `daemon`: the process that reads the device for a mount."""

    directory: Path
    daemon: int | None = None
    meta_url: str = ""


class _Run:
    """One run: `facts` is what it found out about how it measures."""

    def __init__(
        self, settings: Settings, scratch: Path, chosen: list[str], on_step: OnStep
    ) -> None:
        self._settings = settings
        self._scratch = scratch
        self._chosen = chosen
        self._on_step = on_step
        self.facts: dict[str, Any] = {}

    def _ranks(self) -> RankPool:
        self._on_step(f"starting {self._settings.ranks} ranks")
        return RankPool(self._settings.ranks, self._scratch / "ranks.log")

    # --- throughput ---------------------------------------------------------------------------

    def throughput(self) -> list[Row]:
        """Rows of the cases that move bytes."""
        names = [name for name in self._chosen if name != MEMORY_CASE]
        if not names:
            return []
        with ExitStack() as stack:
            places = self._places(names, stack)
            # Entered last: the ranks end before what they use is taken away.
            pool = stack.enter_context(self._ranks())
            size_bytes = sum(pool.call(make_state, self._settings.total_bytes, _SEED))
            self.facts["state_bytes"] = size_bytes
            cases = [self._open(name, places[name], pool, size_bytes) for name in names]
            rows = interleave(cases, self._settings.repeat, self._on_step)
            for case in cases:
                case.close()
            return rows

    def _places(self, names: list[str], stack: ExitStack) -> dict[str, _Place]:
        """Make what the cases work in: directories, volumes, mounts."""
        places = {}
        for name in names:
            base = self._scratch / name
            if name == API:
                places[name] = _Place(base, meta_url=mounts.format_volume(base))
            elif name == NULL_FILE:
                places[name] = _Place(stack.enter_context(mounts.mounted_null(base)).directory)
            elif name in _MOUNTED:
                mount = stack.enter_context(mounts.mounted_volume(base))
                places[name] = _Place(mount.directory, daemon=mount.pid)
            else:
                base.mkdir()
                places[name] = _Place(base)
        return places

    def _open(self, name: str, place: _Place, pool: RankPool, size_bytes: int) -> TargetCase:
        target = self._target(name, place, pool, size_bytes)
        case = TargetCase(
            name, pool, size_bytes, place.directory,
            device_reader=place.daemon, on_device=name != NULL_FILE,
        )  # fmt: skip
        case.open(target)
        return case

    def _target(
        self, name: str, place: _Place, pool: RankPool, size_bytes: int
    ) -> CheckpointTarget:
        directory, ranks = place.directory, self._settings.ranks
        match name:
            case "raw":
                raw = fastest_raw(pool, directory, size_bytes, self._on_step)
                self.facts["raw_write_threads"] = raw.write_workers
                self.facts["raw_read_threads"] = raw.read_workers
                return raw
            case "api":
                return CheckpointAPI(place.meta_url)
            case "dcp":
                return DistributedCheckpoint(directory)
            case "torch":
                return TorchFiles(directory)
            case "safetensors":
                return SafetensorsFiles(directory)
            case "mount":
                return SequentialFiles(directory, size_bytes, ranks)
            case "mount-file":
                return SequentialFiles(directory, size_bytes, 1)
            case "null-file":
                return SequentialFiles(directory, size_bytes, 1, checked=False)
        raise AssertionError(name)

    # --- memory -------------------------------------------------------------------------------

    def memory(self) -> list[Row]:
        """Rows of peak memory, of each rank's client and of the mount."""
        if MEMORY_CASE not in self._chosen:
            return []
        base = self._scratch / MEMORY_CASE
        base.mkdir()
        rows = [Row(API, *MEMORY, _mebibytes(self._rank_growth(base / API)))]
        if mounts.why_no_mounts() is None:
            self._on_step(f"{MEMORY_CASE}: {MOUNT_WRITERS} writers through the mount")
            with mounts.mounted_volume(base / MOUNT) as mount:
                growth = mount_growth_bytes(mount, self._settings.total_bytes)
            rows.append(Row(MOUNT, *MEMORY, _mebibytes([growth])))
        return rows

    def _rank_growth(self, base: Path) -> list[int]:
        with self._ranks() as pool:
            target = CheckpointAPI(mounts.format_volume(base))
            return rank_growth_bytes(pool, target, self._settings.total_bytes)


def _mebibytes(sizes: list[int]) -> tuple[float, ...]:
    return tuple(size / MiB for size in sizes)
