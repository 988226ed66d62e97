"""Where workloads run, and what one run of one workload is made of.

Owns the clock of each phase, the accounts of the processes that serve a place, and the dropping of
caches before a phase. Knows no workload. A place that is not ours may fail: the reason is kept and
the run goes on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import caches, memory
from bench.errors import BenchError
from bench.ranks import RankPool
from bench.runner import Metric
from tectonic_client.limits import GiB, KiB, MiB

JOBS: Final = 4
"""Processes that work at once, where a workload has several."""

RATE: Final = "/s"

SPEED: Final = "GB/s"

SECONDS: Final = "s"

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each workload moves."""

    file_bytes: int = GiB
    empty_files: int = 10_000
    small_files: int = 1_000
    small_file_bytes: int = 128 * KiB
    random_reads: int = 4 * KiB
    """Of each job; so many writes too."""
    tree_files: int = 3_000


QUICK: Final = Sizes(32 * MiB, 500, 50, 128 * KiB, 256, 100)


@dataclass(frozen=True, slots=True)
class Place:
    """A directory to work in. `servers`: the processes that serve it; their children count too.

    `ours`: a failure there ends the run, and cold reads must have come from the device.
    """

    name: str
    directory: Path
    servers: tuple[int, ...] = ()
    ours: bool = False


class Tools:
    """What all workloads use: their sizes, the jobs, and the archive of a source tree."""

    def __init__(self, sizes: Sizes, archive: Path, log_file: Path) -> None:
        self.sizes = sizes
        self.archive = archive
        self._log_file = log_file
        self.jobs = RankPool(JOBS, log_file)

    def restart_jobs(self) -> None:
        """After a failure: some jobs may still be busy with the call that failed in another."""
        self.jobs.__exit__(BenchError, None, None)
        self.jobs = RankPool(JOBS, self._log_file)

    def close(self, *, busy: bool) -> None:
        """End the jobs; `busy` ones by force."""
        self.jobs.__exit__(BenchError if busy else None, None, None)


@dataclass(slots=True)
class Recorder:
    """One run of one workload at one place: times its phases and keeps what they showed."""

    place: Place
    tools: Tools
    found: dict[Metric, float] = field(default_factory=dict)

    @contextmanager
    def phase(
        self, name: str, unit: str, amount: float = 1, *, warm: bool = False
    ) -> Iterator[None]:
        """Time the block, with cold caches unless `warm`.

        `amount` is what it moves: bytes for SPEED, operations for RATE.
        """
        if not warm:
            caches.drop(self.place.directory)
        cpu_before, start = cpu_seconds(self.place.servers), time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.found[Metric(name, unit)] = {
            SPEED: amount / 1e9 / seconds, RATE: amount / seconds, SECONDS: seconds,
        }[unit]  # fmt: skip
        if self.place.servers and unit != SECONDS:
            used = cpu_seconds(self.place.servers) - cpu_before
            metric = Metric(f"{name} CPU", "s/GiB" if unit == SPEED else "us/op")
            self.found[metric] = used / (amount / GiB) if unit == SPEED else used * 1e6 / amount


Workload = Callable[[Recorder], None]


@dataclass(slots=True)
class PlaceCase:
    """A workload at a place, as something to measure again and again."""

    workload_name: str
    workload: Workload
    place: Place
    tools: Tools
    problems: dict[str, str]
    """Gets the reason why a place could not be measured; such a case is not tried again."""

    @property
    def name(self) -> str:
        """Of the place: the workload is in the metrics' names."""
        return self.place.name

    @property
    def _title(self) -> str:
        return f"{self.workload_name} on {self.place.name}"

    def measure(self) -> Mapping[Metric, float]:
        """One sample of each metric, with the peak memory of the place's processes."""
        if self._title in self.problems:
            return {}
        recorder = Recorder(self.place, self.tools)
        _reset_peaks(self.place.servers)
        try:
            self.workload(recorder)
        except (OSError, BenchError, subprocess.SubprocessError) as error:
            if self.place.ours:
                raise
            self.problems[self._title] = str(error) or type(error).__name__
            self.tools.restart_jobs()
            return {}
        if self.place.servers:
            peak = sum(memory.peak_resident_bytes(pid) for pid in processes(self.place.servers))
            recorder.found[Metric(f"{self.workload_name} peak memory", "MiB")] = peak / MiB
        return recorder.found


# --- the processes of a place -----------------------------------------------------------------


def processes(roots: tuple[int, ...]) -> list[int]:
    """These processes and all below them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if roots and entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(roots: tuple[int, ...]) -> float:
    """CPU time, user and system, that these processes and those below them have used."""
    ticks = 0
    for pid in processes(roots):
        if fields := _stat_fields(pid):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat (proc(5)) from the third on; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _reset_peaks(roots: tuple[int, ...]) -> None:
    for pid in processes(roots):
        memory.reset_peak(pid)
