"""A data-parallel training loop that saves and resumes with the checkpoint API: the part to copy.

Each rank computes gradients on text of its own; gradients are averaged over all ranks. Parameters
are divided among the ranks (ZeRO stage 1, https://arxiv.org/abs/1910.02054): a rank updates those
it owns, keeps the AdamW state of only those, and sends them to the others. So the checkpoint is
divided too: each rank saves what it owns, and everything else that its next step depends on.

Run it under any launcher that sets RANK and WORLD_SIZE, twice to see it resume:

    tectonicfs format /data/meta.db --name demo --store /data/chunks
    torchrun --nproc-per-node 4 -m bench.demo.train /data/meta.db /runs/mine --steps 100

Each rank tells what it does on stdout, one JSON object a line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import click
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.demo.model import CONTEXT_BYTES, VOCABULARY, LanguageModel, read_text
from tectonic_client.checkpoint import CheckpointManager

BATCH: Final = 2
"""Pieces of text per rank and step."""

LEARNING_RATE: Final = 1e-3

SAVE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One training job; its checkpoints are in `directory` of the volume at `meta_url`."""

    meta_url: str
    directory: str
    steps: int
    save_every: int
    width: int
    layers: int
    seed: int
    rendezvous: str = "env://"


class Trainer:
    """The model, this rank's share of the optimizer, and where it is in the text."""

    def __init__(self, settings: Settings) -> None:
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        torch.use_deterministic_algorithms(True)
        # The same model and the same order of the text on all ranks, but dropout of their own.
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(settings.width, settings.layers)
        self.text = read_text()
        self.order = torch.randperm(len(self.text) // CONTEXT_BYTES - 1)
        torch.manual_seed(settings.seed + 1 + self.rank)

        parameters = dict(self.model.named_parameters())
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self.owners = choose_owners(sizes, self.world_size)
        self.owned = {
            name: parameter for name, parameter in parameters.items()
            if self.owners[name] == self.rank
        }  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.owned.values(), lr=LEARNING_RATE)
        self.step = 0
        self.position = 0

    # --- training -----------------------------------------------------------------------------

    def train_step(self) -> float:
        """One step; returns the loss, averaged over all ranks."""
        tokens = self._next_batch()
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss.backward()
        self._average_gradients()
        self.optimizer.step()
        self.model.zero_grad()
        self._share_parameters()
        self.step += 1
        return self._average(loss.detach())

    def _next_batch(self) -> torch.Tensor:
        """This rank's part of the next pieces of text, each with the byte that follows it."""
        first = self.position + self.rank * BATCH
        self.position += self.world_size * BATCH
        pieces = self.order[torch.arange(first, first + BATCH) % len(self.order)]
        starts = pieces.unsqueeze(1) * CONTEXT_BYTES
        return self.text[starts + torch.arange(CONTEXT_BYTES + 1)].long()

    def _average_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def _share_parameters(self) -> None:
        """Every rank gets all parameters from their owners."""
        for name, parameter in self.model.named_parameters():
            dist.broadcast(parameter.data, src=self.owners[name])

    def _average(self, value: torch.Tensor) -> float:
        dist.all_reduce(value)
        return float(value) / self.world_size

    # --- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that this rank's next steps depend on and the others do not save."""
        return {
            "model": self.owned,
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "data": self.position,
            "step": self.step,
        }

    def save(self, manager: CheckpointManager, loss: float) -> None:
        """Save a step, all ranks together."""
        # Without it, the time of a save would be the wait for the slowest rank, too.
        dist.barrier()
        tell("saving", step=self.step)
        report = manager.save(
            self.step, self.state(), timeout=SAVE_TIMEOUT_S, metadata={"loss": loss}
        )
        tell("saved", step=self.step, bytes=report.bytes, seconds=report.total_s)

    def resume(self, manager: CheckpointManager) -> None:
        """Go on from the newest step, if there is one. It cannot change: nobody trains yet."""
        if manager.latest() is None:
            return
        create_optimizer_state(self.optimizer)
        state = self.state()
        report = manager.load(state)
        # Parameters and the optimizer's tensors were loaded in place; these were not:
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.position, self.step = state["data"], state["step"]
        self._share_parameters()
        tell("resumed", step=self.step, bytes=report.bytes, seconds=report.total_s)


def choose_owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank that owns each parameter, so that all own about the same number of elements."""
    loads = [0] * world_size
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the tensors of an optimizer's state, which exist from its first step on, to load into.

    A step with gradients and learning rates of zero makes them, and changes no parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def train(settings: Settings, manager: CheckpointManager) -> Trainer:
    """Train from the newest checkpoint, or from the start, to the last step."""
    trainer = Trainer(settings)
    trainer.resume(manager)
    while trainer.step < settings.steps:
        loss = trainer.train_step()
        tell("step", step=trainer.step, loss=loss)
        if trainer.step % settings.save_every == 0 or trainer.step == settings.steps:
            trainer.save(manager, loss)
    return trainer


# --- one rank's process -----------------------------------------------------------------------


def tell(event: str, **facts: object) -> None:
    """Print what this rank does, for whoever started it."""
    # One write per line: a launcher may give all ranks the same pipe.
    print(json.dumps({"event": event, **facts}) + "\n", end="", flush=True)


@contextmanager
def training_job(settings: Settings) -> Iterator[CheckpointManager]:
    """Join the other ranks of the launcher's job, and open its checkpoints."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=settings.rendezvous, rank=rank, world_size=world_size
    )
    with CheckpointManager(
        settings.meta_url, settings.directory, rank=rank, world_size=world_size
    ) as manager:
        yield manager
    dist.destroy_process_group()


@click.command()
@click.argument("meta_url")
@click.argument("directory")
@click.option("--steps", default=100, show_default=True, help="Where training ends.")
@click.option("--save-every", default=10, show_default=True, help="Steps between checkpoints.")
@click.option("--width", default=512, show_default=True, help="Width of the model.")
@click.option("--layers", default=5, show_default=True, help="Layers of the model.")
@click.option("--seed", default=0, show_default=True)
def main(**options: Any) -> None:
    """Train a small language model on Python's own sources; one process of several.

    Checkpoints go to DIRECTORY in the volume at META_URL, and the newest one there is where it
    starts.
    """
    settings = Settings(**options)
    with training_job(settings) as manager:
        train(settings, manager)


if __name__ == "__main__":
    main()
