"""What the runs showed: is all as it should be, and how fast was it."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.table import Table

from bench.demo.record import unequal_steps
from bench.demo.runs import DEMO, REFERENCE, Runs, step_directory
from bench.report import Row, with_ratios

_STEPS_SHOWN: Final = 3
"""Before and after the step that was resumed from, and after the kill."""

_TRAINING: Final = "checkpoint API, in training"
_API: Final = "checkpoint API, repeated"
_RAW: Final = "raw device"


# --- the losses -------------------------------------------------------------------------------


def losses_table(runs: Runs) -> Table:
    """Losses of all runs around the kill, with all digits that a float32 has."""
    table = Table("step", box=None, padding=(0, 3, 0, 2))
    for title in ("uninterrupted", "killed", "resumed"):
        table.add_column(title, justify="right")
    table.add_column("")
    for step in _steps_shown(runs):
        found = [record.losses.get(step) for record in (runs.killed, runs.resumed)]
        expected = runs.reference.losses[step]
        equal = all(loss in (None, expected) for loss in found)
        figures = (f"{loss:.9f}" if loss is not None else "" for loss in (expected, *found))
        table.add_row(str(step), *figures, "[green]equal[/]" if equal else "[red]different[/]")
    return table


def _steps_shown(runs: Runs) -> list[int]:
    centres = {runs.committed[-1], max(runs.killed.losses)}
    return [
        step for step in sorted(runs.reference.losses)
        if any(abs(step - centre) <= _STEPS_SHOWN for centre in centres)
    ]  # fmt: skip


def wrong_losses(runs: Runs) -> Iterator[str]:
    """A line about each run whose losses are not those of the uninterrupted one."""
    losses = runs.reference.losses
    first = runs.committed[-1] + 1
    due = {
        "killed": {step: losses[step] for step in runs.killed.losses},
        "resumed": {step: loss for step, loss in losses.items() if step >= first},
    }
    found = {"killed": runs.killed.losses, "resumed": runs.resumed.losses}
    for name, expected in due.items():
        for step in unequal_steps(expected, found[name])[:1]:
            yield (
                f"LOSSES DIFFER: step {step} has {losses[step]!r} in the uninterrupted run,"
                f" {found[name].get(step)!r} in the {name} one"
            )
    if runs.resumed.resumed_at != runs.committed[-1]:
        yield f"resumed from step {runs.resumed.resumed_at}, not from {runs.committed[-1]}"


def resumed_steps(runs: Runs) -> tuple[int, int]:
    """Steps to train after resuming, and those of them whose loss is the uninterrupted run's."""
    due = {step: loss for step, loss in runs.reference.losses.items() if step > runs.committed[-1]}
    return len(due), len(due) - len(unequal_steps(due, runs.resumed.losses))


# --- the files --------------------------------------------------------------------------------


def unequal_files(mount: Path, step: int) -> list[str]:
    """Files of a step that are not the same, byte for byte, in the uninterrupted run's."""
    expected, found = (step_directory(mount, run, step) for run in (REFERENCE, DEMO))
    parts = sorted(path.name for path in expected.glob("*.safetensors"))
    _, different, missing = filecmp.cmpfiles(expected, found, parts, shallow=False)
    return different + missing


# --- throughput -------------------------------------------------------------------------------


def throughput_rows(runs: Runs) -> tuple[Row, ...]:
    """Saves and loads of all runs beside the raw device's, in GB/s, with their ratios."""
    resumed = runs.resumed
    in_training = (
        sample
        for record in (runs.reference, runs.killed, resumed)
        for sample in record.throughputs("training save")
    )
    samples = {
        (_TRAINING, "save"): tuple(in_training),
        (_API, "save"): resumed.throughputs("save"),
        (_RAW, "save"): resumed.throughputs("raw write"),
        (_API, "load"): resumed.throughputs("load"),
        (_RAW, "load"): resumed.throughputs("raw read"),
    }
    rows = (
        Row(case, metric, "GB/s", tuple(sample / 1e9 for sample in values))
        for (case, metric), values in samples.items()
    )
    return with_ratios(rows, [_RAW])
