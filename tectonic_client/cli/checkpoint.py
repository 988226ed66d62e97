"""`tectonicfs ckpt`: list, show, verify and remove the checkpoints of a directory."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple, TypeVar

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tectonic_client.blocking import BlockingVolume
from tectonic_client.checkpoint.directory import CheckpointDirectory, VerifyReport
from tectonic_client.checkpoint.index import StepIndex
from tectonic_client.checkpoint.transfer import UNREADABLE
from tectonic_client.cli.parameters import (
    counted,
    format_size,
    no_directory,
    plain_console,
    print_json,
)
from tectonic_client.errors import InvalidArgument, NotFound, StepNotFound
from tectonic_client.volume import VolumeOptions

T = TypeVar("T")


class _Steps:
    """The checkpoints of a directory, opened for one command."""

    def __init__(self, volume: BlockingVolume, path: str) -> None:
        self._volume = volume
        self._path = path

    def run(self, work: Callable[[CheckpointDirectory], Awaitable[T]]) -> T:
        """Result of `await work(directory)`."""
        return self._volume.run(lambda volume: work(CheckpointDirectory(volume, self._path)))


@contextmanager
def _steps(meta_url: str, path: str, *, read_only: bool) -> Iterator[_Steps]:
    """Open a directory, which must exist: an answer about a mistyped one would be no answer."""
    with BlockingVolume(meta_url, VolumeOptions(read_only=read_only, client="ckpt")) as volume:
        steps = _Steps(volume, path)
        try:
            steps.run(CheckpointDirectory.check)
        except NotFound:
            raise no_directory(path) from None
        yield steps


_url = click.argument("meta_url")
_path = click.argument("directory", metavar="DIR")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def ckpt() -> None:
    """List, show, verify and remove checkpoints.

    DIR is the run's directory in the volume, for example /runs/gpt.
    """


@ckpt.command("ls")
@_url
@_path
@_json
def list_command(meta_url: str, directory: str, *, as_json: bool) -> None:
    """List the committed steps."""
    with _steps(meta_url, directory, read_only=True) as steps:
        found = steps.run(_list)
    if as_json:
        rows = [_summary(item) if isinstance(item, StepIndex) else item._asdict() for item in found]
        print_json({"directory": directory, "steps": rows})
    else:
        _print_list(found)
    if any(isinstance(item, _Unreadable) for item in found):
        raise SystemExit(1)


class _Unreadable(NamedTuple):
    """A committed step whose index cannot be read."""

    step: int
    problem: str


async def _list(steps: CheckpointDirectory) -> list[StepIndex | _Unreadable]:
    found: list[StepIndex | _Unreadable] = []
    for step in await steps.steps():
        try:
            found.append(await steps.index(step))
        except StepNotFound:  # somebody has just removed it
            continue
        except UNREADABLE as error:
            found.append(_Unreadable(step, str(error)))
    return found


def _print_list(found: list[StepIndex | _Unreadable]) -> None:
    table = Table("step", "ranks", "size", "committed", "run", box=None, padding=(0, 2))
    for item in found:
        if isinstance(item, _Unreadable):
            table.add_row(str(item.step), "", "", "DAMAGED", "")
            click.echo(f"tectonicfs: step {item.step}: {item.problem}", err=True)
            continue
        table.add_row(
            str(item.step), str(item.world_size), format_size(item.total_bytes), _when(item),
            item.run_id,
        )  # fmt: skip
    plain_console().print(table)


def _when(index: StepIndex) -> str:
    return index.committed_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _summary(index: StepIndex) -> dict[str, object]:
    return {
        "step": index.step,
        "world_size": index.world_size,
        "bytes": index.total_bytes,
        "committed_at": index.committed_at.isoformat(),
        "run_id": index.run_id,
        "metadata": dict(index.metadata),
    }


@ckpt.command()
@_url
@_path
@click.option("--step", type=int, help="The step to show.  [default: the newest]")
@_json
def show(meta_url: str, directory: str, *, step: int | None, as_json: bool) -> None:
    """Show a step: its ranks, their files and how long each took."""

    async def load(steps: CheckpointDirectory) -> StepIndex:
        return await steps.index(await steps.require(step))

    with _steps(meta_url, directory, read_only=True) as steps:
        index = steps.run(load)
    if as_json:
        print_json(_summary(index) | {"ranks": [asdict(rank) for rank in index.ranks]})
        return
    click.echo(
        f"step {index.step}: {counted(index.world_size, 'rank')}, {format_size(index.total_bytes)},"
        f" run {index.run_id}, {_when(index)}"
    )
    for name, value in index.metadata.items():
        click.echo(f"{name}: {value}")
    slowest = max(index.ranks, key=lambda rank: rank.arrive_s)
    table = Table("rank", "size", "write s", "arrived s", "file", "", box=None, padding=(0, 2))
    for rank in index.ranks:
        table.add_row(
            str(rank.rank), format_size(rank.bytes), f"{rank.write_s:.3f}",
            f"{rank.arrive_s:.3f}", rank.file, "slowest" if rank is slowest else "",
        )  # fmt: skip
    plain_console().print(table)


@ckpt.command()
@_url
@_path
@click.option("--step", "chosen", type=int, multiple=True, help="A step; repeat for several.")
@_json
def verify(meta_url: str, directory: str, *, chosen: tuple[int, ...], as_json: bool) -> None:
    """Read steps (default: all) and compare every byte with its checksum.

    Exit code 1 when any byte is wrong or missing.
    """
    reports: list[VerifyReport] = []
    with _steps(meta_url, directory, read_only=True) as steps:
        for step in chosen:
            steps.run(partial(CheckpointDirectory.require, step=step))
        console = Console(stderr=True)
        for step in track(
            chosen or steps.run(CheckpointDirectory.steps),
            "verifying",
            console=console,
            disable=not console.is_terminal,
        ):
            try:
                reports.append(steps.run(partial(CheckpointDirectory.verify, step=step)))
            except StepNotFound:  # somebody has just removed it
                if chosen:
                    raise
    if as_json:
        print_json({"steps": [asdict(report) | {"ok": report.ok} for report in reports]})
    else:
        _print_reports(directory, reports)
    if not all(report.ok for report in reports):
        raise SystemExit(1)


def _print_reports(directory: str, reports: list[VerifyReport]) -> None:
    if not reports:
        click.echo(f"no committed step in {directory}")
    for report in reports:
        speed = report.bytes / report.seconds / 1e9
        state = "ok" if report.ok else "DAMAGED"
        click.echo(
            f"step {report.step}: {state}, {counted(report.files, 'file')},"
            f" {format_size(report.bytes)}, {speed:.2f} GB/s"
        )
        for problem in report.problems:
            click.echo(f"  {problem}")


@ckpt.command("rm")
@_url
@_path
@click.argument("steps", type=int, nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_json
def remove(
    meta_url: str, directory: str, *, steps: tuple[int, ...], yes: bool, as_json: bool
) -> None:
    """Remove steps: at once from sight, then their data. None is removed unless all exist."""
    doomed = list(dict.fromkeys(steps))
    named = ", ".join(map(str, doomed))
    if not yes:
        with _steps(meta_url, directory, read_only=True) as opened:
            _require_all(opened, doomed)
        _confirm(f"Remove step {named} of {directory}?")
    with _steps(meta_url, directory, read_only=False) as opened:
        _require_all(opened, doomed)
        for step in doomed:
            opened.run(partial(CheckpointDirectory.delete, step=step))
    if as_json:
        print_json({"directory": directory, "removed": doomed})
    else:
        click.echo(f"removed step {named}")


def _require_all(opened: _Steps, steps: list[int]) -> None:
    for step in steps:
        opened.run(partial(CheckpointDirectory.require, step=step))


def _confirm(question: str) -> None:
    """Raises Abort where the answer is no, InvalidArgument where nobody answers."""
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise InvalidArgument("nobody answered: --yes removes without asking") from None
    if not agreed:
        raise click.Abort
