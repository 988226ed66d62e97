"""Reading open files: where the bytes lie, fetching them, reading ahead.

Takes no lock (CONCURRENCY.md). Never returns bytes that failed their check.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial

import trio

from tectonic_client.blocks.reader import Part
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.errors import BadHandle, ChunkMissing, TectonicError
from tectonic_client.filesystem.openinode import FileHandle, OpenInode
from tectonic_client.filesystem.pieces import Piece, pieces_between
from tectonic_client.filesystem.refreshing import Refresher
from tectonic_client.filesystem.services import Bytes, FileServices
from tectonic_client.limits import (
    READ_AHEAD_CHUNKS,
    READER_IDLE_S,
    SEQUENTIAL_BYTES,
    SEQUENTIAL_SLACK_BYTES,
)
from tectonic_client.records import BlockRecord


class FileReader:
    """Reads open files, those of `open_inodes`. Used from the event loop only.

    `flush` publishes what an inode has pending.
    """

    def __init__(
        self,
        services: FileServices,
        refresher: Refresher,
        flush: Callable[[OpenInode], Awaitable[None]],
        open_inodes: Collection[OpenInode],
    ) -> None:
        self._services = services
        self._refresher = refresher
        self._flush = flush
        self._open = open_inodes

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
                    await self._refresher.catch_up(state)
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

    async def read_stored(self, state: OpenInode, offset: int, length: int) -> Bytes:
        """Published bytes, with the inode's lock held and nothing pending. Raises as `read`."""
        pieces = list(pieces_between(state, self._services.chunk_bytes, offset, offset + length))
        return await self._gather(state, pieces, offset, length, sequential=False)

    async def _changed_elsewhere(self, state: OpenInode) -> bool:
        """Load the extents again; whether that made a difference. Raises StaleHandle."""
        await self._flush(state)
        seen = state.version
        await self._refresher.reload(state)
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
            await self._flush(state)

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
        readers = sum(now - other.read_in_order < READER_IDLE_S for other in self._open)
        share = self._services.cache.capacity // readers
        return max(1, min(READ_AHEAD_CHUNKS, share - 1))
