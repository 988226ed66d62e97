"""What the ranks of a job have told: losses, transfers, and what each does now. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple


class Event(NamedTuple):
    """What a rank told, and when it was read on the monotonic clock."""

    rank: int
    name: str
    facts: Mapping[str, Any]
    at: float


class Transfer(NamedTuple):
    """What one rank moved, and how long it took."""

    bytes: int
    seconds: float


def throughput(ranks: Iterable[Transfer]) -> float:
    """Bytes per second of a transfer by several ranks: all bytes over the slowest rank's time."""
    ranks = tuple(ranks)
    return sum(rank.bytes for rank in ranks) / max(rank.seconds for rank in ranks)


@dataclass(slots=True)
class Record:
    """What was told so far.

    `losses` by step. `step_times`: when each step ended, on the first rank that told. `doing`:
    what each rank does, in words. `transfers`: for each kind ("training save", "save", "load", ...)
    its occurrences, each by rank.
    """

    ranks: int
    losses: dict[int, float] = field(default_factory=dict)
    transfers: dict[str, list[dict[int, Transfer]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    doing: dict[int, str] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    resumed_at: int | None = None
    resume_seconds: float = 0.0
    tensors_compared: int = 0
    tensors_different: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take note of an event."""
        facts = event.facts
        match event.name:
            case "step":
                if facts["step"] not in self.losses:
                    self.step_times.append(event.at)
                self.losses[facts["step"]] = facts["loss"]
                self.doing[event.rank] = f"training step {facts['step'] + 1}"
            case "saving":
                self.doing[event.rank] = f"saving step {facts['step']}"
            case "saved":
                self._add_transfer("training save", event)
                self.doing[event.rank] = f"training step {facts['step'] + 1}"
            case "resumed":
                self.resumed_at = facts["step"]
                self.resume_seconds = max(self.resume_seconds, facts["seconds"])
            case "timed":
                self._add_transfer(facts["transfer"], event)
            case "compared":
                self.tensors_compared += facts["tensors"]
                self.tensors_different += (
                    f"rank {event.rank}: {name}" for name in facts["different"]
                )

    def _add_transfer(self, kind: str, event: Event) -> None:
        transfer = Transfer(event.facts["bytes"], event.facts["seconds"])
        occurrences = self.transfers[kind]
        # Ranks tell each occurrence in the same order: a rank's next one is the first without it.
        for occurrence in occurrences:
            if event.rank not in occurrence:
                occurrence[event.rank] = transfer
                return
        occurrences.append({event.rank: transfer})

    def throughputs(self, kind: str) -> tuple[float, ...]:
        """Bytes per second of each occurrence that all ranks completed."""
        return tuple(
            throughput(occurrence.values())
            for occurrence in self.transfers[kind]
            if len(occurrence) == self.ranks
        )

    def step_seconds(self) -> float:
        """How long a step takes."""
        return median(later - earlier for earlier, later in pairwise(self.step_times))

    def save_seconds(self) -> float:
        """How long a save takes on the slowest rank."""
        return median(
            max(transfer.seconds for transfer in save.values())
            for save in self.transfers["training save"]
        )


def unequal_steps(expected: Mapping[int, float], found: Mapping[int, float]) -> list[int]:
    """Steps of `expected` whose loss in `found` is missing or differs in any bit."""
    # Floats that compare equal have equal bits but for zeros, and NaN differs from itself: a loss
    # that is neither is what training is about.
    return [step for step, loss in expected.items() if found.get(step) != loss]
