"""`tectonicfs mount`, `tectonicfs umount` and `tectonicfs clone`."""

from __future__ import annotations

from dataclasses import asdict

import click

from fusefs.options import options_help, parse_options
from fusefs.unmounting import unmount
from tectonic_client.cli.parameters import counted, format_size, print_json
from tectonic_client.limits import UMOUNT_WAIT_S


@click.command(epilog=f"\b\nMount options (-o):\n{options_help()}")
@click.argument("meta_url")
@click.argument("directory")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log to stderr.")
@click.option("-o", "options", multiple=True, metavar="OPTION,...", help="Mount options.")
def mount(meta_url: str, directory: str, *, foreground: bool, options: tuple[str, ...]) -> None:
    """Mount the volume at META_URL on DIRECTORY.

    \b
    Example:
      tectonicfs mount /data/meta.db /mnt/training -o memory_limit=1GiB
    """
    # Loaded here: `umount` and the help need no volume.
    from fusefs import mounting

    parsed = parse_options(options)
    if foreground:
        mounting.mount_foreground(meta_url, directory, parsed)
        return
    pid = mounting.mount(meta_url, directory, parsed)
    click.echo(f"mounted at {directory} (pid {pid})")


@click.command()
@click.argument("directory")
@click.option("--lazy", is_flag=True, help="Detach now; the daemon ends with its last open file.")
@click.option("--force", is_flag=True, help="End the daemon though files are open; it flushes.")
@click.option(
    "--timeout", default=UMOUNT_WAIT_S, type=click.FloatRange(min=0), metavar="SECONDS",
    show_default=True, help="How long to wait for the daemon to flush and end.",
)  # fmt: skip
def umount(directory: str, *, lazy: bool, force: bool, timeout: float) -> None:
    """Unmount DIRECTORY and wait until everything is flushed."""

    def show_wait(waited_s: float) -> None:
        click.echo(f"waiting for the daemon to flush ({waited_s:.0f} s)", err=True)

    click.echo(unmount(directory, lazy=lazy, force=force, timeout_s=timeout, on_second=show_wait))


@click.command(short_help="Copy a file or tree of a volume in metadata only.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--volume", "meta_url", metavar="META_URL", help="SRC and DST are paths in this volume."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clone(source: str, target: str, *, meta_url: str | None, as_json: bool) -> None:
    """Copy a file or tree of a volume in metadata only, as DST, which must not exist.

    SRC and DST are paths below a mount, or with --volume in a volume. The copy shares the stored
    data until either side is changed, and appears whole or not at all. What a program has written
    and not closed yet is not part of it. Root keeps owners; others own the copy.

    \b
    Example:
      tectonicfs clone /mnt/training/data /mnt/training/data-before-cleaning
    """
    from fusefs import cloning

    report = cloning.clone(source, target, meta_url)
    if as_json:
        print_json(asdict(report))
        return
    click.echo(
        f"cloned {counted(report.files, 'file')} ({format_size(report.bytes)}),"
        f" {counted(report.directories, 'directory', 'directories')},"
        f" {counted(report.others, 'other')}"
    )


# --- looking into a mount ---------------------------------------------------------------------


@click.command(short_help="Show what a mount does and how long that takes.")
@click.argument("target", metavar="DIRECTORY|META_URL")
@click.option("--once", is_flag=True, help="Show the figures since the mount, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per mount, on one line.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), metavar="SECONDS",
    help="Time between two looks; with --json, look again and again.  [default: 1]",
)  # fmt: skip
def stats(target: str, *, once: bool, as_json: bool, interval: float | None) -> None:
    """Show what a mount does and how long that takes: requests, metadata, stores, memory.

    Given META_URL, all mounts of that volume on this machine. Works while the mount is stuck.
    The rates and percentiles of the live view are those since the last look; percentiles are
    exact to a factor of two.
    """
    from fusefs import watching

    if as_json:
        watching.print_lines(target, interval)
    elif once:
        watching.show_once(target)
    else:
        watching.show_live(target, interval or 1.0)


@click.command("log-level", short_help="Change how much the daemon of a mount logs.")
@click.argument("directory")
@click.argument("level", metavar="debug|info|warning|error")
def log_level(directory: str, level: str) -> None:
    """Change how much the daemon of the mount on DIRECTORY logs, until it ends."""
    from fusefs import watching

    before = watching.ask_mount(directory, "log-level", level=level)
    click.echo(f"log level of {directory} is now {level.upper()}, was {before}")
