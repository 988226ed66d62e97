"""Mounting things for tests: the command as users run it, and mounts that are always cleaned up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fusefs import registry
from fusefs.mounttable import find_mount
from tests.processes import TIMEOUT_S, run_command

COMMAND = "from tectonic_client.cli.main import main; main()"


def tectonicfs(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command; with `check` it must succeed."""
    result = run_command(*arguments)
    assert not check or result.returncode == 0, result.stderr
    return result


def refused(*arguments: str | Path) -> str:
    """Run the command, which must fail with one line on stderr; returns that line."""
    result = tectonicfs(*arguments, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.startswith("tectonicfs: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def format_volume(base: Path, url: str | None = None) -> str:
    """A volume with small blocks, so that little data has many of them; returns its URL.

    Its store, and its metadata unless there is a `url`, lie in `base`.
    """
    url = url or str(base / "meta.db")
    tectonicfs(
        "format", url, "--name", "tests", "--store", base / "store",
        "--chunk-size", "64KiB", "--block-size", "256KiB",
    )  # fmt: skip
    return url


class MountedVolume:
    """A daemon's mount. `pid` is the daemon's."""

    def __init__(self, url: str, directory: Path, *options: str) -> None:
        self.url = url
        self.path = directory
        self.log_file = directory.parent / "mount.log"
        directory.mkdir(exist_ok=True)
        settings = ",".join([f"log_file={self.log_file}", *options])
        said = tectonicfs("mount", url, directory, "-o", settings).stdout
        self.pid = int(said.rpartition("pid ")[2].rstrip(")\n"))
        self.lives = os.pidfd_open(self.pid)

    def wait_gone(self) -> None:
        """Wait until the daemon has ended."""
        poll = select.poll()
        poll.register(self.lives, select.POLLIN)
        assert poll.poll(TIMEOUT_S * 1000), "the daemon did not end"

    def clean_up(self) -> None:
        """Whatever the test left: no mount and no process."""
        if find_mount(str(self.path)):
            subprocess.run(["umount", "--lazy", str(self.path)], check=True, timeout=TIMEOUT_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.lives, signal.SIGKILL)
        self.wait_gone()
        os.close(self.lives)
        with registry.living_daemon(str(self.path), os.getuid()) as daemon:
            assert daemon is None  # The file of one that was killed is removed by looking at it.


@contextmanager
def mounted(url: str, directory: Path, *options: str) -> Iterator[MountedVolume]:
    """A mount for the duration of a test."""
    mount = MountedVolume(url, directory, *options)
    try:
        yield mount
    finally:
        mount.clean_up()
