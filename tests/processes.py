"""Processes of tests that are forked from one that has imported what they run.

To start Python and import the client takes a third of a second of CPU time, a fork hardly any; the
suite needs hundreds. What is forked has no threads, event loops or connections yet.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tectonic_client.cli.main import main

TIMEOUT_S = 120.0

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "tests.processes", "tests.upkeep.victim_process", "tests.checkpoint.rankprocesses",
        "tectonic_client.cli.volume", "tectonic_client.cli.quota", "tectonic_client.cli.checkpoint",
        "fusefs.cli", "fusefs.mounting", "fusefs.session", "fusefs.cloning", "fusefs.statsview",
        "apsw", "psycopg", "pyfuse3",
    ]
)  # fmt: skip


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `tectonicfs` in a process of its own, as a shell would."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as said:
        process = processes.Process(
            target=_command, args=(words, os.getcwd(), dict(os.environ), said)
        )
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, TIMEOUT_S, *_read(said))
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(words, code, *_read(said))


def _read(said: str) -> tuple[str, str]:
    return Path(said, "1").read_text(), Path(said, "2").read_text()


def _command(words: Sequence[str], directory: str, environment: dict[str, str], said: str) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in (1, 2):
        file = os.open(f"{said}/{descriptor}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["tectonicfs", *words]
    main()
