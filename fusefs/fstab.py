"""`mount.tectonicfs`: what mount(8) runs for `mount -t tectonicfs` and for lines of /etc/fstab.

It takes the arguments and gives the exit codes that mount(8) describes (EXTERNAL HELPERS, EXIT
STATUS). mount(8) looks for it in /sbin.
"""

from __future__ import annotations

import sys
from typing import Final

import click

from fusefs.options import parse_options
from tectonic_client.errors import BadOption, TectonicError

WRONG_USAGE: Final = 1
SYSTEM_ERROR: Final = 2
INTERRUPTED: Final = 8
MOUNT_FAILED: Final = 32


@click.command("mount.tectonicfs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("meta_url")
@click.argument("directory")
@click.option("-o", "options", multiple=True, metavar="OPTION,...", help="Mount options.")
@click.option("-s", "sloppy", is_flag=True, help="Pass over unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check the options, mount nothing.")
@click.option("-v", "verbose", is_flag=True, help="Say what was mounted.")
@click.option("-n", "_no_mtab", is_flag=True, help="Ignored: /etc/mtab is not written anyway.")
@click.option("-t", "_type", metavar="TYPE", help="Ignored: there is one type.")
def _command(
    meta_url: str, directory: str, *, options: tuple[str, ...], sloppy: bool, fake: bool,
    verbose: bool, _no_mtab: bool, _type: str | None,
) -> None:  # fmt: skip
    """Mount the volume at META_URL on DIRECTORY, for mount(8). See `tectonicfs mount --help`."""
    parsed = parse_options(options, sloppy=sloppy)
    if fake:
        return
    # Loaded here: the help and wrong usage need no volume.
    from fusefs import mounting

    if mounting.is_mounted(meta_url, directory):
        # `mount -a` knows a mount by the source in its line, and the kernel shows another one.
        said = f"{directory} is mounted already"
    else:
        said = f"mounted at {directory} (pid {mounting.mount(meta_url, directory, parsed)})"
    if verbose:
        click.echo(said)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Carry out a command line; returns the exit code."""
    try:
        _command.main(arguments, prog_name="mount.tectonicfs", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return WRONG_USAGE
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except TectonicError as error:
        click.echo(f"mount.tectonicfs: {error}", err=True)
        return WRONG_USAGE if isinstance(error, BadOption) else MOUNT_FAILED
    except OSError as error:
        click.echo(f"mount.tectonicfs: {error}", err=True)
        return SYSTEM_ERROR
    return 0
