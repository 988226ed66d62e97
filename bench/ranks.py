"""Rank processes: started once, kept, told what to do, released together and timed.

Owns the processes and their clocks; what they run is given by whoever drives them. A rank runs
one function at a time, `function(rank, *arguments)`; both must be importable by name. Imports and
everything a function does on first use happen in calls that are not timed.

A rank that raises or dies ends the run with RankFailed; ranks end when the pool is closed, or when
the process that owns it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from bench.caches import device_read_bytes
from bench.errors import RankFailed

_TIMEOUT_S: Final = 600.0
"""A call that takes longer is given up."""

_END_TIMEOUT_S: Final = 10.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True)
class Rank:
    """One rank, in its own process. `objects` is for what functions keep between calls."""

    number: int
    world_size: int
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """From the first rank's start to the last one's end, and what all made the devices read."""

    seconds: float
    device_read_bytes: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    together: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any
    started: float
    ended: float
    device_read_bytes: int


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    trace: str


class RankPool:
    """`world_size` processes. Use as a context manager. `log_file` gets what they print."""

    def __init__(self, world_size: int, log_file: Path) -> None:
        # Not forked: a child must not inherit threads, locks or event loops.
        context = multiprocessing.get_context("spawn")
        # Kept: its semaphores are gone with it.
        self._barrier = context.Barrier(world_size)
        self.world_size = world_size
        self._log_file = log_file
        log_file.touch()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for number in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(Rank(number, world_size), theirs, self._barrier, log_file),
                    name=f"rank {number}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    def call(
        self, function: Callable[Concatenate[Rank, _P], _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> list[_R]:
        """Run `function(rank, ...)` on every rank; results by rank. Raises RankFailed."""
        assert not kwargs, "positional arguments only"
        return [answer.value for answer in self._run(_Call(function, args, together=False))]

    def timed(
        self, function: Callable[Concatenate[Rank, _P], None], *args: _P.args, **kwargs: _P.kwargs
    ) -> Timing:
        """Run `function(rank, ...)` on every rank, all at once. Raises RankFailed."""
        assert not kwargs, "positional arguments only"
        answers = self._run(_Call(function, args, together=True))
        # The monotonic clock is the machine's, so the ranks' readings compare.
        started = min(answer.started for answer in answers)
        ended = max(answer.ended for answer in answers)
        return Timing(ended - started, sum(answer.device_read_bytes for answer in answers))

    def _run(self, call: _Call) -> list[_Answer]:
        for number, pipe in enumerate(self._pipes):
            try:
                pipe.send(call)
            except OSError as error:
                raise self._died(number) from error
        deadline = time.monotonic() + _TIMEOUT_S
        answers: dict[int, _Answer] = {}
        while len(answers) < self.world_size:
            waiting = {
                pipe: number for number, pipe in enumerate(self._pipes) if number not in answers
            }
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                raise RankFailed(
                    f"ranks {sorted(waiting.values())} gave no answer in {_TIMEOUT_S:.0f} s"
                )
            for pipe, number in waiting.items():
                if pipe in ready:
                    answers[number] = self._receive(number, pipe)
        return [answers[number] for number in range(self.world_size)]

    def _receive(self, number: int, pipe: Connection) -> _Answer:
        try:
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(number) from error
        if isinstance(answer, _Failure):
            raise RankFailed(f"rank {number}: {answer.message}", answer.trace)
        assert isinstance(answer, _Answer)
        return answer

    def _died(self, number: int) -> RankFailed:
        process = self._processes[number]
        process.join(_END_TIMEOUT_S)
        said = self._log_file.read_text(errors="replace")
        return RankFailed(f"rank {number} died (exit status {process.exitcode})", said)

    def close(self) -> None:
        """End the processes, by force if one is busy; idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        self.close()


# --- in the rank's process --------------------------------------------------------------------


def _rank_main(rank: Rank, pipe: Connection, barrier: Barrier, log_file: Path) -> None:
    # The owner decides when an interrupted run ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ranks are many and compute nothing: a pool of threads in each would only get in the way.
    os.environ["OMP_NUM_THREADS"] = "1"
    with log_file.open("a") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    with suppress(EOFError):
        while True:
            pipe.send(_answer(rank, pipe.recv(), barrier))


def _answer(rank: Rank, call: _Call, barrier: Barrier) -> _Answer | _Failure:
    try:
        if call.together:
            barrier.wait(_TIMEOUT_S)
        read_before, started = device_read_bytes(), time.monotonic()
        value = call.function(rank, *call.arguments)
        ended = time.monotonic()
        return _Answer(value, started, ended, device_read_bytes() - read_before)
    except Exception as error:  # noqa: BLE001 - whatever it is, the owner must be told
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
