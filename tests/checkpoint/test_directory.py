"""Steps of a directory: removing them while a store is away, or while somebody reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.directory import CheckpointDirectory
from tectonic_client.checkpoint.loading import load_state
from tectonic_client.checkpoint.transfer import StoredFile
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import Fail, Fault, FaultyStore
from tectonic_client.errors import StepNotFound, StoreUnavailable
from tectonic_client.volume import FormatOptions, VolumeOptions, format_volume, open_volume
from tests.leaks import assert_no_leaks, clean


def test_a_step_is_removed_though_its_store_is_away(tmp_path: Path) -> None:
    """The step is gone, which is what was asked for; its chunks follow when the store is back."""
    url = str(tmp_path / "meta.db")
    format_volume(url, FormatOptions("test", (str(tmp_path / "store"),)))
    with CheckpointManager(url, "/run", run_id="r") as manager:
        manager.save(1, {"a": np.arange(1000)})
    stores: list[FaultyStore] = []

    def wrap_store(store: ChunkStore) -> ChunkStore:
        away = Fault("delete", Fail(StoreUnavailable("planned")), times=None)
        stores.append(FaultyStore(store, [away]))
        return stores[-1]

    async def main() -> None:
        async with open_volume(url, VolumeOptions(wrap_store=wrap_store)) as volume:
            directory = CheckpointDirectory(volume, "/run")
            await directory.delete(1)
            assert await directory.steps() == []
            stores[0].clear()
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(main)


@pytest.mark.parametrize("reading", ["load", "verify"])
def test_a_step_that_is_removed_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    """Whoever reads on when the chunks are gone learns that the step is."""
    url = str(tmp_path / "meta.db")
    format_volume(url, FormatOptions("test", (str(tmp_path / "store"),)))
    state = {"a": np.arange(1000)}
    with CheckpointManager(url, "/run", run_id="r") as manager:
        manager.save(1, state)
    fetch = StoredFile._fetch

    async def main() -> None:
        async with open_volume(url) as volume, open_volume(url) as other:

            async def remove_first(*arguments: Any) -> None:
                await CheckpointDirectory(other, "/run").delete(1)
                await other.cleaner.delete_dead_blocks(wait_for_readers=False)
                await fetch(*arguments)

            monkeypatch.setattr(StoredFile, "_fetch", remove_first)
            directory = CheckpointDirectory(volume, "/run")
            reads = {
                "load": partial(load_state, directory, 1, state, 0, 1),
                "verify": partial(directory.verify, 1),
            }
            with pytest.raises(StepNotFound):
                await reads[reading]()

    trio.run(main)
