"""`tectonicfs completion`: completion of commands and options by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete tectonicfs commands.

    \b
    Once and for all:
      bash  tectonicfs completion bash >/etc/bash_completion.d/tectonicfs
      zsh   tectonicfs completion zsh >/usr/share/zsh/site-functions/_tectonicfs
      fish  tectonicfs completion fish >~/.config/fish/completions/tectonicfs.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root().command
    click.echo(found(root, {}, "tectonicfs", "_TECTONICFS_COMPLETE").source())
