"""The bounded cache of block records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
import trio
import trio.testing

from tectonic_client.filesystem import blocktable
from tectonic_client.filesystem.blocktable import BlockTable
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.metadata.blocks import write_block
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind

T = TypeVar("T")


class _SlowKV(AsyncKV):
    """Reads wait for `gate`."""

    gate: trio.Event

    async def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        await self.gate.wait()
        return await super().read(fn)


def _record(block_id: int) -> BlockRecord:
    return BlockRecord(
        EncodingKind.SINGLE, 1, 0, Codec.NONE, 65536, 65536, block_id, (ChunkPlace(1, 1),)
    )


def test_records_pushed_out_during_a_load_are_still_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load returns what was cached when it began, though others push it out while it waits."""
    monkeypatch.setattr(blocktable, "MAX_CACHED_BLOCK_RECORDS", 2)

    def publish(tx: Transaction) -> None:
        for block_id in range(1, 6):
            write_block(tx, block_id, _record(block_id))

    async def main() -> None:
        kv = _SlowKV(MemoryKV())
        kv.gate = trio.Event()
        await kv.transact(publish)
        table = BlockTable(kv)
        table.add({1: _record(1), 2: _record(2)})
        loaded: list[dict[int, BlockRecord]] = []

        async def load(block_ids: Iterable[int]) -> None:
            loaded.append(await table.load(block_ids))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, [3, 4])
            nursery.start_soon(load, [1, 5])
            await trio.testing.wait_all_tasks_blocked()
            kv.gate.set()
        assert sorted(loaded, key=min) == [
            {1: _record(1), 5: _record(5)},
            {3: _record(3), 4: _record(4)},
        ]

    trio.run(main)
