"""Bytes of open files: reading, writing, flushing, truncating.

Order of durability of a flush: chunks durable in their stores, then one metadata transaction that
publishes blocks, extents, size and times, then the answer. A failed put loses the unflushed bytes
of that inode and nothing else; writes of its handles fail until their flush or fsync has said so.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import trio

from tectonic_client.blocks.reader import BlockReader, Part
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.errors import (
    BadHandle,
    ChunkMissing,
    FileTooLarge,
    InvalidArgument,
    IsDirectory,
    SessionLost,
    StaleHandle,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.extents import Extent
from tectonic_client.filesystem.audience import Audience
from tectonic_client.filesystem.blocktable import BlockTable
from tectonic_client.filesystem.chunkcache import ChunkCache
from tectonic_client.filesystem.openinode import FileHandle, OpenInode
from tectonic_client.filesystem.pieces import Piece, is_scattered, pieces_between
from tectonic_client.filesystem.writelog import WriteLog, WriteServices
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import (
    MAX_FILE_BYTES,
    READ_AHEAD_CHUNKS,
    READER_IDLE_S,
    SEQUENTIAL_BYTES,
    SEQUENTIAL_SLACK_BYTES,
)
from tectonic_client.metadata import files as file_layer
from tectonic_client.metadata import quotas
from tectonic_client.metadata.blocks import named_blocks
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.metadata.orphans import is_whole
from tectonic_client.metadata.sessions import heartbeat, require_session
from tectonic_client.records import BlockRecord, FileType, InodeFlag, InodeRecord
from tectonic_client.types import Change, ChangeKind

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileServices:
    """What file I/O stands on."""

    kv: AsyncKV
    session_id: int
    stores: StoreSet
    write: WriteServices
    reader: BlockReader
    cache: ChunkCache
    table: BlockTable
    chunk_bytes: int
    on_blocks_freed: Callable[[], None]
    on_scattered: Callable[[int], None]
    audience: Audience


class Files:
    """All inodes that this client has open. Used from the event loop only.

    `on_last_close` is told of each inode that is not open any more.
    """

    def __init__(self, services: FileServices, on_last_close: Callable[[int], None]) -> None:
        self._services = services
        self._on_last_close = on_last_close
        self._open: dict[int, OpenInode] = {}

    # --- opening ------------------------------------------------------------------------------

    def is_open(self, inode: int) -> bool:
        """Whether some handle of this client refers to the inode."""
        return inode in self._open

    def inodes(self) -> list[int]:
        """All inodes that some handle of this client refers to."""
        return list(self._open)

    def state_of(self, inode: int) -> OpenInode | None:
        """The shared state of an open inode."""
        return self._open.get(inode)

    @property
    def open_inodes(self) -> int:
        """How many files are open."""
        return len(self._open)

    async def forget(self, found: Sequence[Change]) -> None:
        """Other clients changed these (see `follower.Cache`)."""
        for change in found:
            state = self._open.get(change.inode)
            if state is not None and change.kind is ChangeKind.INODE:
                state.stale = True

    async def forget_open_files(self) -> None:
        """Other clients may have changed anything below push directories."""
        for state in self._open.values():
            state.stale = True

    def following(self) -> list[int]:
        """Open inodes whose changes by others are told (coherence=push)."""
        return [
            state.inode
            for state in self._open.values()
            if state.record is not None and state.record.flags & InodeFlag.PUSH
        ]

    def dirty(self) -> list[OpenInode]:
        """Inodes with unflushed bytes, the longest dirty first."""
        found = [state for state in self._open.values() if state.dirty]
        return sorted(found, key=lambda state: state.dirty_since or 0.0)

    def note(self, inode: int, **fields: int) -> None:
        """This client has changed these fields of an inode's record."""
        state = self._open.get(inode)
        if state is not None and state.record is not None:
            state.record = replace(state.record, **fields)

    def has_no_xattrs(self, inode: int) -> bool:
        """Whether the inode is open and, as far as this client knows, has none."""
        state = self._open.get(inode)
        record = None if state is None else state.record
        return record is not None and not record.flags & InodeFlag.XATTRS

    def unflushed(self, quota: int) -> int:
        """Bytes by which unflushed writes let files of a quota grow."""
        states = [state for state in self._open.values() if state.quota == quota]
        return sum(state.size - (state.record.size if state.record else 0) for state in states)

    async def open(self, inode: int, flags: int) -> FileHandle:
        """A handle to a regular file, with metadata as of now (close-to-open).

        Raises StaleHandle, IsDirectory, InvalidArgument for what is no regular file.
        """
        state = self._enter(inode)
        try:
            await self._reload(state)
            if state.record is not None and not state.record.nlink and state.users == 1:
                # Only what a handle of this client keeps alive may be opened without a name:
                # the caller found the inode by a name that is gone, and looks again.
                raise StaleHandle(f"inode {inode} was removed")
        except BaseException:
            await self._leave(state)
            raise
        return FileHandle(state, flags, state.failures)

    def open_new(
        self, inode: int, record: InodeRecord, flags: int, quota: int | None
    ) -> FileHandle:
        """A handle to a regular file that was just created; never waits or fails."""
        state = self._enter(inode)
        state.quota = quota
        if state.record is None:  # else somebody has already found and opened it
            state.refresh(record, [])
        return FileHandle(state, flags, state.failures)

    async def _reload(self, state: OpenInode) -> None:
        """Take over published changes of other clients; unflushed bytes of this one stay."""
        async with state.lock:
            await self._load(state)

    async def _load(self, state: OpenInode) -> None:
        def load(tx: ReadTransaction) -> tuple[InodeRecord, list[Extent], int | None]:
            record = read_inode(tx, state.inode)
            if not record.nlink and not is_whole(tx, state.inode):
                raise StaleHandle(f"inode {state.inode} was removed")
            quota = quotas.quota_of(tx, state.inode, record)
            return record, file_layer.read_extents(tx, state.inode), quota

        if state.dirty and not state.stale:
            return
        was_stale, state.stale = state.stale, False  # a change that comes meanwhile sets it again
        try:
            record, extents, state.quota = await self._services.kv.read(load)
        except BaseException:
            state.stale = state.stale or was_stale
            raise
        _require_regular(state.inode, record)
        state.refresh(record, extents)

    async def _catch_up(self, state: OpenInode) -> None:
        """Take over what another client changed below a push directory; the lock is held."""
        if state.stale:
            # Of a removed file its readers keep what they have, as long as that is there.
            with suppress(StaleHandle):
                await self._load(state)

    async def close(self, handle: FileHandle, *, discard: bool = False) -> None:
        """Drop a handle; the last one flushes what is left, or discards it (a removed file).

        Not cut short by cancellation. What cannot be flushed is lost with the error.
        """
        await self._leave(handle.state, discard=discard)
        await self._until_seen(handle.state)
        if not discard:
            handle.raise_failure(told=True)

    @asynccontextmanager
    async def visited(self, inode: int) -> AsyncIterator[OpenInode]:
        """The inode's shared state, up to date, for a task of this client. Raises StaleHandle."""
        state = self._enter(inode)
        state.visitors += 1
        try:
            await self._reload(state)
            yield state
        finally:
            state.visitors -= 1
            await self._leave(state)

    async def read_stored(self, state: OpenInode, offset: int, length: int) -> Bytes:
        """Published bytes, with the inode's lock held and nothing pending. Raises as `read`."""
        pieces = list(pieces_between(state, self._services.chunk_bytes, offset, offset + length))
        return await self._gather(state, pieces, offset, length, sequential=False)

    def _enter(self, inode: int) -> OpenInode:
        state = self._open.get(inode)
        if state is None:
            state = self._open[inode] = OpenInode(inode, WriteLog(self._services.write))
        state.users += 1
        return state

    async def _leave(self, state: OpenInode, *, discard: bool = False) -> None:
        """One user less. Between the look whether it is the last one and its going lies no await
        but those under the lock, which whoever comes meanwhile waits for."""
        try:
            if state.users - state.visitors == 1 and not state.log.empty:
                with trio.CancelScope(shield=True):
                    await self._finish(state, discard=discard)
        finally:
            state.users -= 1
            if not state.users:
                self._open.pop(state.inode, None)
                self._on_last_close(state.inode)

    async def _finish(self, state: OpenInode, *, discard: bool) -> None:
        async with state.lock:
            try:
                if state.dirty and not discard:
                    await self._publish(state, durable=False)
            finally:
                if state.users - state.visitors == 1:
                    await self._drop_log(state)

    # --- writing ------------------------------------------------------------------------------

    async def write(self, handle: FileHandle, offset: int, data: Bytes) -> int:
        """Write all of `data`; at the end of the file, whatever `offset`, where O_APPEND is set.

        Raises FileTooLarge, NoSpace and other store errors (possibly of an earlier write).
        """
        if not handle.writable:
            raise BadHandle("the file is not open for writing")
        state = handle.state
        async with state.lock:
            handle.raise_failure(told=False)
            await self._catch_up(state)
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
                await self._drop_log(state)  # else nobody would ever flush what it holds
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
        await self._drop_log(state)

    async def _drop_log(self, state: OpenInode) -> None:
        await state.log.abandon()
        state.settle()

    # --- flushing -----------------------------------------------------------------------------

    async def flush_handle(self, handle: FileHandle, *, durable: bool = False) -> None:
        """As `flush`, and tell the handle's program what was lost since it was opened."""
        try:
            await self.flush(handle.state, durable=durable)
        finally:
            handle.raise_failure(told=True)
        await self._until_seen(handle.state)

    async def _until_seen(self, state: OpenInode, held: Collection[int] = ()) -> None:
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
                await self._publish(state, durable=durable)
            elif durable:
                await self.sync_metadata()

    async def sync_metadata(self) -> None:
        """Make every acknowledged metadata change survive power loss."""
        session_id = self._services.session_id
        if session_id:  # a read-only client has no session and changed nothing
            await self._services.kv.transact(lambda tx: heartbeat(tx, session_id), durable=True)

    async def _publish(self, state: OpenInode, *, durable: bool) -> None:
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

    async def truncate(self, inode: int, size: int, now_ns: int) -> None:
        """Set the size; bytes beyond it are gone, bytes that it adds read as zeros.

        Raises IsDirectory, InvalidArgument for what is no regular file, FileTooLarge, StaleHandle.
        """
        if size < 0 or size > MAX_FILE_BYTES:
            raise FileTooLarge(f"{size} bytes are too large for a file")
        # Entered, so that whoever opens the file meanwhile waits and sees the new size.
        state = self._enter(inode)
        try:
            async with state.lock:
                if state.dirty:
                    await self._publish(state, durable=False)
                set_size = partial(self._set_size, inode, size, now_ns)
                try:
                    record, extents, positions = await self._services.kv.transact(set_size)
                except UnknownOutcome:
                    state.stale = True  # what was cut must not come back when the file grows
                    raise
                state.refresh(record, extents)
                state.unseen.update(positions)
            await self._until_seen(state, [inode])
        finally:
            await self._leave(state)
        self._services.on_blocks_freed()

    def _set_size(
        self, inode: int, size: int, now_ns: int, tx: Transaction
    ) -> tuple[InodeRecord, list[Extent], Positions]:
        require_session(tx, self._services.session_id)
        record = read_inode(tx, inode)
        _require_regular(inode, record)
        if size < record.size:
            file_layer.cut(tx, inode, size)
        record = replace(record, size=size, mtime_ns=now_ns, ctime_ns=now_ns)
        write_inode(tx, inode, record)
        changes = Changes()
        changes.inode(inode, record)
        positions = changes.write(tx, self._services.session_id)
        return record, file_layer.read_extents(tx, inode), positions

    # --- reading ------------------------------------------------------------------------------

    async def read(self, handle: FileHandle, offset: int, size: int) -> Bytes:
        """Bytes from `offset`, fewer than `size` only at the end of the file.

        The result may lie in memory that is only valid until the next await. Raises CorruptChunk,
        ChunkMissing, StoreUnavailable, StaleHandle where another client removed the file; never
        returns bytes that failed their check.
        """
        if not handle.readable:
            raise BadHandle("the file is not open for reading")
        state = handle.state
        sequential = self._note_position(handle, offset, size)
        while True:
            if state.stale:
                async with state.lock:
                    await self._catch_up(state)
            length = min(size, state.size - offset)
            if length <= 0 or offset < 0:
                return b""
            seen = state.version
            try:
                return await self._read_now(state, offset, length, sequential=sequential)
            except ChunkMissing:
                # What was being read may have been replaced, by this client or another one.
                if state.version == seen and not await self._changed_elsewhere(state):
                    raise

    async def _changed_elsewhere(self, state: OpenInode) -> bool:
        """Load the extents again; whether that made a difference. Raises StaleHandle."""
        await self.flush(state)
        seen = state.version
        await self._reload(state)
        return state.version != seen

    async def _read_now(
        self, state: OpenInode, offset: int, length: int, *, sequential: bool
    ) -> Bytes:
        pieces = await self._readable_pieces(state, offset, length)
        whole = self._whole(state, pieces, length)
        if whole is not None and sequential:
            await self._read_ahead(state, offset + length)
            # What was in memory may have left it, or have been overwritten, meanwhile.
            pieces = await self._readable_pieces(state, offset, length)
            whole = self._whole(state, pieces, length)
        if whole is not None:
            return whole
        return await self._gather(state, pieces, offset, length, sequential=sequential)

    async def _readable_pieces(self, state: OpenInode, offset: int, length: int) -> list[Piece]:
        """Where the bytes lie: published, or still in memory until the next await."""
        while True:
            pieces = list(
                pieces_between(state, self._services.chunk_bytes, offset, offset + length)
            )
            if all(not p.pending or state.log.find(p.block_id, p.chunk) for p in pieces):
                return pieces
            # Unpublished and no longer in memory: publish, then it is read like anything else.
            await self.flush(state)

    def _whole(self, state: OpenInode, pieces: list[Piece], length: int) -> memoryview | None:
        """The bytes, where they are one piece of memory."""
        if len(pieces) != 1 or pieces[0].length != length:
            return None
        return self._in_memory(state, pieces[0])

    def _in_memory(self, state: OpenInode, piece: Piece) -> memoryview | None:
        start, end = piece.chunk_offset, piece.chunk_offset + piece.length
        if not piece.pending:
            return self._services.cache.peek(piece.block_id, piece.chunk, start, end)
        chunk = state.log.find(piece.block_id, piece.chunk)
        return None if chunk is None else chunk[start:end]

    async def _gather(
        self, state: OpenInode, pieces: list[Piece], offset: int, length: int, *, sequential: bool
    ) -> Bytes:
        result = bytearray(length)
        target = memoryview(result)
        stored = []
        for piece in pieces:
            part = self._in_memory(state, piece)
            if part is None:
                stored.append(piece)
            else:
                start = piece.file_offset - offset
                target[start : start + piece.length] = part
        records = await self._services.table.load(piece.block_id for piece in stored)
        chunks: dict[tuple[int, int], list[Part]] = {}
        for piece in stored:
            start = piece.file_offset - offset
            part = target[start : start + piece.length]
            if sequential and not piece.is_small:
                part[:] = await self._cached(state, piece, records[piece.block_id])
            else:
                group = chunks.setdefault((piece.block_id, piece.chunk), [])
                group.append(Part(piece.chunk_offset, part))
        with unwrapped_groups():
            async with trio.open_nursery() as nursery:
                for (block_id, chunk), parts in chunks.items():
                    read = partial(self._services.reader.read_parts, context=f"inode {state.inode}")
                    nursery.start_soon(read, block_id, records[block_id], chunk, parts)
        if sequential:
            await self._read_ahead(state, offset + length)
        return result

    async def _cached(self, state: OpenInode, piece: Piece, record: BlockRecord) -> memoryview:
        """The piece, by way of its whole chunk; valid until the next await."""
        return await self._services.cache.get(
            piece.block_id, record, piece.chunk, piece.chunk_offset,
            piece.chunk_offset + piece.length, f"inode {state.inode}",
        )  # fmt: skip

    # --- read-ahead ---------------------------------------------------------------------------

    @staticmethod
    def _note_position(handle: FileHandle, offset: int, length: int) -> bool:
        """Whether the handle is read sequentially, this read included."""
        if abs(offset - handle.next_offset) <= SEQUENTIAL_SLACK_BYTES:
            handle.streak_bytes += length
        else:
            handle.streak_bytes = 0
        handle.next_offset = offset + length
        return handle.streak_bytes > SEQUENTIAL_BYTES

    async def _read_ahead(self, state: OpenInode, position: int) -> None:
        """Begin to load the chunks that follow `position`."""
        chunks = self._chunks_ahead(state)
        end = min(position + chunks * self._services.chunk_bytes, state.size)
        if end <= position:
            return
        ahead = [
            piece
            for piece in pieces_between(state, self._services.chunk_bytes, position, end)
            if not piece.pending
            and not piece.is_small
            and not self._services.cache.has(piece.block_id, piece.chunk)
        ]
        if not ahead:
            return
        # An error is told to whoever reads that far, if anybody does.
        with suppress(TectonicError):
            records = await self._services.table.load(piece.block_id for piece in ahead)
            for piece in ahead:
                self._services.cache.prefetch(
                    piece.block_id, records[piece.block_id], piece.chunk, f"inode {state.inode}"
                )

    def _chunks_ahead(self, state: OpenInode) -> int:
        """How far to read ahead, so that what all readers hold fits the cache."""
        now = trio.current_time()
        state.read_in_order = now
        readers = sum(now - other.read_in_order < READER_IDLE_S for other in self._open.values())
        share = self._services.cache.capacity // readers
        return max(1, min(READ_AHEAD_CHUNKS, share - 1))


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


def _require_regular(inode: int, record: InodeRecord) -> None:
    if record.is_directory:
        raise IsDirectory(f"inode {inode} is a directory")
    if record.file_type is not FileType.REGULAR:
        raise InvalidArgument(f"inode {inode} is not a regular file")
