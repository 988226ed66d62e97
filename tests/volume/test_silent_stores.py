"""An open volume one of whose stores does not answer."""

from __future__ import annotations

import os
import threading

import pytest
import trio

from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import Fault, FaultyStore, Hold
from tectonic_client.errors import StoreUnavailable
from tectonic_client.limits import MiB
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import FormatOptions, Volume, VolumeOptions, format_volume, open_volume
from tests.leaks import assert_no_leaks, clean

PATIENCE_S = 0.2
LIMIT_S = 60.0


def _volume(name: str) -> str:
    url = f"memory://{name}"
    format_volume(url, FormatOptions("silent", (f"memory://{name}-store",), force=True))
    return url


def test_opening_a_volume_whose_store_hangs_fails_by_the_deadline() -> None:
    """Opening does not wait for ever for a store's directory; the message names the store."""
    released = threading.Event()

    def hang(store: ChunkStore) -> ChunkStore:
        released.wait(LIMIT_S)
        return store

    async def main() -> None:
        options = VolumeOptions(store_deadline_s=PATIENCE_S, wrap_store=hang)
        with pytest.raises(StoreUnavailable, match="memory://silent-open-store"):
            async with open_volume(_volume("silent-open"), options):
                pass

    try:
        trio.run(main)
    finally:
        released.set()


def test_closing_a_volume_whose_store_hangs_fails_by_the_deadline_and_leaks_nothing() -> None:
    """What could not be flushed is an error of the close, which does not wait for the store; the
    lease stays behind, so that the next client finds a chunk that was stored too late."""
    entered, released = threading.Event(), threading.Event()
    url = _volume("silent-close")

    def hold(store: ChunkStore) -> ChunkStore:
        return FaultyStore(store, [Fault("put", Hold(entered, released, LIMIT_S), times=None)])

    opened: list[Volume] = []

    async def leave_a_file_dirty() -> None:
        options = VolumeOptions(store_deadline_s=PATIENCE_S, wrap_store=hold)
        async with open_volume(url, options) as volume:
            opened.append(volume)
            files = volume.filesystem
            _, handle = await files.create(ROOT_INODE, b"f", 0o644, Owner(0, 0), os.O_WRONLY)
            await files.write(handle, 0, bytes(2 * MiB))

    async def main() -> None:
        with trio.fail_after(LIMIT_S), pytest.raises(StoreUnavailable, match="has not answered"):
            await leave_a_file_dirty()
        assert entered.is_set()
        released.set()
        while opened[0].pool.used_bytes:  # until the threads are back
            await trio.lowlevel.checkpoint()
        async with open_volume(url) as after:
            await clean(after)
            await assert_no_leaks(after)

    trio.run(main)
