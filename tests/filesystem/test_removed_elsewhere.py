"""Files that one client has open and another one removes: kept while they are open, then gone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from tectonic_client.errors import StaleHandle
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import OPEN_FILES_LOOK_S, ORPHAN_GRACE_S
from tectonic_client.metadata import keys, orphans
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import CHUNK_BYTES, new_volume, store_file
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine"]

CONTENT = b"removed, but open" * CHUNK_BYTES


@asynccontextmanager
async def _clients(url: str, count: int) -> AsyncIterator[list[Volume]]:
    """Clients of a volume; afterwards another one finds nothing left behind."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_volume(url)) for _ in range(count)]
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)


def _run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(100):
            await main()

    trio.run(bounded)


async def _reclaim(*volumes: Volume) -> None:
    """All that clients do by themselves once the grace time is over."""
    for volume in volumes:
        await volume.tasks.reclaim_due_orphans()  # gives back what was open
        await volume.tasks.reclaim_orphans()
        await volume.cleaner.reclaim_abandoned_orphans(wait_for_others=False)
        await volume.cleaner.delete_dead_blocks(wait_for_readers=False)


async def _content(fs: FileSystem, handle: int) -> bytes:
    return bytes(await fs.read(handle, 0, len(CONTENT) + 1))


async def _open(volume: Volume, name: bytes = b"f") -> int:
    inode = (await volume.filesystem.lookup(ROOT_INODE, name)).inode
    return await volume.filesystem.open(inode, os.O_RDONLY)


def test_the_looks_come_often_enough() -> None:
    """Whatever the moment of a removal, each client looks twice before the file may go."""
    assert 2 * OPEN_FILES_LOOK_S < ORPHAN_GRACE_S


def test_a_removed_file_is_kept_while_others_have_it_open(any_engine: NewVolume) -> None:
    """The last of several clients that closes it lets it go, and nothing is left of it."""

    async def main() -> None:
        async with _clients(any_engine(), 3) as (remover, first, second):
            await store_file(remover.filesystem, b"f", CONTENT)
            handles = [await _open(first), await _open(second)]
            await remover.filesystem.unlink(ROOT_INODE, b"f")
            for reader in (first, second):
                await reader.filesystem.keep_removed_files()
            await _reclaim(remover, first, second)
            for reader, handle in zip((first, second), handles, strict=True):
                assert await _content(reader.filesystem, handle) == CONTENT
            await second.filesystem.release(handles[1])  # the one that holds it
            await second.tasks.reclaim_due_orphans()
            await first.filesystem.keep_removed_files()
            await _reclaim(remover, second, first)
            assert await _content(first.filesystem, handles[0]) == CONTENT
            inode = await first.kv.read(_only_orphan)
            await first.filesystem.release(handles[0])
            await _reclaim(first)
            assert await first.kv.read(lambda tx: orphans.read_holder(tx, inode)) is None

    _run(main)


def _only_orphan(tx: ReadTransaction) -> int:
    ((key, _),) = tx.scan(keys.ORPHAN, keys.prefix_end(keys.ORPHAN))
    return keys.parse_group(key)


def test_a_replaced_file_is_kept_while_others_have_it_open() -> None:
    """A reader of a file that an editor replaced reads on what it opened."""

    async def main() -> None:
        async with _clients(new_volume(), 2) as (writer, reader):
            await store_file(writer.filesystem, b"f", CONTENT)
            handle = await _open(reader)
            await store_file(writer.filesystem, b"new", b"new")
            await writer.filesystem.rename(ROOT_INODE, b"new", ROOT_INODE, b"f")
            await reader.filesystem.keep_removed_files()
            await _reclaim(writer, reader)
            assert await _content(reader.filesystem, handle) == CONTENT
            await reader.filesystem.release(handle)

    _run(main)


def test_clients_wait_before_they_reclaim_while_others_live() -> None:
    """Within the grace time nothing goes, whoever removed it and whether that client ended."""

    async def main() -> None:
        url = new_volume()
        async with _clients(url, 1) as (reader,):
            async with open_volume(url) as remover:
                await store_file(remover.filesystem, b"f", CONTENT)
                handle = await _open(reader)
                await remover.filesystem.unlink(ROOT_INODE, b"f")
                await remover.tasks.reclaim_due_orphans()
            async with open_volume(url) as other:  # cleans up when it opens
                await other.cleaner.reclaim_abandoned_orphans()
                await reader.cleaner.reclaim_abandoned_orphans()
                assert await _content(reader.filesystem, handle) == CONTENT
            await reader.filesystem.release(handle)

    _run(main)


def test_a_file_that_is_gone_gives_an_error_not_zeros(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever comes too late to keep a file gets ESTALE, also while it is half reclaimed."""

    async def main() -> None:
        async with _clients(new_volume(), 2) as (remover, reader):
            inode_of = reader.filesystem.lookup
            await store_file(remover.filesystem, b"f", CONTENT)
            inode = (await inode_of(ROOT_INODE, b"f")).inode
            handle = await _open(reader)
            await remover.filesystem.unlink(ROOT_INODE, b"f")
            gone, _ = await remover.kv.transact(
                lambda tx: orphans.reclaim(tx, inode, remover.session_id, rows=1)
            )
            assert not gone
            await remover.cleaner.delete_dead_blocks(wait_for_readers=False)
            await reader.filesystem.keep_removed_files()
            with pytest.raises(StaleHandle):
                await _content(reader.filesystem, handle)
            await reader.filesystem.release(handle)

    _run(main)
    assert "is open, but another client removed it" in caplog.text
