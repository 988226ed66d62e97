"""Composition of one run of the file-system benchmark.

Makes a directory of its own on the device in question, the jobs, a volume, the mounts and the
peers; hands the workloads to the runner, one after the other and each at all places in turn; and
removes everything.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import caches, machine, mounts
from bench.errors import BenchError
from bench.fs import peers
from bench.fs.bars import MOUNT, NULL, RAW, filesystem_bars
from bench.fs.data import random_places, raw_four, raw_one, sequential_four, sequential_one
from bench.fs.names import empty_files, make_archive, small_files, source_tree
from bench.fs.places import Place, PlaceCase, Sizes, Tools, Workload
from bench.report import Result, Row, with_ratios
from bench.runner import OnStep, interleave, progress
from bench.workloads import DIRECT_FILE_BYTES, direct_buffer, write_direct
from tectonic_client.cli.parameters import format_size

WORKLOADS: Final[dict[str, Workload]] = {
    "seq-1": sequential_one,
    "seq-4": sequential_four,
    "random": random_places,
    "names": empty_files,
    "small": small_files,
    "tree": source_tree,
}

_RAW_WORKLOADS: Final[dict[str, Workload]] = {"seq-1": raw_one, "seq-4": raw_four}

_NOT_NULL: Final = frozenset({"tree"})
"""What needs a file system that gives back what was written."""

_FREE_FILES: Final = 5
"""Times the large file that must be free: places remove theirs, volumes a little later."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. `directory` is on the device that is measured."""

    directory: Path
    sizes: Sizes
    repeat: int
    cases: frozenset[str]
    compare: tuple[Path, ...] = ()
    peers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Setup:
    """What a run has to work with; `problems`: what could not be measured, and why."""

    places: list[Place] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def run_filesystem(settings: Settings) -> Result:
    """Run the benchmark. Raises BenchError."""
    _check_space(settings)
    with (
        tempfile.TemporaryDirectory(prefix="tectonicfs-bench-", dir=settings.directory) as name,
        ExitStack() as stack,
    ):
        scratch, setup = Path(name), _Setup()
        _check_direct(scratch)
        archive = scratch / "tree.tar"
        tree_files = 0
        if "tree" in settings.cases:
            tree_files = make_archive(archive, settings.sizes.tree_files)
        chosen = [name for name in WORKLOADS if name in settings.cases]
        places = 3 + len(settings.compare) + len(settings.peers)
        on_step = stack.enter_context(progress(places * len(chosen) * (settings.repeat + 1)))
        _make_places(settings, scratch, setup, stack, on_step)
        # Entered last: the jobs end before what they use is taken away.
        tools = stack.enter_context(_tools(settings.sizes, archive, scratch / "jobs.log"))
        rows = [
            row for name in chosen for row in _measure(name, settings.repeat, setup, tools, on_step)
        ]
        return _result(settings, scratch, setup, tree_files, rows)


def _result(
    settings: Settings, scratch: Path, setup: _Setup, tree_files: int, rows: list[Row]
) -> Result:
    order = [place.name for place in setup.places]
    config: dict[str, Any] = {
        "directory": str(settings.directory), "repeat": settings.repeat,
        "file_bytes": settings.sizes.file_bytes, "empty_files": settings.sizes.empty_files,
        "small_files": settings.sizes.small_files, "tree_files": tree_files,
        "random_reads": settings.sizes.random_reads, "caches": caches.method(),
        "cases": sorted(settings.cases), "unavailable": setup.problems,
    }  # fmt: skip
    references = [name for name in order if name != MOUNT]
    return Result(
        "fs", machine.commit(), machine.describe(scratch), config,
        with_ratios(rows, references), filesystem_bars(rows, settings.peers),
    )  # fmt: skip


def _measure(name: str, repeat: int, setup: _Setup, tools: Tools, on_step: OnStep) -> list[Row]:
    cases = [
        PlaceCase(name, workload, place, tools, setup.problems)
        for place in setup.places
        if (workload := _workload_at(place, name)) is not None
    ]
    return interleave(cases, repeat, lambda text: on_step(f"{name} on {text}"))


def _workload_at(place: Place, name: str) -> Workload | None:
    if place.name == RAW:
        return _RAW_WORKLOADS.get(name)
    if place.name == NULL and name in _NOT_NULL:
        return None
    return WORKLOADS[name]


@contextmanager
def _tools(sizes: Sizes, archive: Path, log_file: Path) -> Iterator[Tools]:
    tools = Tools(sizes, archive, log_file)
    try:
        yield tools
    except BaseException:
        tools.close(busy=True)
        raise
    tools.close(busy=False)


# --- places -----------------------------------------------------------------------------------


def _make_places(
    settings: Settings, scratch: Path, setup: _Setup, stack: ExitStack, on_step: OnStep
) -> None:
    raw = scratch / RAW
    raw.mkdir()
    setup.places.append(Place(RAW, raw, ours=True))
    if (reason := mounts.why_no_mounts()) is not None:
        raise BenchError(f"nothing can be mounted here: {reason}")
    null = stack.enter_context(mounts.mounted_null(scratch / NULL))
    setup.places.append(Place(NULL, null.directory, (null.pid,)))
    mount = stack.enter_context(mounts.mounted_volume(scratch / MOUNT))
    setup.places.append(Place(MOUNT, mount.directory, (mount.pid,), ours=True))
    for directory in settings.compare:
        inside = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tectonicfs-bench-", dir=directory)
        )
        setup.places.append(Place(str(directory), Path(inside)))
    programs = peers.programs_directory(settings.directory)
    host = peers.Host(programs, scratch / "servers", stack)
    for name in settings.peers:
        on_step(f"starting {name}")
        try:
            place = stack.enter_context(peers.started(name, scratch / name, host))
        except BenchError as error:
            setup.problems[name] = str(error)
        else:
            setup.places.append(place)


def _check_space(settings: Settings) -> None:
    places = 1 + len(settings.peers)
    needed = settings.sizes.file_bytes * _FREE_FILES * places
    free = shutil.disk_usage(settings.directory).free
    if free < needed:
        raise BenchError(
            f"{settings.directory} has {format_size(free)} free, and this run needs"
            f" {format_size(needed)}: name another directory, or use --quick"
        )


def _check_direct(scratch: Path) -> None:
    try:
        write_direct(direct_buffer(), [(scratch / "probe", DIRECT_FILE_BYTES)])
    except OSError as error:
        raise BenchError(
            f"{scratch.parent} does not take O_DIRECT ({error.strerror}):"
            " name a directory on a disk"
        ) from error
