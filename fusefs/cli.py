"""`tectonicfs mount` and `tectonicfs umount`."""

from __future__ import annotations

import click

from fusefs.options import options_help, parse_options
from fusefs.unmounting import unmount
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
