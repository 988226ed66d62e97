"""Records of blocks that are being read: a bounded cache. A record never changes once published."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tectonic_client.errors import ChunkMissing
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.limits import MAX_CACHED_BLOCK_RECORDS
from tectonic_client.metadata.blocks import read_blocks
from tectonic_client.records import BlockRecord


class BlockTable:
    """Used from the event loop only."""

    def __init__(self, kv: AsyncKV) -> None:
        self._kv = kv
        self._records: OrderedDict[int, BlockRecord] = OrderedDict()

    def add(self, records: dict[int, BlockRecord]) -> None:
        """Remember records that this client just published."""
        self._records.update(records)
        while len(self._records) > MAX_CACHED_BLOCK_RECORDS:
            self._records.popitem(last=False)

    async def load(self, block_ids: Iterable[int]) -> dict[int, BlockRecord]:
        """Records of these blocks. Raises ChunkMissing when one is gone."""
        wanted = dict.fromkeys(block_ids)
        # Taken before the wait: meanwhile other loads may push them out of the cache.
        result = {i: self._touch(i) for i in wanted if i in self._records}
        missing = [block_id for block_id in wanted if block_id not in result]
        if missing:
            found = await self._kv.read(lambda tx: read_blocks(tx, missing))
            fetched: dict[int, BlockRecord] = {}
            for block_id, record in zip(missing, found, strict=True):
                if record is None:
                    raise ChunkMissing(f"block {block_id:016x} does not exist any more")
                fetched[block_id] = record
            result.update(fetched)
            self.add(fetched)
        return result

    def _touch(self, block_id: int) -> BlockRecord:
        self._records.move_to_end(block_id)
        return self._records[block_id]
