"""Reads of what is being replaced meanwhile: the old bytes or the new ones, never an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.chunkstore.wrappers import Fault, Hold
from tectonic_client.errors import ChunkMissing, StaleHandle
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.faultrig import (
    Faults,
    failing_client,
    load_file,
    new_volume,
    store_file,
)
from tests.leaks import clean

SIZE = 150_000


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await body()

    trio.run(main)


async def _open(volume: Volume, flags: int = os.O_RDWR) -> int:
    fs = volume.filesystem
    return await fs.open((await fs.lookup(ROOT_INODE, b"f")).inode, flags)


@pytest.mark.parametrize("dirty", [False, True])
def test_a_flush_of_the_same_client_replaces_what_is_being_read(dirty: bool) -> None:
    """The chunk goes between looking up the extents and the get: the read starts over."""

    async def main() -> None:
        faults = Faults()
        entered, released = threading.Event(), threading.Event()
        async with failing_client(new_volume(), faults) as volume:
            fs = volume.filesystem
            await store_file(fs, b"f", b"o" * SIZE)
            handle = await _open(volume)
            found: list[bytes] = []

            async def read() -> None:
                found.append(bytes(await fs.read(handle, 0, SIZE)))

            faults.stores[0].plan(Fault("get_into", Hold(entered, released, limit_s=30)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.to_thread.run_sync(entered.wait)
                await fs.write(handle, 0, b"n" * SIZE)
                await fs.flush(handle)
                await volume.cleaner.delete_dead_blocks()
                if dirty:
                    await fs.write(handle, 0, b"N")
                released.set()
            assert found[0] in (b"n" * SIZE, b"N" + b"n" * (SIZE - 1))
            await fs.release(handle)

    _run(main)


class _Racing:
    """A store before each of whose first gets somebody else replaces the file."""

    def __init__(self, inner: ChunkStore, replacements: int, replace: Callable[[], None]) -> None:
        self._inner = inner
        self._left = replacements
        self._replace = replace
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        with self._lock:
            if self._left:
                self._left -= 1
                with ThreadPoolExecutor(1) as thread:  # a loop of its own needs one
                    thread.submit(self._replace).result()
        return self._inner.get_into(key, offset, target)


@pytest.mark.parametrize("read_only", [False, True])
def test_another_client_replaces_a_file_faster_than_it_is_read(read_only: bool) -> None:
    """However often that happens during one read, it ends with one version's bytes."""
    url, version = new_volume(), iter(range(1, 100))

    async def overwrite() -> None:
        async with open_volume(url) as volume:
            await store_file(volume.filesystem, b"f", bytes((next(version),)) * SIZE)
            await volume.cleaner.delete_dead_blocks(wait_for_readers=False)

    def wrap(store: ChunkStore) -> ChunkStore:
        return _Racing(store, 12, lambda: trio.run(overwrite))  # type: ignore[return-value]

    async def main() -> None:
        await overwrite()
        options = VolumeOptions(wrap_store=wrap, read_only=read_only)
        async with open_volume(url, options) as volume:
            content = await load_file(volume.filesystem, b"f", SIZE)
            assert content == bytes((content[0],)) * SIZE
            assert content[0] > 5

    _run(main)


def test_a_file_that_another_client_removed_is_stale() -> None:
    """ESTALE, not an I/O error: nothing is broken."""

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as volume:
            fs = volume.filesystem
            await store_file(fs, b"f", b"x" * SIZE)
            handle = await _open(volume)
            async with open_volume(url) as other:
                await other.filesystem.unlink(ROOT_INODE, b"f")
                await clean(other)
            with pytest.raises(StaleHandle):
                await fs.read(handle, 0, SIZE)
            await fs.release(handle)

    _run(main)


def test_a_chunk_that_is_really_missing_is_told() -> None:
    """A file that nobody replaced and whose chunk is gone: ChunkMissing, without end of trying."""

    async def main() -> None:
        async with open_volume(new_volume()) as volume:
            fs = volume.filesystem
            await store_file(fs, b"f", b"x" * SIZE)
            store = volume.stores.get(0)
            store.delete([info.key for info in store.list(0, 2**63)])
            handle = await _open(volume)
            with pytest.raises(ChunkMissing, match="/f: "):
                await fs.read(handle, 0, SIZE)
            await fs.write(handle, 0, b"y" * SIZE)
            assert bytes(await fs.read(handle, 0, SIZE)) == b"y" * SIZE
            await fs.release(handle)

    _run(main)
