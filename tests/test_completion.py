"""`tectonicfs completion`: each shell gets a script that asks the command for completions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tectonic_client.cli.main import cli


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nosort -F _tectonicfs_completion tectonicfs"),
        ("zsh", "#compdef tectonicfs"),
        ("fish", "complete --no-files --command tectonicfs"),
    ],
)
def test_each_shell_gets_its_script(shell: str, registers: str) -> None:
    """The script names the command and the variable by which it is asked."""
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert registers in result.stdout
    assert f"_TECTONICFS_COMPLETE={shell}_complete" in result.stdout


def test_bash_completes_commands_with_the_script(tmp_path: Path) -> None:
    """In bash itself, `tectonicfs u<TAB>` becomes `umount` once the script is read."""
    command = tmp_path / "tectonicfs"
    command.write_text(f"#!{sys.executable}\nfrom tectonic_client.cli.main import main\nmain()\n")
    command.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    typed = (
        f'PATH="{tmp_path}:$PATH"; eval "$(tectonicfs completion bash)";'
        " COMP_WORDS=(tectonicfs um); COMP_CWORD=1; _tectonicfs_completion tectonicfs;"
        ' echo "${COMPREPLY[@]}"'
    )
    said = subprocess.run(
        [bash, "-c", typed], capture_output=True, text=True, check=False, timeout=60
    )
    assert said.stdout == "umount\n", said.stderr
