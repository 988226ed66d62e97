"""Compaction: files that were written in small pieces become fast to read again.

A random write adds a small extent, so that reading the file in order jumps about its blocks. When
such a file has been left alone for a while, each stretch of it that consists of many extents is
copied into a chunk of a block of its own, whose extent replaces them. Nothing that a program can
see changes: bytes, times and attributes stay.

A stretch is copied with the inode's lock held, and published only if the metadata still say what
was copied: what another client wrote meanwhile stays. One stretch at a time, and a pause after
each that is as long as the copy took, so that it takes at most half of the device's time.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

import trio

from tectonic_client.blocks.writer import OpenBlock
from tectonic_client.errors import ChunkMissing, StaleHandle, UnknownOutcome
from tectonic_client.extents import Extent, coalesce
from tectonic_client.filesystem.files import Files
from tectonic_client.filesystem.openinode import OpenInode
from tectonic_client.filesystem.services import FileServices
from tectonic_client.kv.port import Transaction
from tectonic_client.limits import (
    COMPACT_MIN_EXTENTS,
    COMPACT_STEP_BYTES,
)
from tectonic_client.metadata import files as file_layer
from tectonic_client.metadata import tails
from tectonic_client.metadata.inodes import read_inode
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import BlockRecord


class Compactor:
    """Compacts the files that this client has written. Used from the event loop only."""

    def __init__(self, services: FileServices, files: Files) -> None:
        self._services = services
        self._files = files

    async def compact(self, inode: int) -> int:
        """Compact a file now; returns how many stretches were copied.

        Raises what reading and putting raise; the file is whole in any case. A file that was
        removed is left alone.
        """
        with suppress(StaleHandle):
            return await self._compact(inode)
        return 0

    async def _compact(self, inode: int) -> int:
        copied = 0
        async with self._files.visited(inode) as state:
            for position in range(0, state.size, self._services.chunk_bytes):
                begun = trio.current_time()
                end = position + self._services.chunk_bytes
                for start, stop in _scattered(state.extents.lookup(position, end)):
                    copied += await self._copy(state, start, stop)
                await trio.sleep(trio.current_time() - begun)
        return copied

    async def _copy(self, state: OpenInode, start: int, end: int) -> bool:
        """Copy a stretch, unless it changes meanwhile."""
        async with state.lock:
            if state.dirty or state.stale:
                return False
            extents = state.extents.lookup(start, end)
            if _scattered(extents) != [(start, end)]:
                return False
            block = self._services.write.writer.open_block(await self._services.write.next_id())
            try:
                record = await self._put(state, block, start, end)
                new = Extent(start, end - start, block.block_id, 0)
                done = await self._publish(state, extents, new, record)
            except ChunkMissing:
                # Another client has replaced what was to be copied; if not, who reads it is told.
                state.stale = True
                return False
            except UnknownOutcome:
                self._services.write.on_debris(block.block_id)
                state.stale = True
                raise
            except BaseException:
                await self._discard(block)
                raise
            if not done:
                await self._discard(block)
            return done

    async def _put(self, state: OpenInode, block: OpenBlock, start: int, end: int) -> BlockRecord:
        writer = self._services.write.writer
        # While it holds this memory it waits for more, to read: nobody else does such a thing, and
        # it does it once at a time, so those who have what it waits for give it back.
        with await self._services.write.pool.acquire(self._services.chunk_bytes) as buffer:
            for position in range(start, end, COMPACT_STEP_BYTES):
                length = min(COMPACT_STEP_BYTES, end - position)
                part = await self._files.reader.read_stored(state, position, length)
                buffer.memory[position - start : position - start + length] = part
            await writer.put_chunk(block, 0, buffer, end - start)
        return writer.seal(block, end - start, time.time_ns())

    async def _publish(
        self, state: OpenInode, copied: list[Extent], new: Extent, record: BlockRecord
    ) -> bool:
        publish = partial(self._replace, inode=state.inode, copied=copied, new=new, record=record)
        done = await self._services.kv.transact(publish)
        if done:
            state.replaced(new)
            self._services.table.add({new.block_id: record})
            self._services.on_blocks_freed()
        return done

    def _replace(
        self, tx: Transaction, inode: int, copied: list[Extent], new: Extent, record: BlockRecord
    ) -> bool:
        require_session(tx, self._services.session_id)
        record_now = read_inode(tx, inode)
        stored = tails.live_extents(tx, inode, record_now, new.file_offset, new.end)
        parts = [extent.between(new.file_offset, new.end) for extent in stored]
        if coalesce([part for part in parts if part is not None]) != coalesce(copied):
            return False
        file_layer.publish(tx, inode, {new.block_id: record}, [new])
        return True

    async def _discard(self, block: OpenBlock) -> None:
        with trio.CancelScope(shield=True):
            await self._services.write.writer.discard(block)


def _scattered(extents: list[Extent]) -> list[tuple[int, int]]:
    """Stretches without holes that consist of many extents."""
    stretches: list[list[Extent]] = []
    for extent in extents:
        if stretches and stretches[-1][-1].end == extent.file_offset:
            stretches[-1].append(extent)
        else:
            stretches.append([extent])
    return [
        (stretch[0].file_offset, stretch[-1].end)
        for stretch in stretches
        if len(stretch) >= COMPACT_MIN_EXTENTS
    ]
