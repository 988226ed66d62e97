"""The three runs: one that is never interrupted, one that is killed, one that resumes it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.demo.job import Job
from bench.demo.moment import Moment, choose_moment, describe
from bench.demo.place import tectonicfs
from bench.demo.rank import Task
from bench.demo.record import Event, Record
from bench.demo.screen import Screen
from bench.demo.train import Settings
from bench.errors import BenchError

SAVE_EVERY: Final = 3

MIN_STEPS: Final = 3 * SAVE_EVERY
"""One save to resume from, one to be killed in, one to go on to."""

REFERENCE: Final = "/runs/reference"
DEMO: Final = "/runs/demo"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. `seed` decides the model, the text's order and the kill."""

    steps: int
    ranks: int
    seed: int
    width: int
    layers: int


@dataclass(frozen=True, slots=True)
class Runs:
    """What all three told; `killed_while` in words, `committed` the steps that were there then."""

    reference: Record
    killed: Record
    resumed: Record
    killed_while: str
    committed: tuple[int, ...]


def saved_steps(steps: int) -> list[int]:
    """Steps that a run of so many saves."""
    return sorted({*range(SAVE_EVERY, steps + 1, SAVE_EVERY), steps})


def step_directory(mount: Path, run: str, step: int) -> Path:
    """Where a mount shows a step."""
    return mount / run.lstrip("/") / f"step-{step:010d}"


class Stage:
    """Starts the jobs, in `base`, and shows them."""

    def __init__(self, options: Options, meta_url: str, base: Path, screen: Screen) -> None:
        self._options = options
        self._meta_url = meta_url
        self._base = base
        self._screen = screen

    def run_all(self, mount: Path | None) -> Runs:
        """Run the three. Raises RankFailed, BenchError."""
        options, screen = self._options, self._screen
        screen.title(f"1. {options.steps} steps on {options.ranks} ranks, never interrupted")
        reference = Record(options.ranks)
        with Job(Task(self._settings(REFERENCE)), options.ranks, self._base) as job:
            self._follow(job, reference)

        screen.title("2. The same again, until kill -9 of all ranks at a random moment")
        moment = choose_moment(random.Random(options.seed), saved_steps(options.steps))
        killed, killed_while = self._run_and_kill(moment, reference)
        committed = self._committed()
        screen.say(f"  kill -9: {killed_while}", style="bold")
        screen.say(f"  committed steps: {', '.join(map(str, committed))}")

        screen.title(f"3. Started again: goes on from step {committed[-1]}")
        resumed = self._resume(mount)
        return Runs(reference, killed, resumed, killed_while, committed)

    def _settings(self, directory: str) -> Settings:
        options = self._options
        return Settings(
            self._meta_url, directory, options.steps, SAVE_EVERY, options.width, options.layers,
            options.seed,
        )  # fmt: skip

    def _follow(
        self, job: Job, record: Record, is_last: Callable[[Event], bool] = lambda event: False
    ) -> Event | None:
        """Show and record a job until it ends, or an event that `is_last`, which is returned."""
        with self._screen.job(self._options.ranks, self._options.steps) as view:
            for event in job.events():
                record.add(event)
                view.show(event)
                if is_last(event):
                    return event
        return None

    def _run_and_kill(self, moment: Moment, reference: Record) -> tuple[Record, str]:
        record = Record(self._options.ranks)
        delay_s = moment.delay_s(reference.save_seconds(), reference.step_seconds())
        with Job(Task(self._settings(DEMO)), self._options.ranks, self._base) as job:
            begun = self._follow(job, record, moment.is_begun_by)
            if begun is None:
                raise BenchError(f"the job ended before {moment}")
            for event in job.events(until=begun.at + delay_s):
                record.add(event)
            job.kill()
            for event in job.events():
                record.add(event)
        return record, f"{describe(record.doing)}, {delay_s * 1000:.0f} ms after the first began"

    def _committed(self) -> tuple[int, ...]:
        listing = tectonicfs(self._screen, "ckpt", "ls", "--json", self._meta_url, DEMO)
        found = tuple(step["step"] for step in json.loads(listing)["steps"])
        if not found:
            raise BenchError("no step was committed, though the first save had returned")
        return found

    def _resume(self, mount: Path | None) -> Record:
        options, record = self._options, Record(self._options.ranks)
        scratch = self._base / "raw"
        scratch.mkdir()
        last = None if mount is None else str(step_directory(mount, DEMO, options.steps))
        task = Task(self._settings(DEMO), str(scratch), last)
        with Job(task, options.ranks, self._base, restarts=1) as job:
            self._follow(job, record)
        return record
