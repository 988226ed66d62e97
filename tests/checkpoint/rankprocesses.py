"""Rank processes that can be killed, stopped or interrupted at any step of a save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import trio

from tectonic_client.blocks.writer import BlockWriter
from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.saving import _Driver
from tectonic_client.errors import TectonicError
from tests.processes import processes

DIRECTORY = "/runs/test"
TIMEOUT_S = 60.0

PHASES = ("_enter", "_bring", "_commit")
"""Steps of `collective.Save` whose transactions open an attempt, arrive and commit."""


def state_of(rank: int, seed: int) -> dict[str, Any]:
    """A rank's state: different for each rank and seed, several chunks of 64 KiB."""
    rng = np.random.default_rng([rank, seed])
    return {
        "weights": rng.integers(0, 255, 300_000, np.uint8),
        "moments": [rng.standard_normal((100, 300)), rng.standard_normal(7).astype(np.float32)],
        "step": seed,
        "name": f"rank {rank}",
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


@dataclass(frozen=True)
class Job:
    """What every rank of a job does: save `step`, after `earlier` ones that nothing disturbs.

    With `again` each rank then tries once more, with the next seed.
    """

    url: str
    world_size: int
    step: int
    seed: int
    run_id: str | None = None
    timeout_s: float = 30.0
    earlier: tuple[int, ...] = ()
    unsupported_on: int | None = None
    again: bool = False
    make_state: Callable[[int, int], Any] = state_of


@dataclass(frozen=True)
class Kill:
    """Where a rank gets a signal: `before` or `after` a phase, or while `uploading`."""

    when: str
    phase: str = ""
    number: signal.Signals = signal.SIGKILL


class _Strike:
    """Sends this process the signal, once."""

    def __init__(self, kill: Kill) -> None:
        self._kill = kill
        self._done = False

    async def __call__(self) -> None:
        if self._done:
            return
        self._done = True
        if self._kill.number == signal.SIGSTOP:
            # Through another thread it would reach this one a moment later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return
        os.kill(os.getpid(), self._kill.number)
        if self._kill.number in (signal.SIGINT, signal.SIGTERM):
            # The main thread gets it as an exception and cancels this.
            await trio.sleep_forever()


def _arm(kill: Kill) -> None:
    strike = _Strike(kill)
    if kill.when == "uploading":
        put = BlockWriter.put_chunk

        async def put_and_strike(self: BlockWriter, *arguments: Any, **options: Any) -> None:
            await put(self, *arguments, **options)
            await strike()

        BlockWriter.put_chunk = put_and_strike  # type: ignore[method-assign]
        return
    answer = _Driver._answer

    async def answer_and_strike(self: _Driver, request: Any) -> Any:
        name = getattr(getattr(request, "fn", None), "__qualname__", "")
        here = type(request).__name__ == "Transact" and f".{kill.phase}." in name
        if here and kill.when == "before":
            await strike()
        result = await answer(self, request)
        if here and kill.when == "after":
            await strike()
        return result

    _Driver._answer = answer_and_strike  # type: ignore[method-assign]


Outcome = TectonicError | str | None
"""How a save ended on a rank: with an error, by a signal, or well."""


def _rank(pipe: Connection, job: Job, rank: int, kill: Kill | None) -> None:
    # As a launcher's children often do; the default would be one more SIGKILL.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        with CheckpointManager(
            job.url, DIRECTORY, rank=rank, world_size=job.world_size, run_id=job.run_id
        ) as manager:
            for step in job.earlier:
                manager.save(step, job.make_state(rank, job.seed))
            if kill is not None:
                _arm(kill)
            pipe.send("ready")
            pipe.recv()
            pipe.send(_save(manager, job))
            if job.again:
                pipe.recv()
                job = replace(job, seed=job.seed + 1, unsupported_on=None)
                pipe.send(_save(manager, job))
    except TectonicError as error:
        pipe.send(error)


def _save(manager: CheckpointManager, job: Job) -> Outcome:
    state = job.make_state(manager.rank, job.seed)
    if manager.rank == job.unsupported_on:
        state |= {"bad": {"object": object(), "set": {1}}}
    try:
        manager.save(job.step, state, timeout=job.timeout_s)
    except TectonicError as error:
        return error
    except KeyboardInterrupt:
        return "interrupted"
    return None


class Ranks:
    """The processes of one job, or of several at once."""

    def __init__(self, ranks: Sequence[tuple[Job, int, Kill | None]]) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for job, rank, kill in ranks:
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_rank, args=(theirs, job, rank, kill), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self) -> list[Outcome]:
        """Save on all; per process its error, None for success, or "killed"."""
        self.begin()
        outcomes = [self.outcome(number) for number in range(len(self.pipes))]
        self.end()
        return outcomes

    def begin(self) -> None:
        """Let all save at once, when all are ready."""
        for number in range(len(self.pipes)):
            self.outcome(number)
        self.go()

    def go(self) -> None:
        """Let all go on."""
        for pipe in self.pipes:
            pipe.send("go")

    def outcome(self, number: int) -> Any:
        """What a process says next; "killed" where it has ended without a word."""
        assert wait([self.pipes[number]], TIMEOUT_S), "a rank gave no answer"
        try:
            return self.pipes[number].recv()
        except EOFError:
            return "killed"

    def end(self) -> None:
        """Wait until all have ended."""
        for process in self.processes:
            process.join(TIMEOUT_S)
            assert process.exitcode in (0, 1, -signal.SIGKILL), process.exitcode


def run_job(
    job: Job, kills: dict[int, Kill] | None = None, *, also: Sequence[Job] = ()
) -> list[Outcome]:
    """Run all ranks of a job (and of others at the same time); outcomes in order."""
    ranks = [(job, rank, (kills or {}).get(rank)) for rank in range(job.world_size)]
    ranks += [(other, rank, None) for other in also for rank in range(other.world_size)]
    return Ranks(ranks).run()
