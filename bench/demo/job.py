"""The ranks of one start of a training job: processes with a launcher's environment, what they
tell, and their end. Whatever happens, no process outlives its job.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from bench.demo.rank import Task
from bench.demo.record import Event
from bench.errors import RankFailed

_SILENCE_S: Final = 120.0
"""No rank told anything for this long: the job hangs. A step takes about a second."""

_END_S: Final = 10.0
"""A process whose output has ended is gone, or about to be."""

_PIPE_READ_BYTES: Final = 65_536

_LOG_TAIL_BYTES: Final = 2_000


class _Process:
    """One rank."""

    def __init__(self, task: Task, rank: int, environment: dict[str, str], log_file: Path) -> None:
        self.rank = rank
        self.log_file = log_file
        self._rest = b""
        with log_file.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "bench.demo.rank", task.to_json()],
                env={**os.environ, **environment, "RANK": str(rank)},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                # A Ctrl-C is ours to handle.
                process_group=0,
            )  # fmt: skip
        assert self.popen.stdout is not None
        self.descriptor = self.popen.stdout.fileno()

    def read(self) -> list[Event] | None:
        """Events that have come; None at the end."""
        data = os.read(self.descriptor, _PIPE_READ_BYTES)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Libraries print lines of their own there.
        told = [json.loads(line) for line in lines if line.startswith(b'{"event"')]
        now = time.monotonic()
        return [Event(self.rank, facts.pop("event"), facts, now) for facts in told]

    def end(self) -> None:
        """Kill it if it runs, and collect it."""
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it logged nothing")


class Job:
    """`ranks` processes that do `task`. Use as a context manager.

    `restarts` counts earlier starts of the same job, as a launcher does. `directory` gets logs.
    """

    def __init__(self, task: Task, ranks: int, directory: Path, *, restarts: int = 0) -> None:
        name = f"{task.settings.directory.rpartition('/')[2]}-{restarts}"
        rendezvous = f"file://{directory / f'rendezvous-{name}'}"
        task = replace(task, settings=replace(task.settings, rendezvous=rendezvous))
        environment = {
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            # What torchrun sets to tell jobs, and their starts, apart.
            "TORCHELASTIC_RUN_ID": task.settings.directory,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            # Else gloo asks for the address of the host's name, which not every host has.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._killed = False
        self._told: deque[Event] = deque()
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        try:
            for rank in range(ranks):
                log_file = directory / f"{name}-rank-{rank}.log"
                process = _Process(task, rank, environment, log_file)
                self._processes.append(process)
                self._selector.register(process.descriptor, selectors.EVENT_READ, process)
        except BaseException:
            self.close()
            raise

    def events(self, until: float | None = None) -> Iterator[Event]:
        """What ranks tell, until all have ended or the monotonic clock shows `until`.

        Raises RankFailed when a rank ends with an error that it was not killed with, or hangs.
        """
        while True:
            while self._told:
                yield self._told.popleft()
            if not self._selector.get_map():
                return
            timeout_s = _SILENCE_S if until is None else max(0.0, until - time.monotonic())
            ready = self._selector.select(timeout_s)
            if not ready and until is not None:
                return
            if not ready:
                raise RankFailed(f"the ranks told nothing for {_SILENCE_S:.0f} s")
            for key, _ in ready:
                self._read(key.data)

    def _read(self, process: _Process) -> None:
        told = process.read()
        if told is not None:
            self._told += told
            return
        self._selector.unregister(process.descriptor)
        status = process.popen.wait(_END_S)
        if status != 0 and not self._killed:
            raise RankFailed(
                f"rank {process.rank} ended with status {status}: {process.last_words()}",
                process.log_file.read_text(errors="replace"),
            )

    def kill(self) -> None:
        """SIGKILL to all ranks, at once."""
        self._killed = True
        for process in self._processes:
            process.popen.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End what still runs."""
        self._selector.close()
        for process in self._processes:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
