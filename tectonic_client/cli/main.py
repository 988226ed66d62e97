"""The root of the `tectonicfs` command: finds subcommands, prints errors as one line.

Exit codes: 0 success, 1 the operation failed (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points

import click

from tectonic_client.errors import TectonicError


class LazyGroup(click.Group):
    """Loads a subcommand only when it is used, so that `tectonicfs status` imports no FUSE."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all installed commands."""
        return sorted({point.name for point in entry_points(group="tectonicfs.commands")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command behind a name."""
        for point in entry_points(group="tectonicfs.commands", name=cmd_name):
            try:
                command: click.Command = point.load()
            except ImportError as error:
                return _unavailable(cmd_name, error)
            return command
        return None


def _unavailable(name: str, error: ImportError) -> click.Command:
    """Stands for a command whose package is not complete, so that the others still work."""

    def explain() -> None:
        raise click.ClickException(f"{name} is not available: {error}")

    return click.Command(name, callback=explain, help=f"Not available: {error}")


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="tectonicfs", prog_name="tectonicfs")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens on stderr.")
def cli(*, verbose: bool) -> None:
    """Storage for large training jobs: a FUSE mount and a checkpoint API over flash stores.

    META_URL names a volume: a file path or sqlite:///path for the embedded engine,
    postgresql://user@host/database for a cluster.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    """Entry point of the console script."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("tectonicfs: interrupted", err=True)
        sys.exit(130)
    except TectonicError as error:
        click.echo(f"tectonicfs: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
