"""`tectonicfs quota`: limits of what a directory may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from tectonic_client.blocking import BlockingVolume
from tectonic_client.cli.parameters import (
    Size,
    format_size,
    no_directory,
    plain_console,
    print_json,
)
from tectonic_client.errors import NotFound
from tectonic_client.filesystem.paths import path_of
from tectonic_client.filesystem.quotasetting import (
    QuotaReport,
    QuotaSetting,
    list_quotas,
    report,
)
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.volume import Volume, VolumeOptions

_url = click.argument("meta_url")
_path = click.argument("directory", metavar="DIR")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def quota() -> None:
    """Limit what a directory of a volume may hold.

    DIR is a directory in the volume, for example /home/ann. A quota counts the sizes of the files
    below it (holes included) and the number of files and directories. Who exceeds it gets EDQUOT.
    Quotas do not lie within each other; moving a file from one into another copies it.
    """


@quota.command("set")
@_url
@_path
@click.option("--bytes", "max_bytes", type=Size(), help="Sum of the files' sizes; 0: no limit.")
@click.option("--inodes", "max_inodes", type=click.IntRange(min=0), help="Count; 0: no limit.")
@_json
def set_command(
    meta_url: str, directory: str, *, max_bytes: int | None, max_inodes: int | None, as_json: bool
) -> None:
    """Give DIR a quota or change it; what is not named stays.

    All that DIR holds is counted first, which takes a while where that is much. Repeat it where it
    was interrupted.
    """
    if max_bytes is None and max_inodes is None:
        raise click.UsageError("give --bytes, --inodes, or both")

    async def work(volume: Volume) -> QuotaReport:
        inode = await _resolve(volume, directory)
        with _counting() as seen:
            await QuotaSetting(volume.kv, volume.ids, seen).set(inode, max_bytes, max_inodes)
        return await volume.kv.read(lambda tx: report(tx, inode))

    with BlockingVolume(meta_url, VolumeOptions(client="quota")) as volume:
        found = volume.run(work)
    _print([(directory, found)], as_json=as_json)


@quota.command("rm")
@_url
@_path
@_json
def remove(meta_url: str, directory: str, *, as_json: bool) -> None:
    """Take the quota of DIR away."""

    async def work(volume: Volume) -> None:
        inode = await _resolve(volume, directory)
        with _counting() as seen:
            await QuotaSetting(volume.kv, volume.ids, seen).remove(inode)

    with BlockingVolume(meta_url, VolumeOptions(client="quota")) as volume:
        volume.run(work)
    if as_json:
        print_json({"removed": directory})
    else:
        click.echo(f"{directory} has no quota any more")


@quota.command()
@_url
@_path
@_json
def show(meta_url: str, directory: str, *, as_json: bool) -> None:
    """Show the quota that DIR counts against, its own or one above."""

    async def work(volume: Volume) -> tuple[str, QuotaReport]:
        inode = await _resolve(volume, directory)
        return await volume.kv.read(lambda tx: _named(tx, report(tx, inode)))

    with BlockingVolume(meta_url, VolumeOptions(read_only=True, client="quota")) as volume:
        found = volume.run(work)
    _print([found], as_json=as_json)


@quota.command("ls")
@_url
@_json
def list_command(meta_url: str, *, as_json: bool) -> None:
    """List all quotas of the volume."""

    def look(tx: ReadTransaction) -> list[tuple[str, QuotaReport]]:
        named = [_named(tx, one) for one in list_quotas(tx)]
        return sorted(named, key=lambda pair: pair[0])

    with BlockingVolume(meta_url, VolumeOptions(read_only=True, client="quota")) as volume:
        found = volume.run(lambda opened: opened.kv.read(look))
    _print(found, as_json=as_json)


async def _resolve(volume: Volume, directory: str) -> int:
    try:
        return await volume.filesystem.resolve(directory)
    except NotFound:
        raise no_directory(directory) from None


def _named(tx: ReadTransaction, found: QuotaReport) -> tuple[str, QuotaReport]:
    return path_of(tx, found.directory), found


@contextmanager
def _counting() -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many inodes were visited."""
    console = Console(stderr=True)
    with console.status("counting") if console.is_terminal else nullcontext() as status:

        def show(seen: int) -> None:
            if status is not None:
                status.update(f"counting: {seen} files and directories")

        yield show


def _print(found: list[tuple[str, QuotaReport]], *, as_json: bool) -> None:
    if as_json:
        rows = [{"path": path} | asdict(one) for path, one in found]
        print_json({"quotas": rows})
        return
    table = Table("directory", "used", "limit", "inodes", "limit", box=None, padding=(0, 2))
    for path, one in found:
        max_bytes = format_size(one.max_bytes) if one.max_bytes else "-"
        max_inodes = str(one.max_inodes) if one.max_inodes else "-"
        used = format_size(one.used_bytes)
        table.add_row(path, used, max_bytes, str(one.used_inodes), max_inodes)
    plain_console().print(table)
