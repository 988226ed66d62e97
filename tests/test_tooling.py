"""The script that sets everything up, and the watch over what tests leave behind."""

from __future__ import annotations

import os
import re
import select
import subprocess
from pathlib import Path

import pytest

from tests.leftovers import VARIABLE, Leftovers

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
