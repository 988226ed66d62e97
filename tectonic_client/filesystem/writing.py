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
from typing import NamedTuple

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
from tectonic_client.filesystem.refreshing import Refresher, is_same_version, require_regular
from tectonic_client.filesystem.services import Bytes, FileServices
from tectonic_client.kv.port import Transaction
from tectonic_client.limits import MAX_FILE_BYTES
from tectonic_client.metadata import files as file_layer
from tectonic_client.metadata import tails
from tectonic_client.metadata.blocks import named_blocks
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.metadata.sessions import heartbeat, require_session
from tectonic_client.records import BlockRecord, InodeFlag, InodeRecord


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
            if state.stale:
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
        if not durable and not state.dirty and not state.lock.locked():
            return  # most closes
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
            record, positions = await self._commit(update, durable=durable)
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

    async def _commit(self, update: _Update, *, durable: bool) -> tuple[InodeRecord, Positions]:
        while (done := await self._services.kv.transact(update.publish, durable=durable)) is None:
            await self._reclaim_tail(update.inode, update.extents[-1].end)
        return done

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
            try:
                await self._set_size(state, size, now_ns)
            except UnknownOutcome:
                state.stale = True  # what was cut must not come back when the file grows
                raise
        await self.until_seen(state, [state.inode])
        self._services.on_blocks_freed()

    async def _set_size(self, state: OpenInode, size: int, now_ns: int) -> None:
        cut = _Cut(self._services.session_id, state.inode, size, now_ns)
        while (done := await self._services.kv.transact(cut.publish)) is None:
            await self._reclaim_tail(state.inode, MAX_FILE_BYTES)
        # Where another client has changed the file, its other extents are not as they were known.
        state.stale = state.stale or not is_same_version(done.before, state.record)
        state.cut(done.record)
        state.unseen.update(done.positions)
        if done.record.flags & InodeFlag.TAIL:
            self._services.on_tail(state.inode)

    async def _reclaim_tail(self, inode: int, until: int) -> None:
        """Reclaim at least what lies before `until` of what earlier cuts left."""
        position: int | None = 0
        while position is not None and position < until:
            reclaim = partial(tails.reclaim, inode=inode)
            position = await self._services.kv.transact(reclaim)


class _CutDone(NamedTuple):
    """The record before and after a change of size, and where the events of it are."""

    before: InodeRecord
    record: InodeRecord
    positions: Positions


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a change of size publishes."""

    session_id: int
    inode: int
    size: int
    now_ns: int

    def publish(self, tx: Transaction) -> _CutDone | None:
        """None where a tail is to be reclaimed first. Raises SessionLost, StaleHandle, ..."""
        require_session(tx, self.session_id)
        before = read_inode(tx, self.inode)
        require_regular(self.inode, before)
        record: InodeRecord | None = replace(before, size=self.size)
        if self.size < before.size:
            record = tails.cut(tx, self.inode, before, self.size)
        if record is None:
            return None
        record = replace(record, mtime_ns=self.now_ns, ctime_ns=self.now_ns)
        write_inode(tx, self.inode, record)
        changes = Changes()
        changes.inode(self.inode, record)
        return _CutDone(before, record, changes.write(tx, self.session_id))


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

    def publish(self, tx: Transaction) -> tuple[InodeRecord, Positions] | None:
        """Returns the inode's new record, and where the events of it are.

        None where a tail is to be reclaimed first. Raises SessionLost, StaleHandle.
        """
        require_session(tx, self.session_id)
        record = read_inode(tx, self.inode)
        done = {*self.vanished, *named_blocks(tx, list(self.in_doubt))}
        blocks = {block_id: new for block_id, new in self.blocks.items() if block_id not in done}
        extents = [extent for extent in self.extents if extent.block_id not in done]
        if tails.is_in_the_way(tx, self.inode, record, extents):
            return None
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
