"""Files of very many extents: no transaction and no pause of the event loop grows with them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import trio

from tectonic_client.errors import ChunkMissing
from tectonic_client.extents import Extent
from tectonic_client.filesystem import refreshing
from tectonic_client.kv.port import Transaction
from tectonic_client.kv.sqlite_connection import SqliteTransaction
from tectonic_client.limits import EXTENTS_PAGE_ROWS, RECLAIM_BATCH_ROWS
from tectonic_client.metadata import files
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import OWNER, new_volume
from tests.turns import turns_of_others

LENGTH = 4096
DISTANCE = 8192
PER_BLOCK = 2000


def _publish(tx: Transaction, inode: int, block_id: int, first: int) -> None:
    """Add a block's worth of extents, without its chunk: nobody reads it."""
    places = (ChunkPlace(0, PER_BLOCK * LENGTH),)
    record = BlockRecord(
        EncodingKind.SINGLE, 1, 0, Codec.NONE, 2**24, PER_BLOCK * LENGTH, 1, places
    )
    new = [
        Extent((first + number) * DISTANCE, LENGTH, block_id, number * LENGTH)
        for number in range(PER_BLOCK)
    ]
    files.publish(tx, inode, {block_id: record}, new)
    write_inode(tx, inode, replace(read_inode(tx, inode), size=new[-1].end))


async def _new_file(volume: Volume, name: bytes) -> int:
    attributes, handle = await volume.filesystem.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
    await volume.filesystem.release(handle)
    return attributes.inode


@pytest.fixture
def busiest(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The most rows that one transaction read, put or deleted; `clear` begins anew."""
    most: Counter[str] = Counter()

    def counting(name: str, rows: Callable[[object], int]) -> None:
        plain = getattr(SqliteTransaction, name)

        def counted(self: SqliteTransaction, *args: object, **options: object) -> object:
            result = plain(self, *args, **options)
            counts[self][name] += rows(result)
            most[name] = max(most[name], counts[self][name])
            return result

        monkeypatch.setattr(SqliteTransaction, name, counted)

    counts: defaultdict[SqliteTransaction, Counter[str]] = defaultdict(Counter)
    counting("scan", lambda result: len(result))  # type: ignore[arg-type]
    counting("put", lambda result: 1)
    counting("delete", lambda result: 1)
    return most


@pytest.mark.parametrize(
    "count", [10_000, pytest.param(100_000, marks=[pytest.mark.stress, pytest.mark.slow])]
)
def test_a_file_of_very_many_extents(
    count: int, tmp_path: os.PathLike[str], busiest: Counter[str]
) -> None:
    """Opening, cutting and removing such a file: every transaction touches a bounded number of
    rows, and between those that load it other tasks have their turn."""

    async def main() -> None:
        base = os.fspath(tmp_path)
        async with open_volume(new_volume(f"{base}/meta.db", f"{base}/store")) as volume:
            fs = volume.filesystem
            inode = await _new_file(volume, b"f")
            for first in range(0, count, PER_BLOCK):
                block_id = await volume.ids.next_id()
                publish = partial(_publish, inode=inode, block_id=block_id, first=first)
                await volume.kv.transact(publish)
            busiest.clear()
            turns = await turns_of_others(partial(fs.open, inode, os.O_RDWR))
            assert turns >= count // EXTENTS_PAGE_ROWS - 1  # one between any two pages
            assert busiest["scan"] <= EXTENTS_PAGE_ROWS + 20
            state = fs.files.state_of(inode)
            assert state is not None
            assert len(state.extents) == count
            busiest.clear()
            await fs.setattr(inode, AttributeChanges(size=count // 2 * DISTANCE))
            await fs.setattr(inode, AttributeChanges(size=0))
            assert len(state.extents) == 0
            await volume.tasks.reclaim_tails()
            assert await volume.kv.read(lambda tx: files.count_extents(tx, inode, 10)) == 0
            assert busiest["delete"] <= 2 * RECLAIM_BATCH_ROWS
            assert busiest["put"] <= 2 * RECLAIM_BATCH_ROWS

    trio.run(main)


def test_what_is_loaded_page_by_page_is_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another client changes all of a file again and again, whoever opens it sees one of the
    states that it had, never a part of one and a part of another."""
    monkeypatch.setattr(refreshing, "EXTENTS_PAGE_ROWS", 4)
    count, length = 30, 20

    async def main() -> None:
        url = new_volume()
        async with open_volume(url) as writer, open_volume(url) as reader:
            inode = await _new_file(writer, b"f")
            handle = await writer.filesystem.open(inode, os.O_RDWR)

            async def write(version: int) -> None:
                for number in range(count):
                    await writer.filesystem.write(
                        handle, number * 2 * length, bytes([version]) * length
                    )
                await writer.filesystem.flush(handle)

            async def go_on() -> None:
                for version in range(2, 120):
                    await write(version)
                nursery.cancel_scope.cancel()

            async def look() -> None:
                while True:
                    opened = await reader.filesystem.open(inode, os.O_RDONLY)
                    with suppress(ChunkMissing):  # of what was replaced since
                        data = bytes(await reader.filesystem.read(opened, 0, 10_000))
                        assert len(data) == (2 * count - 1) * length
                        seen.append({*data[:length]} | {*data[2 * length :]} - {0})
                    await reader.filesystem.release(opened)

            seen: list[set[int]] = []
            await write(1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(go_on)
                nursery.start_soon(look)
            assert len(seen) > 10
            assert [versions for versions in seen if len(versions) != 1] == []
            await writer.filesystem.release(handle)

    trio.run(main)
