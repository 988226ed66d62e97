"""Client processes that are killed or stopped, on the embedded engine and flash stores."""

from __future__ import annotations

import math
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from tectonic_client.metadata import sessions
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import open_volume
from tests.filesystem.faultrig import load_tree, new_volume, store_file
from tests.leaks import assert_no_leaks, clean
from tests.processes import processes
from tests.upkeep.victim_process import (
    Files,
    run_fixed_program,
    run_of_another_host,
    run_until_killed,
)

MAX_STEPS = 200
"""More steps than the fixed program has."""

PATIENCE_S = 60


class Said:
    """What a task of a victim said: its files after its last acknowledged operation, and after the
    one that it was trying when it died."""

    def __init__(self) -> None:
        self.files: Files = {}
        self.tried: Files = {}

    def check(self, found: Files) -> None:
        """What was acknowledged is there; the last operation happened or did not.

        A write may have happened in part, as between a create and the flush, never with other
        bytes than the old or the new ones.
        """
        if found in (self.files, self.tried):
            return
        (changed,) = {name for name, data in self.tried.items() if data != self.files.get(name)}
        assert _without(found, changed) == _without(self.files, changed)
        old, new, now = (files.get(changed, b"") for files in (self.files, self.tried, found))
        longest = max(map(len, (old, new, now)))
        columns = zip(*(data.ljust(longest, b"\0") for data in (old, new, now)), strict=True)
        assert all(byte in (before, after) for before, after, byte in columns)


def _without(files: Files, name: bytes) -> Files:
    return {other: data for other, data in files.items() if other != name}


class Victim:
    """A process and what its tasks said."""

    def __init__(self, program: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = processes.Pipe()
        url, *rest = arguments
        self.process = processes.Process(target=program, args=(url, theirs, *rest))
        self.process.start()
        theirs.close()
        self.tasks: defaultdict[bytes, Said] = defaultdict(Said)
        self.acknowledged = 0
        self.closed = False

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def listen(self, goal: float = math.inf) -> None:
        """Until so many operations were acknowledged, or the process has ended."""
        while self.acknowledged < goal:
            try:
                what, task, files = self.pipe.recv()
            except (EOFError, OSError):  # OSError: it was killed in the middle of a message
                self.process.join(PATIENCE_S)
                return
            self.closed = what == "closed"
            self.acknowledged += what == "ok"
            self.tasks[task].tried = files
            if what != "try":
                self.tasks[task].files = files

    def check(self, found: Files) -> None:
        """Every file that was found is a task's, and each task finds what it may expect."""
        for prefix, said in self.tasks.items():
            said.check({name: data for name, data in found.items() if name.startswith(prefix)})
        assert all(any(name.startswith(prefix) for prefix in self.tasks) for name in found)


async def _look(url: str, *, remove: bool = False) -> Files:
    """What the next client finds, before and after it has cleaned up."""
    async with open_volume(url) as volume:
        fs = volume.filesystem
        before = await load_tree(fs)
        await clean(volume)
        await assert_no_leaks(volume)
        assert await load_tree(fs) == before
        for name in before if remove else ():
            await fs.unlink(ROOT_INODE, name)
    return before


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.stress)])
def test_a_client_killed_at_any_step_is_cleaned_up_after(
    tmp_path: Path, rng: random.Random, stride: int
) -> None:
    """SIGKILL before, in and after each transaction, put and delete: acknowledged bytes are whole,
    what was not finished happened or did not, and the next client leaves nothing over."""
    for n in range(1 + rng.randrange(stride), MAX_STEPS, stride):
        url = new_volume(str(tmp_path / f"{n}.db"), str(tmp_path / f"{n}-store"))
        victim = Victim(run_fixed_program, url, n)
        victim.listen()
        try:
            victim.check(trio.run(_look, url))
        except BaseException as error:
            error.add_note(f"killed at step {n}")
            raise
        if victim.closed:
            assert victim.process.exitcode == 0
            assert n > 50, "the program has hardly any steps"
            return
        assert victim.process.exitcode == -signal.SIGKILL
    raise AssertionError(f"more than {MAX_STEPS} steps")


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.stress)])
def test_a_client_killed_under_load_is_cleaned_up_after(
    tmp_path: Path, rng: random.Random, rounds: int
) -> None:
    """SIGKILL at random moments of several tasks, again and again on one volume."""
    url = new_volume(str(tmp_path / "meta.db"), str(tmp_path / "store"), stores=2)
    for _ in range(rounds):
        victim = Victim(run_until_killed, url, f"{rng.random()}", 3)
        victim.listen(goal=rng.randrange(5, 80))
        victim.signal(signal.SIGKILL)
        victim.listen()
        assert victim.process.exitcode == -signal.SIGKILL
        victim.check(trio.run(partial(_look, url, remove=True)))


def test_a_client_stopped_beyond_its_expiry_is_fenced_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, declared dead, SIGCONT: SessionLost at the next flush, and others' data is whole."""
    url = new_volume(str(tmp_path / "meta.db"), str(tmp_path / "store"))
    victim = Victim(run_of_another_host, url)
    assert victim.pipe.recv() == "ready"
    victim.signal(signal.SIGSTOP)

    async def bury() -> None:
        async with open_volume(url) as volume:
            await store_file(volume.filesystem, b"others", b"others" * 50_000)
            monkeypatch.setattr(sessions, "SESSION_EXPIRY_S", 0.0)
            await clean(volume)
            monkeypatch.undo()
            await assert_no_leaks(volume)

    trio.run(bury)
    victim.signal(signal.SIGCONT)
    victim.pipe.send("go on")
    assert victim.pipe.recv() == "lost"
    victim.process.join(PATIENCE_S)
    assert victim.process.exitcode == 0
    assert trio.run(_look, url) == {b"kept": b"kept" * 50_000, b"others": b"others" * 50_000}
