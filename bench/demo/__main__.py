"""`python -m bench.demo`: a volume, a mount, and a training run that survives kill -9.

Exit codes: 0 all was as it should be, 1 it was not (a line says what), 2 wrong usage, 128 and the
signal's number when interrupted. Nothing is left behind in any case.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final

import click

from bench import machine
from bench.demo.findings import (
    losses_table,
    resumed_steps,
    throughput_rows,
    unequal_files,
    wrong_losses,
)
from bench.demo.place import mounted, own_directory, tectonicfs
from bench.demo.runs import DEMO, MIN_STEPS, Options, Runs, Stage, step_directory
from bench.demo.screen import Screen
from bench.report import Result, Row, at_least, print_result, write_json
from tectonic_client.errors import TectonicError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Demo:
    """One showing."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._problems: list[str] = []

    def run(self, base: Path) -> tuple[Result, list[str]]:
        """Show everything; returns figures, and what was not as it should be."""
        begun = time.monotonic()
        screen, meta_url = self._screen, str(base / "meta.db")
        tectonicfs(screen, "format", meta_url, "--name", "demo", "--store", base / "store")
        with mounted(meta_url, base, screen) as mount:
            runs = Stage(self._options, meta_url, base, screen).run_all(mount)
            self._judge_losses(runs)
            if mount is None:
                screen.title("4. Through the mount: left out, there is none")
            else:
                self._look_through_mount(mount, runs)
        screen.title("5. Throughput: all bytes over the slowest rank's time")
        result = self._result(runs, throughput_rows(runs), base, mounted=mount is not None)
        print_result(result, screen.console)
        self._conclude(runs, time.monotonic() - begun)
        return result, self._problems

    def _judge_losses(self, runs: Runs) -> None:
        self._screen.show(losses_table(runs))
        wrong = list(wrong_losses(runs))
        self._problems += wrong
        if not wrong:
            self._screen.say(
                f"  all {resumed_steps(runs)[0]} losses after resuming equal those of the"
                " uninterrupted run, bit for bit", style="green",
            )  # fmt: skip

    def _look_through_mount(self, mount: Path, runs: Runs) -> None:
        screen, last = self._screen, self._options.steps
        screen.title("4. Through the mount")
        for directory in (mount / DEMO.lstrip("/"), step_directory(mount, DEMO, last)):
            screen.command("ls", str(directory))
            screen.say("  " + "  ".join(sorted(os.listdir(directory))))
        self._judge(
            f"{runs.resumed.tensors_compared} tensors of step {last}, loaded with safetensors,"
            " equal those in the ranks' memory, bit for bit",
            "FILES DIFFER from the ranks' memory", runs.resumed.tensors_different,
        )  # fmt: skip
        self._judge(
            f"the files of step {last} equal the uninterrupted run's, byte for byte:"
            " parameters, optimizer, RNG, place in the text",
            "FILES DIFFER from the uninterrupted run's", unequal_files(mount, last),
        )  # fmt: skip

    def _judge(self, good: str, bad: str, wrong: list[str]) -> None:
        if wrong:
            self._problems.append(f"{bad}: {', '.join(wrong)}")
        else:
            self._screen.say(f"  {good}", style="green")

    def _result(self, runs: Runs, rows: tuple[Row, ...], base: Path, *, mounted: bool) -> Result:
        config = asdict(self._options) | {
            "mounted": mounted, "killed": runs.killed_while, "resumed_from": runs.committed[-1],
        }  # fmt: skip
        due, equal = resumed_steps(runs)
        bar = at_least("losses equal after resuming", equal, due)
        return Result("demo", machine.commit(), machine.describe(base), config, rows, (bar,))

    def _conclude(self, runs: Runs, seconds: float) -> None:
        for problem in self._problems:
            self._screen.say(problem, style="red")
        if not self._problems:
            self._screen.say(
                f"\nshown in {seconds:.0f} s: after kill -9 of {self._options.ranks} ranks"
                f" ({runs.killed_while}) the job went on from step {runs.committed[-1]} exactly as"
                " if nothing had happened",
                style="bold",
            )


def _exit_on_signals() -> None:
    """Let context managers undo what was done; once that has begun, it is not interrupted."""

    def leave(number: int, frame: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, leave)


@click.command()
@click.option(
    "--dir", "parent", default=".", help="A directory on the disk to use.  [default: this one]",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
)  # fmt: skip
@click.option("--steps", default=12, show_default=True, type=click.IntRange(MIN_STEPS, 1000))
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(1, 16))
@click.option("--seed", type=int, help="Repeats a run, but for the kill's last milliseconds.")
@click.option("--width", default=512, show_default=True, type=click.IntRange(64, 2048))
@click.option("--layers", default=5, show_default=True, type=click.IntRange(1, 24))
@click.option("--keep", is_flag=True, help="Leave the volume and the logs there.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    parent: Path, *, steps: int, ranks: int, seed: int | None, width: int, layers: int,
    keep: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Train on several ranks with checkpoints, kill them all, resume, and compare."""
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    _exit_on_signals()
    screen = Screen()
    screen.say(f"tectonicfs demo, seed {seed}")
    try:
        with own_directory(parent, screen, keep=keep) as base:
            options = Options(steps, ranks, seed, width, layers)
            result, problems = Demo(options, screen).run(base)
    except TectonicError as error:
        screen.say(f"demo: {error}", style="red")
        sys.exit(1)
    except SystemExit:
        screen.say("demo: interrupted" + ("" if keep else ", and everything removed again"))
        raise
    if json_file is not None:
        write_json(result, json_file)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
