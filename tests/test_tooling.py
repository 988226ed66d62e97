"""The script that sets everything up, and the watch over what tests leave behind."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.leftovers import VARIABLE, Leftovers
from tests.turntaking import turn

RUN = Path(__file__).parents[1] / "run"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script by the system's own shell."""
    return subprocess.run(
        ["/bin/sh", RUN, *arguments], capture_output=True, text=True, check=False, timeout=20
    )


def test_help_names_every_word_and_an_unknown_word_is_wrong_usage() -> None:
    """`./run help` lists exactly the words that there are; anything else exits with 2."""
    words = set(re.findall(r"^    (\w+)(?: \| [\w-]+)*\)$", RUN.read_text(), re.MULTILINE))
    assert words == {"install", "demo", "bench", "check", "test", "stress", "help"}
    shown = run("help")
    assert shown.returncode == 0
    assert set(re.findall(r"^  (\w+)  ", shown.stdout, re.MULTILINE)) == words
    unknown = run("dance")
    assert unknown.returncode == 2
    assert unknown.stderr == "run: there is no word dance; ./run help lists them\n"


def test_a_detached_process_is_found_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that left its session and its parent is still known as the test's, and ended."""
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE])
    watch = Leftovers(patience_s=0.1)
    subprocess.run(
        ["sh", "-c", "setsid sleep 321 >/dev/null 2>&1 & echo $! >pid"], check=True, cwd=tmp_path
    )
    pid = int((tmp_path / "pid").read_text())
    process = Path(f"/proc/{pid}")
    # Between two programs it is nobody's: it has a name before it has an environment.
    while (process / "comm").read_text() != "sleep\n" or not (process / "environ").read_bytes():
        os.sched_yield()
    watch.note("test_a")
    watch.note("test_b")
    lives = os.pidfd_open(pid)
    (line,) = watch.clear()
    assert re.fullmatch(rf"process {pid} \(.*sleep 321.*\), started in test_a", line)
    poll = select.poll()
    poll.register(lives, select.POLLIN)
    assert poll.poll(5000), "still running"
    os.close(lives)


def test_what_ends_in_time_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is about to end when the tests do is waited for."""
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE])
    watch = Leftovers()
    with subprocess.Popen(["sleep", "0.5"]):
        assert watch.clear() == []


# --- several processes ------------------------------------------------------------------------


def test_a_run_in_several_processes_fails_for_what_one_leaves_behind(tmp_path: Path) -> None:
    """What a worker process of pytest-xdist finds at its end is shown, named, and an error."""
    (tmp_path / "conftest.py").write_text(
        "import contextlib, functools\nfrom tests import conftest\n"
        "conftest.Leftovers = functools.partial(conftest.Leftovers, patience_s=0.1)\n"
        "conftest.turn = lambda alone: contextlib.nullcontext()  # it is in this test's\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n"
        "def test_that_leaves():\n"
        "    subprocess.run(['sh', '-c', 'setsid sleep 123 >/dev/null 2>&1 &'], check=True)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.conftest", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "-p", "no:cacheprovider", tmp_path],
        capture_output=True, text=True, check=False, timeout=60, cwd=RUN.parent,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"left behind: process \d+ \(sleep 123\), started in test_it", done.stdout)
    assert done.returncode == 1


def test_who_waits_for_the_whole_room_is_not_overtaken(tmp_path: Path) -> None:
    """A test that is to run alone waits for those that run, and those that come later for it."""
    gate, room = tmp_path / "gate", tmp_path / "room"
    gate.touch()
    room.touch()
    seen: list[str] = []

    def enter(name: str, alone: bool) -> None:
        with turn(alone=alone, room=room, gate=gate):
            seen.append(f"{name} in")
            seen.append(f"{name} out")

    whole = threading.Thread(target=enter, args=("whole", True))
    later = threading.Thread(target=enter, args=("later", False))
    with turn(alone=False, room=room, gate=gate):
        enter("beside", False)
        whole.start()
        while _is_free(gate):
            os.sched_yield()
        later.start()
        seen.append("first out")
    whole.join(20)
    later.join(20)
    assert seen[:5] == ["beside in", "beside out", "first out", "whole in", "whole out"]
    assert seen[5:] == ["later in", "later out"]


def _is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
