"""Writing, flushing and truncating open files.

Order of durability of a flush: chunks durable in their stores, then one metadata transaction that
publishes blocks, extents, size and times, then the answer. A failed put loses the unflushed bytes
of that inode and nothing else; writes of its handles fail until their flush or fsync has said so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import trio

from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.errors import (
    BadHandle,
    ChunkMissing,
    FileTooLarge,
    SessionLost,
    StaleHandle,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.extents import Extent
from tectonic_client.filesystem.openinode import FileHandle, OpenInode
from tectonic_client.filesystem.pieces import is_scattered
from tectonic_client.filesystem.refreshing import Refresher, require_regular
from tectonic_client.filesystem.services import Bytes, FileServices
from tectonic_client.kv.port import Transaction
from tectonic_client.limits import MAX_FILE_BYTES
from tectonic_client.metadata import files as file_layer
from tectonic_client.metadata.blocks import named_blocks
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.metadata.sessions import heartbeat, require_session
from tectonic_client.records import BlockRecord, InodeRecord


class FileWriter:
    """Changes open files. Used from the event loop only."""

    def __init__(self, services: FileServices, refresher: Refresher) -> None:
        self._services = services
        self._refresher = refresher

    async def write(self, handle: FileHandle, offset: int, data: Bytes) -> int:
        """Write all of `data`; at the end of the file, whatever `offset`, where O_APPEND is set.

        Raises FileTooLarge, NoSpace and other store errors (possibly of an earlier write).
        """
        if not handle.writable:
            raise BadHandle("the file is not open for writing")
        state = handle.state
        async with state.lock:
            handle.raise_failure(told=False)
            await self._refresher.catch_up(state)
            if handle.flags & os.O_APPEND:
                offset = state.size
            if offset < 0 or offset + len(data) > MAX_FILE_BYTES:
                raise FileTooLarge(f"offset {offset} + {len(data)} bytes is too large for a file")
            if data:
                await self._append(state, offset, memoryview(data).cast("B"))
        return len(data)

    async def _append(self, state: OpenInode, offset: int, data: memoryview) -> None:
        try:
            placed = await state.log.append(data)
        except BaseException:
            if state.log.error is not None:
                await self._lose(state, state.log.error)
            elif not state.dirty:
                await self.drop_log(state)  # else nobody would ever flush what it holds
            raise
        for run in placed:
            state.pending.insert(Extent(offset, run.length, run.block_id, run.block_offset))
            offset += run.length
        state.size = max(state.size, offset)
        state.mtime_ns = time.time_ns()
        if state.dirty_since is None:
            state.dirty_since = trio.current_time()

    async def _lose(self, state: OpenInode, error: TectonicError) -> None:
        """Unflushed bytes cannot be stored: back to what is published."""
        state.failure = error
        state.failures += 1
        await self.drop_log(state)

    async def drop_log(self, state: OpenInode) -> None:
        """Give up what is not published; the lock is held."""
        await state.log.abandon()
        state.settle()

    # --- flushing -----------------------------------------------------------------------------

    async def flush_handle(self, handle: FileHandle, *, durable: bool = False) -> None:
        """As `flush`, and tell the handle's program what was lost since it was opened."""
        try:
            await self.flush(handle.state, durable=durable)
        finally:
            handle.raise_failure(told=True)
        await self.until_seen(handle.state)

    async def until_seen(self, state: OpenInode, held: Collection[int] = ()) -> None:
        """Return when those who follow changes have seen what was flushed (coherence=push)."""
        positions = dict(state.unseen)
        await self._services.audience.has_seen(positions, held)
        for stripe, position in positions.items():
            if state.unseen.get(stripe) == position:
                del state.unseen[stripe]

    async def flush(self, state: OpenInode, *, durable: bool = False) -> None:
        """Publish everything written so far; with `durable` it survives power loss (fsync).

        Raises the error of a put, StaleHandle where the file was removed and SessionLost (those
        bytes are lost), and what else the metadata engine raises (the bytes are kept for another
        try).
        """
        async with state.lock:
            if state.dirty:
                await self.publish(state, durable=durable)
            elif durable:
                await self.sync_metadata()

    async def sync_metadata(self) -> None:
        """Make every acknowledged metadata change survive power loss."""
        session_id = self._services.session_id
        if session_id:  # a read-only client has no session and changed nothing
            await self._services.kv.transact(lambda tx: heartbeat(tx, session_id), durable=True)

    async def publish(self, state: OpenInode, *, durable: bool) -> None:
        """As `flush`, with the lock held and something dirty."""
        try:
            sealed = await state.log.seal()
        except TectonicError as error:
            await self._lose(state, error)
            raise
        extents = list(state.pending)
        used = {extent.block_id for extent in extents}
        blocks = {block_id: record for block_id, record in sealed.items() if block_id in used}
        in_doubt = state.log.in_doubt
        vanished = await self._vanished({i: blocks[i] for i in in_doubt & used})
        update = _Update(
            self._services.session_id, state.inode, blocks, extents, in_doubt, vanished,
            state.mtime_ns or time.time_ns(),
        )  # fmt: skip
        try:
            record, positions = await self._services.kv.transact(update.publish, durable=durable)
        except UnknownOutcome:
            state.log.doubt(blocks)
            raise
        except (SessionLost, StaleHandle) as error:
            await self._lose(state, error)
            raise
        discard_unused = state.log.clear(published=blocks)
        state.published(record, extents)
        state.unseen.update(positions)
        self._services.table.add(blocks)
        self._services.on_blocks_freed()
        if is_scattered(len(state.extents), state.size, self._services.chunk_bytes):
            self._services.on_scattered(state.inode)
        await discard_unused()

    async def _vanished(self, in_doubt: Mapping[int, BlockRecord]) -> set[int]:
        """Those of the blocks in doubt that were published, and deleted again meanwhile."""
        vanished = set()
        for block_id, record in in_doubt.items():
            try:
                await self._services.stores.run(
                    record.places[0].store_id, methodcaller("head", ChunkKey(block_id, 0))
                )
            except ChunkMissing:
                vanished.add(block_id)
        return vanished

    # --- truncating ---------------------------------------------------------------------------

    async def truncate(self, state: OpenInode, size: int, now_ns: int) -> None:
        """Set the size; bytes beyond it are gone, bytes that it adds read as zeros.

        Raises IsDirectory, InvalidArgument for what is no regular file, FileTooLarge, StaleHandle.
        """
        if size < 0 or size > MAX_FILE_BYTES:
            raise FileTooLarge(f"{size} bytes are too large for a file")
        async with state.lock:
            if state.dirty:
                await self.publish(state, durable=False)
            set_size = partial(self._set_size, state.inode, size, now_ns)
            try:
                record, extents, positions = await self._services.kv.transact(set_size)
            except UnknownOutcome:
                state.stale = True  # what was cut must not come back when the file grows
                raise
            state.refresh(record, extents)
            state.unseen.update(positions)
        await self.until_seen(state, [state.inode])
        self._services.on_blocks_freed()

    def _set_size(
        self, inode: int, size: int, now_ns: int, tx: Transaction
    ) -> tuple[InodeRecord, list[Extent], Positions]:
        require_session(tx, self._services.session_id)
        record = read_inode(tx, inode)
        require_regular(inode, record)
        if size < record.size:
            file_layer.cut(tx, inode, size)
        record = replace(record, size=size, mtime_ns=now_ns, ctime_ns=now_ns)
        write_inode(tx, inode, record)
        changes = Changes()
        changes.inode(inode, record)
        positions = changes.write(tx, self._services.session_id)
        return record, file_layer.read_extents(tx, inode), positions


@dataclass(frozen=True, slots=True)
class _Update:
    """What a flush publishes. Of blocks in doubt only that which no earlier try has published."""

    session_id: int
    inode: int
    blocks: Mapping[int, BlockRecord]
    extents: Sequence[Extent]
    in_doubt: Collection[int]
    vanished: Collection[int]
    mtime_ns: int

    def publish(self, tx: Transaction) -> tuple[InodeRecord, Positions]:
        """Returns the inode's new record, and where the events of it are.

        Raises SessionLost, StaleHandle.
        """
        require_session(tx, self.session_id)
        record = read_inode(tx, self.inode)
        done = {*self.vanished, *named_blocks(tx, list(self.in_doubt))}
        blocks = {block_id: new for block_id, new in self.blocks.items() if block_id not in done}
        extents = [extent for extent in self.extents if extent.block_id not in done]
        if extents:
            file_layer.publish(tx, self.inode, blocks, extents)
            record = replace(
                record, size=max(extents[-1].end, record.size), mtime_ns=self.mtime_ns,
                ctime_ns=self.mtime_ns,
            )  # fmt: skip
            write_inode(tx, self.inode, record)
        changes = Changes()
        changes.inode(self.inode, record)
        return record, changes.write(tx, self.session_id)
