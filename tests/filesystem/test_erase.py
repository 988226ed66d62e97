"""A small file goes with its last name, in one transaction, where surely nobody has it open."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable

import pytest
import trio

from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.kv.port import KV, ReadTransaction
from tectonic_client.kv.wrappers import CountingKV
from tectonic_client.metadata import keys, sessions
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.engines import sqlite_volume
from tests.filesystem.faultrig import CHUNK_BYTES, load_file, store_file
from tests.leaks import assert_no_leaks, clean

__all__ = ["sqlite_volume"]

CONTENT = b"small" * (CHUNK_BYTES // 4)


async def _unlink(volume: Volume) -> None:
    await volume.filesystem.unlink(ROOT_INODE, b"f")


async def _replace(volume: Volume) -> None:
    await store_file(volume.filesystem, b"new", b"new")
    await volume.filesystem.rename(ROOT_INODE, b"new", ROOT_INODE, b"f")


Remove = Callable[[Volume], Awaitable[None]]
either_way = pytest.mark.parametrize("remove", [_unlink, _replace])


async def _inode(volume: Volume) -> int:
    return (await volume.filesystem.lookup(ROOT_INODE, b"f")).inode


async def _is_gone(volume: Volume, inode: int) -> bool:
    def look(tx: ReadTransaction) -> bool:
        prefix = keys.group(keys.FILE, inode)
        rows = tx.scan(prefix, keys.prefix_end(prefix))
        return not rows and tx.get(keys.orphan(inode)) is None

    return await volume.kv.read(look)


async def _check_reader(reader: Volume, handle: int, *cleaners: Volume) -> None:
    """All that clients do of themselves leaves the open file whole, until it is closed."""
    await reader.filesystem.keep_removed_files()
    for volume in (*cleaners, reader):
        await volume.tasks.reclaim_due_orphans()
        await volume.cleaner.reclaim_abandoned_orphans()
        await volume.cleaner.delete_dead_blocks()
    assert bytes(await reader.filesystem.read(handle, 0, len(CONTENT) + 1)) == CONTENT
    await reader.filesystem.release(handle)


def _run(main: Callable[[], Awaitable[None]], url: str) -> None:
    """Afterwards nothing is left of what was removed."""

    async def bounded() -> None:
        with trio.fail_after(60):
            await main()
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(bounded)


@either_way
def test_nothing_is_left_at_once(sqlite_volume: str, remove: Remove) -> None:
    """Of a file that nobody has open the transaction leaves no record, if the client is alone."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as volume:
            await store_file(volume.filesystem, b"f", CONTENT)
            inode = await _inode(volume)
            await remove(volume)
            assert await _is_gone(volume, inode)

    _run(main, sqlite_volume)


@either_way
def test_a_file_that_is_open_here_stays(sqlite_volume: str, remove: Remove) -> None:
    """Its reader in the same client sees all of it, until it closes it."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as volume:
            await store_file(volume.filesystem, b"f", CONTENT)
            inode = await _inode(volume)
            handle = await volume.filesystem.open(inode, os.O_RDONLY)
            await remove(volume)
            await _check_reader(volume, handle)
            await volume.tasks.reclaim_due_orphans()
            assert await _is_gone(volume, inode)

    _run(main, sqlite_volume)


@either_way
def test_a_file_with_another_name_stays(sqlite_volume: str, remove: Remove) -> None:
    """Only the last of several names takes the file with it."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as volume:
            await store_file(volume.filesystem, b"f", CONTENT)
            inode = await _inode(volume)
            await volume.filesystem.link(inode, ROOT_INODE, b"other")
            await remove(volume)
            assert await load_file(volume.filesystem, b"other") == CONTENT
            assert (await volume.filesystem.getattr(inode)).nlink == 1
            await volume.filesystem.unlink(ROOT_INODE, b"other")
            assert await _is_gone(volume, inode)

    _run(main, sqlite_volume)


@either_way
def test_a_client_that_came_last_may_have_it_open(sqlite_volume: str, remove: Remove) -> None:
    """A client that opened the volume and the file the moment before is found."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as remover:
            await store_file(remover.filesystem, b"f", CONTENT)
            async with open_volume(sqlite_volume) as reader:
                handle = await reader.filesystem.open(await _inode(reader), os.O_RDONLY)
                await remove(remover)
                await _check_reader(reader, handle, remover)

    _run(main, sqlite_volume)


def test_a_client_whose_session_was_ended_is_not_alone(sqlite_volume: str) -> None:
    """Whoever ended it may have the file open: that its session is the only one says nothing."""

    async def main() -> None:
        async with open_volume(sqlite_volume) as remover:
            await store_file(remover.filesystem, b"f", CONTENT)
            async with open_volume(sqlite_volume) as reader:
                number = remover.session_id
                await reader.kv.transact(lambda tx: sessions.end_session(tx, number, []))
                handle = await reader.filesystem.open(await _inode(reader), os.O_RDONLY)
                await _unlink(remover)
                await _check_reader(reader, handle)

    _run(main, sqlite_volume)


class _WatchedStore:
    """Notes how many durable transactions there had been when chunks were deleted."""

    def __init__(self, inner: ChunkStore, kv: Callable[[], CountingKV], seen: list[int]) -> None:
        self._inner = inner
        self._kv = kv
        self._seen = seen

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def delete(self, doomed: Iterable[ChunkKey]) -> None:
        self._seen.append(self._kv().durable_transactions)
        self._inner.delete(doomed)


def test_chunks_outlive_the_transaction_that_forgets_them(sqlite_volume: str) -> None:
    """Power loss may take the removal back; so it is made durable before a chunk is deleted."""
    engines: list[CountingKV] = []
    seen: list[int] = []

    def wrap_kv(kv: KV) -> KV:
        engines.append(CountingKV(kv))
        return engines[-1]

    options = VolumeOptions(
        wrap_kv=wrap_kv,
        wrap_store=lambda store: _WatchedStore(store, lambda: engines[0], seen),  # type: ignore[arg-type,return-value]
    )

    async def main() -> None:
        async with open_volume(sqlite_volume, options) as volume:
            await store_file(volume.filesystem, b"f", CONTENT)
            engines[0].reset()
            await _unlink(volume)
            assert engines[0].durable_transactions == 0
            await volume.cleaner.delete_dead_blocks()
        assert seen
        assert min(seen) >= 1

    _run(main, sqlite_volume)
