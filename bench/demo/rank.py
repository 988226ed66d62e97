"""One rank of the demo: trains as `train` does and, if asked, looks at what it saved.

The looking comes after the last step, while the tensors that were trained are still in memory:
they are compared with the files that the mount shows, and transfers are timed beside the raw
device, all ranks beginning together; what that saves is removed again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bench.demo.train import (
    SAVE_TIMEOUT_S,
    Settings,
    Trainer,
    tell,
    train,
    training_job,
)
from tectonic_client.checkpoint import CheckpointManager

ROUNDS: Final = 3
"""How often each transfer is timed, in turns with the others."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank does. `step_directory` is the last step as a mount shows it.

    `scratch` is an empty directory on the stores' device; None: only train.
    """

    settings: Settings
    scratch: str | None = None
    step_directory: str | None = None

    def to_json(self) -> str:
        """For the command line of a rank's process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return Task(**fields | {"settings": Settings(**fields["settings"])})


# --- comparing with the files -----------------------------------------------------------------


def tensors_of(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested state, by their names in a checkpoint: the path, with dots."""
    if isinstance(state, torch.Tensor):
        yield name, state.detach()
    elif isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bool(torch.equal(*(side.reshape(-1).view(torch.uint8) for side in (left, right))))


def differences(live: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are on one side only or differ in any bit."""
    return sorted(
        name for name in live.keys() | stored.keys()
        if name not in live or name not in stored or not same_bits(live[name], stored[name])
    )  # fmt: skip


def _compare(trainer: Trainer, step_directory: Path) -> None:
    name = f"rank-{trainer.rank:05d}-of-{trainer.world_size:05d}.safetensors"
    live = dict(tensors_of(trainer.state()))
    different = differences(live, load_file(step_directory / name))
    tell("compared", tensors=len(live), different=different)


# --- timing -----------------------------------------------------------------------------------


def _timed(transfer: str, nbytes: int, work: Callable[[], object]) -> None:
    """Do this rank's share of a transfer, all ranks at once."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    tell("timed", transfer=transfer, bytes=nbytes, seconds=time.perf_counter() - begun)


def _measure(trainer: Trainer, manager: CheckpointManager, scratch: Path) -> None:
    """Save and load the last state again and again, in turns with the raw device's same bytes."""
    # Loaded here: a rank that only trains does without the benchmark's targets.
    from bench.ranks import Rank
    from bench.targets import RawDevice

    state = trainer.state()
    mine = manager.load(state).bytes
    total = torch.tensor(mine)
    dist.all_reduce(total)
    rank, raw = Rank(trainer.rank, trainer.world_size), RawDevice(scratch, int(total))
    raw.open(rank)
    for number in range(ROUNDS):
        step = trainer.step + 1 + number
        raw.prepare(rank, number)
        _timed("raw write", mine, partial(raw.save, rank, number))
        _timed("save", mine, partial(manager.save, step, state, timeout=SAVE_TIMEOUT_S))
        _timed("raw read", mine, partial(raw.load, rank, number))
        _timed("load", mine, partial(manager.load, state))
        dist.barrier()
        raw.remove(rank, number)
        if trainer.rank == 0:
            manager.delete(step)
    raw.close(rank)


@click.command()
@click.argument("task")
def main(task: str) -> None:
    """Do TASK, a JSON object."""
    todo = Task.from_json(task)
    with training_job(todo.settings) as manager:
        trainer = train(todo.settings, manager)
        if todo.step_directory is not None:
            _compare(trainer, Path(todo.step_directory))
        if todo.scratch is not None:
            _measure(trainer, manager, Path(todo.scratch))


if __name__ == "__main__":
    main()
