"""Runs cases in turn and collects their samples.

A machine drifts: caches fill, devices tire, neighbours come and go. So cases are interleaved,
each pass begins with another case, the first pass warms up and is not counted, and what is
compared comes from the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import Row

OnStep = Callable[[str], None]
"""Told what happens next."""


class Metric(NamedTuple):
    """What a case measures."""

    name: str
    unit: str


class Case(Protocol):
    """Something to measure, again and again."""

    @property
    def name(self) -> str:
        """As shown in the table."""

    def measure(self) -> Mapping[Metric, float]:
        """One sample of each metric. Leaves nothing behind that the next case would feel."""


def interleave(cases: Sequence[Case], repeat: int, on_step: OnStep) -> list[Row]:
    """Measure each case `repeat` times, after one time that is not counted."""
    samples: dict[tuple[str, Metric], list[float]] = {}
    for number in range(repeat + 1):
        first = number % len(cases) if cases else 0
        for case in [*cases[first:], *cases[:first]]:
            on_step(f"{case.name}: {f'repeat {number} of {repeat}' if number else 'warm-up'}")
            found = case.measure()
            if number:
                for metric, value in found.items():
                    samples.setdefault((case.name, metric), []).append(value)
    order = [case.name for case in cases]
    return sorted(
        (
            Row(case, metric.name, metric.unit, tuple(values))
            for (case, metric), values in samples.items()
        ),
        key=lambda row: order.index(row.case),
    )


@contextmanager
def progress(steps: int) -> Iterator[OnStep]:
    """A display on stderr: a bar on a terminal, else a line for each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: click.echo(text, err=True)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("starting", total=steps)
        started = False

        def on_step(text: str) -> None:
            nonlocal started
            display.update(task, description=text, advance=1 if started else 0)
            started = True

        yield on_step
