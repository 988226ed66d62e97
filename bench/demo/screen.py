"""What the demo shows: on a terminal with bars that move, else line by line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.demo.record import Event

_PLAIN_WIDTH: Final = 100
"""A file or pipe has no width."""

_TEXTS: Final = {
    "resumed": "loaded in {seconds:.2f} s",
    "step": "loss {loss:.4f}",
    "saving": "saving step {step}",
    "saved": "saved in {seconds:.2f} s",
}


class JobView(Protocol):
    """Shows a job as it goes."""

    def show(self, event: Event) -> None:
        """A rank told something."""


class Screen:
    """A console for people."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal

    def title(self, text: str) -> None:
        """Begin a part."""
        self.say(f"\n{text}", style="bold")

    def command(self, *words: str) -> None:
        """A command that is run."""
        self.say(f"$ {shlex.join(words)}", style="dim")

    def say(self, text: str, style: str = "") -> None:
        """A line, as long as it is."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """A table."""
        self.console.print(what)

    @contextmanager
    def job(self, ranks: int, steps: int) -> Iterator[JobView]:
        """A view of a job that trains to step `steps`."""
        if not self._live:
            self.say(f"  {ranks} ranks start")
            yield _Lines(self, steps)
            return
        with Progress(
            TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console,
        ) as progress:  # fmt: skip
            yield _Bar(progress, ranks, steps)


class _Bar:
    """One bar, moved by rank 0."""

    def __init__(self, progress: Progress, ranks: int, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(f"{ranks} ranks start", total=steps)

    def show(self, event: Event) -> None:
        if event.rank == 0 and event.name in _TEXTS:
            text = _TEXTS[event.name].format(**event.facts)
            self._progress.update(self._task, description=text, completed=event.facts["step"])


class _Lines:
    """A line per step, by rank 0."""

    def __init__(self, screen: Screen, steps: int) -> None:
        self._screen = screen
        self._steps = steps

    def show(self, event: Event) -> None:
        if event.rank == 0 and event.name in _TEXTS and event.name != "saving":
            text = _TEXTS[event.name].format(**event.facts)
            self._screen.say(f"  {event.facts['step']:3}/{self._steps}  {text}")
