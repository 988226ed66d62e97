"""When the ranks are killed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.demo.record import Event

_IN_A_SAVE: Final = 0.75
"""A save takes a tenth of the time, and is where most can go wrong."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of the way through what the ranks begin when the first of them tells of `step`.

    "saving": a save of `step`; "step": what follows the training of `step`.
    """

    event: Literal["saving", "step"]
    step: int
    fraction: float

    def is_begun_by(self, event: Event) -> bool:
        """Whether the event is the one that the delay counts from."""
        return event.name == self.event and event.facts["step"] == self.step

    def delay_s(self, save_seconds: float, step_seconds: float) -> float:
        """Seconds from the event to the kill."""
        return self.fraction * (save_seconds if self.event == "saving" else step_seconds)


def choose_moment(rng: random.Random, saves: Sequence[int]) -> Moment:
    """A random moment after the first of the steps that are saved and before the last one."""
    if rng.random() < _IN_A_SAVE:
        return Moment("saving", rng.choice(saves[1:-1]), rng.random())
    return Moment("step", rng.randrange(saves[0] + 1, saves[-1] - 1), rng.random())


def describe(doing: Mapping[int, str]) -> str:
    """What ranks were doing, those that did the same together: `ranks 0, 2 saving step 6; ...`."""
    together: dict[str, list[int]] = {}
    for rank, what in sorted(doing.items()):
        together.setdefault(what, []).append(rank)
    if len(together) == 1:
        return f"all ranks {next(iter(together))}"
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {what}"
        for what, ranks in together.items()
    )
