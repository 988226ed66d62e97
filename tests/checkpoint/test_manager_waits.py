"""Saves that wait for others: for a store that hangs, for mounts that follow changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.chunkstore.wrappers import Fault, Hold
from tectonic_client.errors import RanksMissing, StoreUnavailable, TectonicError
from tectonic_client.types import ROOT_INODE, Change
from tectonic_client.volume import open_volume
from tests.checkpoint.rankprocesses import same, state_of
from tests.checkpoint.threadranks import DIRECTORY, ThreadRank, save_together, thread_ranks
from tests.filesystem.engines import sqlite_volume
from tests.filesystem.faultrig import Faults, new_volume

__all__ = ["sqlite_volume"]

STATES = [state_of(rank, 1) for rank in range(2)]

PATIENCE_S = 30.0
"""Of what is held: nothing waits for it."""


class _Held:
    """The stores of a rank do not answer puts, until the end of the test."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def hang(self, rank: ThreadRank, nth: int = 1) -> None:
        effect = Hold(threading.Event(), self.released, PATIENCE_S)
        rank.faults.stores[0].plan(Fault("put", effect, nth, None))

    def answer(self, ranks: list[ThreadRank]) -> None:
        for rank in ranks:
            rank.faults.clear()
        self.released.set()


@pytest.fixture
def held() -> Iterator[_Held]:
    """Lets everything go at the end."""
    holding = _Held()
    yield holding
    holding.released.set()


def _patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long the clients wait for their stores."""
    options = Faults.options
    monkeypatch.setattr(
        Faults, "options", lambda self, **others: options(self, store_deadline_s=seconds, **others)
    )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_store_that_hangs_fails_the_save_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch, held: _Held, victim: int, nth: int
) -> None:
    """Long before the timeout of the save, on all ranks, naming the store; once it answers again
    the step can be saved."""
    _patience(monkeypatch, 0.5)
    monkeypatch.setattr("tectonic_client.blocks.calls.STORE_PROBE_INTERVAL_S", 0.0)
    with thread_ranks(new_volume(), 2) as ranks:
        held.hang(ranks[victim], nth)
        began = time.monotonic()
        ends = save_together(ranks, 1, STATES, timeout=60)
        assert time.monotonic() - began < 20
        assert isinstance(ends[victim], StoreUnavailable)
        assert all(isinstance(end, TectonicError) for end in ends)
        assert all("store-0 has not answered" in str(end) for end in ends), ends
        assert ranks[0].manager.steps() == []
        held.answer(ranks)
        ends = save_together(ranks, 1, STATES, timeout=60)
        assert not any(isinstance(end, TectonicError) for end in ends), ends
        assert all(same(ranks[n].manager.read(1), STATES[n]) for n in range(2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_late_says_for_which_store(
    monkeypatch: pytest.MonkeyPatch, held: _Held, victim: int
) -> None:
    """Also where the save times out before the store does, whoever notices that first."""
    _patience(monkeypatch, 3.0)
    with thread_ranks(new_volume(), 2) as ranks:
        held.hang(ranks[victim])
        ends = save_together(ranks, 1, STATES, timeout=1)
        assert all(isinstance(end, RanksMissing) and end.ranks == (victim,) for end in ends), ends
        assert "store-0 has not answered for" in str(ends[victim])
        held.answer(ranks)


# --- followers --------------------------------------------------------------------------------


class _SlowCache:
    """A follower's cache that takes its time to forget."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.forgotten_at = 0.0

    async def forget(self, found: Sequence[Change]) -> None:
        await trio.sleep(0.3)
        self.names += [change.name for change in found]
        self.forgotten_at = time.monotonic()

    async def forget_open_files(self) -> None:
        """Nothing is open."""


def test_a_step_is_seen_by_followers_when_save_returns(sqlite_volume: str) -> None:
    """In a directory with coherence=push, as after a rename."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as mount:
            fs = mount.filesystem
            await fs.setxattr(ROOT_INODE, b"user.tectonicfs.coherence", b"push")
            cache = _SlowCache()
            fs.follower.caches.append(cache)
            await fs.follower.ready()
            returned = await trio.to_thread.run_sync(_save, sqlite_volume)
            assert any(name.startswith(b"step-") for name in cache.names), cache.names
            assert cache.forgotten_at <= returned

    trio.run(main)


def _save(url: str) -> float:
    """When the save of a step returned."""
    with CheckpointManager(url, DIRECTORY) as manager:
        manager.save(1, state_of(0, 1), timeout=60)
        return time.monotonic()
