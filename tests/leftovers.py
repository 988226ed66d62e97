"""Finds processes and mounts that tests left behind, however they detached themselves.

Processes are known by a word in their environment, which daemons inherit too, or as children of
the test run; mounts by lying below a directory of the test run.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TECTONICFS_TEST_RUN"

PATIENCE_S = 10.0
"""A daemon gives up its locks, which its owner waits for, shortly before it is gone."""

_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers that multiprocessing keeps until the interpreter ends: children of the test run. What the
second one forks bears its name."""


_PARENT, _STARTED = 1, 19
"""Of `_stat_fields`."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    started: str

    @property
    def command(self) -> str:
        """What it runs now; empty once it is gone."""
        try:
            line = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return ""
        return line.replace(b"\0", b" ").decode(errors="replace").strip()

    @property
    def is_of_python(self) -> bool:
        """Whether it is a helper of this interpreter."""
        fields = _stat_fields(self.pid)
        return (
            bool(fields)
            and int(fields[_PARENT]) == os.getpid()
            and any(name in self.command for name in _OF_PYTHON)
        )


class Leftovers:
    """Watch over one test run."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        # Begins with that of the run that this one is part of, which looks after it, too.
        self._token = os.environ.get(VARIABLE, "") + "." + secrets.token_hex(8)
        os.environ[VARIABLE] = self._token
        self._known_pids = _all_pids()
        self.directories: list[Path] = []
        """Where tests mount."""
        self._processes: dict[_Process, str] = {}
        self._mounts: dict[Path, str] = {}

    def note(self, test: str) -> None:
        """Remember that what is new was first seen after `test`."""
        pids = _all_pids()
        self._known_pids &= pids
        for pid in pids - self._known_pids:
            environment = _environment(pid)
            # Empty: a thread of the kernel, or a process just between two programs.
            if environment:
                self._known_pids.add(pid)
                process = self._inspect(pid, environment)
                if process is not None:
                    self._processes[process] = test
        for directory in _fuse_mounts():
            if any(directory.is_relative_to(base) for base in self.directories):
                self._mounts.setdefault(directory, test)

    def clear(self) -> list[str]:
        """Describe and remove what is left at the end."""
        self.note("the last test")
        lines = []
        for process, test in self._processes.items():
            if process.is_of_python:
                continue
            if not _ends(process, self._patience_s):
                lines.append(f"process {process.pid} ({process.command}), started in {test}")
                os.kill(process.pid, signal.SIGKILL)
        for directory in _fuse_mounts() & self._mounts.keys():
            lines.append(f"mount {directory}, made in {self._mounts[directory]}")
            subprocess.run(["umount", "--lazy", directory], check=False, timeout=PATIENCE_S)
        return lines

    def _inspect(self, pid: int, environment: bytes) -> _Process | None:
        """The process, if it is ours."""
        fields = _stat_fields(pid)
        if not fields:
            return None
        word = f"{VARIABLE}={self._token}".encode()
        ours = any(found.startswith(word) for found in environment.split(b"\0"))
        ours = ours or int(fields[_PARENT]) == os.getpid()
        if not ours:
            return None
        return _Process(pid, fields[_STARTED])


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _stat_fields(pid: int) -> list[str]:
    """What follows the command's name in its `stat` (proc(5)); empty where there is no process."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []  # Gone, or of another user.


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # Gone, or of another user.


def _ends(process: _Process, patience_s: float) -> bool:
    """Whether the process is gone, or goes in time."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        fields = _stat_fields(process.pid)
        if not fields or fields[_STARTED] != process.started:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(patience_s * 1000))
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _fuse_mounts() -> set[Path]:
    """Mount points of user-space file systems (proc(5), mountinfo)."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("fuse"):
            found.add(Path(before.split()[4].encode().decode("unicode_escape")))
    return found
