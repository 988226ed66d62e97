"""Steps of a directory: removing them while a store is away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.directory import CheckpointDirectory
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import Fail, Fault, FaultyStore
from tectonic_client.errors import StoreUnavailable
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
