"""Ranks within their limits: of memory, of a store's space; and on a database server."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from bench.memory import peak_resident_bytes, reset_peak, resident_bytes
from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.errors import CheckpointError, NoSpace, RanksMissing, StoreUnavailable
from tectonic_client.limits import DEFAULT_MEMORY_LIMIT_BYTES, KiB, MiB
from tectonic_client.volume import FormatOptions, format_volume
from tests.checkpoint.rankprocesses import DIRECTORY, Job, Kill, run_job, same, state_of
from tests.fusefs.devices import for_root, memory_device
from tests.postgres import PostgresServer

TIMEOUT_S = 120.0


def _format(meta: str, store: Path, *, small: bool = True) -> str:
    sizes = {"chunk_bytes": 64 * KiB, "block_bytes": 128 * KiB} if small else {}
    format_volume(meta, FormatOptions(name="limits", stores=(str(store),), **sizes))
    return meta


def _measure(pipe: Connection, url: str, size_bytes: int) -> None:
    """By how much memory grows above what the state itself takes."""
    state = {"weights": [np.ones(size_bytes // 8, np.uint8) for _ in range(8)]}
    with CheckpointManager(url, DIRECTORY) as manager:
        grown = []
        for work in (lambda: manager.save(1, state), lambda: manager.load(state, 1)):
            before = resident_bytes()
            reset_peak()
            work()
            grown.append(peak_resident_bytes() - before)
    pipe.send(grown)


def test_a_large_state_needs_no_more_memory_than_the_limit(disk_path: Path) -> None:
    """A rank that saves and loads three times its limit grows by less than the limit."""
    url = _format(str(disk_path / "meta.db"), disk_path / "store", small=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_measure, args=(theirs, url, 3 * DEFAULT_MEMORY_LIMIT_BYTES), daemon=True
    )
    process.start()
    assert ours.poll(TIMEOUT_S)
    saving, loading = ours.recv()
    process.join(TIMEOUT_S)
    assert 8 * MiB < saving < DEFAULT_MEMORY_LIMIT_BYTES
    assert loading < DEFAULT_MEMORY_LIMIT_BYTES


def _of_one_large_rank(rank: int, seed: int) -> dict[str, object]:
    size = 12 * MiB if rank == 1 and seed == 2 else 100 * KiB
    return {"weights": np.full(size, seed, np.uint8)}


@for_root
def test_a_store_without_space_for_one_rank(disk_path: Path) -> None:
    """That rank gets NoSpace, the others at once RanksMissing that names it; the earlier step stays
    whole, and what was written of the failed one makes room again."""
    with memory_device(disk_path / "device", "8m") as device:
        url = _format(str(disk_path / "meta.db"), device.path / "store")
        job = Job(url, 3, 1, seed=1, timeout_s=60, make_state=_of_one_large_rank)
        assert run_job(job) == [None] * 3
        job = Job(url, 3, 2, seed=2, timeout_s=60, make_state=_of_one_large_rank)
        outcomes = run_job(job)
        assert isinstance(outcomes[1], NoSpace), outcomes
        for rank in (0, 2):
            assert isinstance(outcomes[rank], CheckpointError), outcomes
            assert "rank 1" in str(outcomes[rank])
        with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
            assert manager.steps() == [1]
            assert manager.verify(1).ok
        job = Job(url, 3, 2, seed=3, timeout_s=60, make_state=_of_one_large_rank)
        assert run_job(job) == [None] * 3


def _whose_store_is_gone(rank: int, seed: int) -> dict[str, object]:
    """From here on, as rank 1's first attempt at its second step, this process has no store."""
    if rank == 1 and seed == 2:

        def gone(self: FlashStore, key: ChunkKey, parts: Sequence[memoryview]) -> None:
            raise StoreUnavailable(f"store {self.name}: input/output error")

        FlashStore.put = gone  # type: ignore[method-assign]
    return state_of(rank, seed)


def test_one_rank_without_its_store(disk_path: Path) -> None:
    """That rank gets StoreUnavailable, the others at once an error that names it, long before the
    timeout; the earlier step stays whole, and the restarted job saves the step."""
    url = _format(str(disk_path / "meta.db"), disk_path / "store")
    job = Job(url, 3, 2, seed=2, timeout_s=600, make_state=_whose_store_is_gone)
    assert run_job(replace(job, step=1, seed=1)) == [None] * 3
    outcomes = run_job(job)
    assert isinstance(outcomes[1], StoreUnavailable), outcomes
    for rank in (0, 2):
        assert isinstance(outcomes[rank], CheckpointError), outcomes
        assert "rank 1" in str(outcomes[rank])
    with CheckpointManager(url, DIRECTORY, run_id="looking") as manager:
        assert manager.steps() == [1]
        assert manager.verify(1).ok
    assert run_job(replace(job, seed=3)) == [None] * 3


@pytest.mark.parametrize("kill", [None, Kill("uploading"), Kill("after", "_bring")], ids=str)
def test_ranks_on_a_database_server(
    disk_path: Path, postgres_server: PostgresServer, kill: Kill | None
) -> None:
    """Four ranks on PostgreSQL save; where one is killed the step is whole or not there, and the
    restarted job saves it."""
    url = _format(postgres_server.fresh_url(), disk_path / "store")
    outcomes = run_job(Job(url, 4, 1, seed=1, timeout_s=60), {3: kill} if kill else None)
    survivors = outcomes[:3]
    if survivors != [None] * 3:
        assert kill is not None
        assert all(isinstance(error, RanksMissing) for error in survivors), survivors
        assert run_job(Job(url, 4, 1, seed=1)) == [None] * 4
    for rank in range(4):
        with CheckpointManager(
            url, DIRECTORY, rank=rank, world_size=4, run_id="looking"
        ) as manager:
            assert same(manager.read(1), state_of(rank, 1))
