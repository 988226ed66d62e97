"""Ranks as threads of one process, each with a client whose engine and stores fail on request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import trio.testing

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.saving import SaveReport
from tectonic_client.errors import TectonicError
from tectonic_client.volume import Volume
from tests.filesystem.faultrig import Faults

DIRECTORY = "/runs/test"


class ThreadRank:
    """One rank of a job; `faults` are those of its own client."""

    def __init__(self, url: str, rank: int, world_size: int, run_id: str) -> None:
        self.faults = Faults()
        with mock.patch("tectonic_client.checkpoint.manager.VolumeOptions", self.faults.options):
            self.manager = CheckpointManager(
                url, DIRECTORY, rank=rank, world_size=world_size, run_id=run_id
            )
        self.manager._volume.run(_settle)


async def _settle(volume: Volume) -> None:
    """Let background tasks have their first turn, so that faults hit what a test does."""
    await trio.testing.wait_all_tasks_blocked(0.001)


@contextmanager
def thread_ranks(url: str, world_size: int, run_id: str = "threads") -> Iterator[list[ThreadRank]]:
    """All ranks of a job."""
    with ExitStack() as stack:
        ranks = [ThreadRank(url, rank, world_size, run_id) for rank in range(world_size)]
        for rank in ranks:
            stack.enter_context(rank.manager)
        yield ranks


def save_together(
    ranks: list[ThreadRank], step: int, states: list[Any], *, timeout: float
) -> list[SaveReport | TectonicError]:
    """What `save` returned or raised on each rank."""

    def save(rank: ThreadRank, state: Any) -> SaveReport | TectonicError:
        try:
            return rank.manager.save(step, state, timeout=timeout)
        except TectonicError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(save, ranks, states))
