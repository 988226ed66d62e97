"""Rank processes: results, timing, failures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.errors import RankFailed
from bench.ranks import Rank, RankPool

RANKS = 3


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RankPool]:
    """Ranks that have answered once."""
    with RankPool(RANKS, tmp_path / "log") as ranks:
        yield ranks


def identify(rank: Rank) -> tuple[int, int, int]:
    """Who runs this."""
    return rank.number, rank.world_size, os.getpid()


def remember(rank: Rank, value: int) -> None:
    """Keep a value for the next call."""
    rank.objects["value"] = value + rank.number


def recall(rank: Rank) -> int:
    """What `remember` kept."""
    value = rank.objects["value"]
    assert isinstance(value, int)
    return value


def stumble(rank: Rank, number: int) -> None:
    """Fail on one rank."""
    if rank.number == number:
        raise ValueError("no floor")


def die(rank: Rank, number: int) -> None:
    """Be killed on one rank."""
    print("last words", flush=True)
    if rank.number == number:
        os.kill(os.getpid(), signal.SIGKILL)


def read_file(rank: Rank, directory: str) -> None:
    """Read 1 MiB from the device on each rank."""
    descriptor = os.open(f"{directory}/{rank.number}", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(descriptor, 1 << 16):
        pass
    os.close(descriptor)


def test_every_rank_runs_in_a_process_of_its_own_and_keeps_its_objects(pool: RankPool) -> None:
    """Results come back in rank order, and what a call keeps is there for the next one."""
    found = pool.call(identify)
    assert [(number, size) for number, size, _ in found] == [(n, RANKS) for n in range(RANKS)]
    assert [pid for _, _, pid in found] == pool.pids
    assert len({os.getpid(), *pool.pids}) == RANKS + 1
    pool.call(remember, 7)
    assert pool.call(recall) == [7, 8, 9]


def test_a_timed_call_adds_up_what_the_device_read(pool: RankPool, disk_path: Path) -> None:
    """A timing covers all ranks and tells how much of a read did not come from a cache."""
    for number in range(RANKS):
        with (disk_path / str(number)).open("wb") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    timing = pool.timed(read_file, str(disk_path))
    assert timing.seconds > 0
    assert timing.device_read_bytes >= RANKS << 20


def test_a_rank_that_raises_is_named_with_its_error(pool: RankPool) -> None:
    """The error says which rank failed and why, and keeps the traceback."""
    with pytest.raises(RankFailed, match="rank 1: ValueError: no floor") as caught:
        pool.call(stumble, 1)
    assert "in stumble" in caught.value.trace


def test_a_rank_that_dies_is_named_with_what_it_said(pool: RankPool) -> None:
    """A killed rank ends the call at once, with its exit status and its output."""
    with pytest.raises(RankFailed, match=r"rank 2 died \(exit status -9\)") as caught:
        pool.call(die, 2)
    assert "last words" in caught.value.trace


def test_ranks_end_with_their_pool(tmp_path: Path) -> None:
    """After the block no rank is left, also when it was left by an error."""
    pids: list[int] = []

    def fail() -> None:
        with RankPool(2, tmp_path / "log") as ranks:
            pids.extend(ranks.pids)
            ranks.timed(stumble, 0)

    with pytest.raises(RankFailed):
        fail()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
