"""Where the demo takes place: a directory of its own with a volume in it, and its mount.

Each is a context manager that removes what it made, also when the demo is interrupted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.demo.screen import Screen
from bench.errors import BenchError
from fusefs.checks import check
from fusefs.mounttable import find_mount
from fusefs.options import MountOptions
from tectonic_client.errors import MountError

_COMMAND: Final = (sys.executable, "-m", "tectonic_client.cli.main")

_TIMEOUT_S: Final = 120.0


def tectonicfs(screen: Screen, *arguments: str | Path) -> str:
    """Show and run the command; returns what it said. Raises BenchError with its error."""
    words = [str(argument) for argument in arguments]
    screen.command("tectonicfs", *words)
    process = subprocess.Popen(
        [*_COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        process_group=0,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise BenchError(f"tectonicfs {words[0]} gave no answer in {_TIMEOUT_S:.0f} s") from error
    except BaseException:
        # Interrupted: half a mount could not be undone, so let it be whole first.
        process.wait(_TIMEOUT_S)
        raise
    if process.returncode != 0:
        raise BenchError(f"tectonicfs {words[0]}: {err.strip()}")
    return out


@contextmanager
def own_directory(parent: Path, screen: Screen, *, keep: bool) -> Iterator[Path]:
    """A new directory in `parent`; removed at the end unless `keep`."""
    directory = Path(tempfile.mkdtemp(prefix="tectonicfs-demo-", dir=parent)).resolve()
    try:
        yield directory
    finally:
        if keep:
            screen.say(f"kept: {directory}")
        else:
            shutil.rmtree(directory)


def why_no_mount(directory: Path) -> str | None:
    """Why nothing can be mounted on this machine; None if it can. `directory` is an empty one."""
    try:
        check(str(directory), MountOptions())
    except MountError as error:
        return str(error)
    return None


@contextmanager
def mounted(meta_url: str, base: Path, screen: Screen) -> Iterator[Path | None]:
    """The volume, mounted below `base`; None where this machine cannot mount."""
    directory = base / "mnt"
    directory.mkdir()
    problem = why_no_mount(directory)
    if problem is not None:
        screen.say(f"goes on without a mount: {problem}", style="yellow")
        yield None
        return
    try:
        tectonicfs(
            screen, "mount", meta_url, directory, "-o", f"log_file={base / 'mount.log'}"
        )  # fmt: skip
        yield directory
    finally:
        if find_mount(str(directory)) is not None:
            _unmount(directory, screen)


def _unmount(directory: Path, screen: Screen) -> None:
    try:
        tectonicfs(screen, "umount", directory)
    except BenchError:
        tectonicfs(screen, "umount", "--force", directory)
        raise
