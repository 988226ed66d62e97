"""The fair lock excludes, takes turns, and goes away with its process."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tectonic_client.kv.filelock import FairFileLock
from tests.contracts.kv import in_threads


def test_excludes(tmp_path: Path) -> None:
    """Two holders never overlap, also within one process."""
    inside: list[int] = []
    overlaps: list[int] = []

    def work() -> None:
        lock = FairFileLock(str(tmp_path / "lock"))
        for _ in range(200):
            with lock:
                inside.append(1)
                if len(inside) > 1:
                    overlaps.append(1)
                inside.pop()
        lock.close()

    in_threads(work, work, work)
    assert not overlaps


def test_takes_turns(tmp_path: Path) -> None:
    """Who releases rarely overtakes who waits: while both want it, they alternate."""
    order: list[str] = []

    def work(name: str) -> None:
        lock = FairFileLock(str(tmp_path / "lock"))
        for _ in range(150):
            with lock:
                order.append(name)
                time.sleep(100e-6)  # about what a commit takes
        lock.close()

    in_threads(lambda: work("a"), lambda: work("b"))
    first = max(order.index(name) for name in "ab")
    last = min(len(order) - 1 - order[::-1].index(name) for name in "ab")
    both = order[first : last + 1]
    changes = sum(one != next_one for one, next_one in pairwise(both))
    assert len(both) > 20, "they did not compete"
    assert changes > len(both) // 2, "one of them overtook the other again and again"


def test_killed_holder(tmp_path: Path) -> None:
    """The lock of a killed process is free."""
    path = str(tmp_path / "lock")
    ready, write_ready = os.pipe()
    child = os.fork()
    if child == 0:
        FairFileLock(path).__enter__()
        os.write(write_ready, b"x")
        signal.pause()
        os._exit(1)
    assert os.read(ready, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = FairFileLock(path)
    with lock:
        pass
    lock.close()
    os.close(ready)
    os.close(write_ready)


def test_unusable_path(tmp_path: Path) -> None:
    """A lock file that cannot be made is an OSError for the caller to translate."""
    with pytest.raises(FileNotFoundError):
        FairFileLock(str(tmp_path / "nowhere" / "lock"))
