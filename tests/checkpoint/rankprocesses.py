"""Rank processes that can be killed at any step of a save."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from tectonic_client.blocks.writer import BlockWriter
from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.saving import _Driver
from tectonic_client.errors import TectonicError

DIRECTORY = "/runs/test"
TIMEOUT_S = 60.0

PHASES = ("_enter", "_bring", "_commit")
"""Steps of `collective.Save` whose transactions open an attempt, arrive and commit."""


@dataclass(frozen=True)
class Job:
    """What every rank of a job does: save `step`, after `earlier` ones that nothing disturbs."""

    url: str
    world_size: int
    step: int
    seed: int
    run_id: str | None = None
    timeout_s: float = 30.0
    earlier: tuple[int, ...] = ()
    unsupported_on: int | None = None


@dataclass(frozen=True)
class Kill:
    """Where a rank ends itself by SIGKILL: `before` or `after` a phase, or while `uploading`."""

    when: str
    phase: str = ""


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


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(kill: Kill) -> None:
    if kill.when == "uploading":
        put = BlockWriter.put_chunk

        async def put_and_die(self: BlockWriter, *arguments: Any, **options: Any) -> None:
            await put(self, *arguments, **options)
            _die()

        BlockWriter.put_chunk = put_and_die  # type: ignore[method-assign]
        return
    answer = _Driver._answer

    async def answer_or_die(self: _Driver, request: Any) -> Any:
        name = getattr(getattr(request, "fn", None), "__qualname__", "")
        here = type(request).__name__ == "Transact" and f".{kill.phase}." in name
        if here and kill.when == "before":
            _die()
        result = await answer(self, request)
        if here and kill.when == "after":
            _die()
        return result

    _Driver._answer = answer_or_die  # type: ignore[method-assign]


def _rank(pipe: Connection, job: Job, rank: int, kill: Kill | None) -> None:
    try:
        with CheckpointManager(
            job.url, DIRECTORY, rank=rank, world_size=job.world_size, run_id=job.run_id
        ) as manager:
            for step in job.earlier:
                manager.save(step, state_of(rank, job.seed))
            if kill is not None:
                _arm(kill)
            pipe.send("ready")
            pipe.recv()
            state = state_of(rank, job.seed)
            if rank == job.unsupported_on:
                state |= {"bad": {"object": object(), "set": {1}}}
            manager.save(job.step, state, timeout=job.timeout_s)
            pipe.send(None)
    except TectonicError as error:
        pipe.send(error)


class Ranks:
    """The processes of one job, or of several at once."""

    def __init__(self, ranks: Sequence[tuple[Job, int, Kill | None]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for job, rank, kill in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, job, rank, kill))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self) -> list[TectonicError | str | None]:
        """Save on all; per process its error, None for success, or "killed"."""
        for pipe in self.pipes:
            self._receive(pipe)
        for pipe in self.pipes:
            pipe.send("go")
        outcomes = [self._receive(pipe) for pipe in self.pipes]
        for process in self.processes:
            process.join(TIMEOUT_S)
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        return outcomes

    def _receive(self, pipe: Connection) -> Any:
        assert wait([pipe], TIMEOUT_S), "a rank gave no answer"
        try:
            return pipe.recv()
        except EOFError:
            return "killed"


def run_job(
    job: Job, kills: dict[int, Kill] | None = None, *, also: Sequence[Job] = ()
) -> list[TectonicError | str | None]:
    """Run all ranks of a job (and of others at the same time); outcomes in order."""
    ranks = [(job, rank, (kills or {}).get(rank)) for rank in range(job.world_size)]
    ranks += [(other, rank, None) for other in also for rank in range(other.world_size)]
    return Ranks(ranks).run()
