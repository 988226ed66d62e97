"""The write log of one inode: unflushed bytes, appended in the order they were written.

Bytes go into a chunk buffer; a full buffer is put to its store in the background while the next one
fills; a full block is left behind and the next one begun. Extents (kept by the inode's owner) say
which file bytes lie where, so a random write costs an append and an extent, nothing else. Nothing
here is visible to other clients: `seal` makes every byte durable in the stores and hands over the
block records for the metadata transaction that publishes them.

A publishing transaction may end without an answer. Its blocks are then in doubt: what they hold may
be published, so their chunks are never deleted here (`Debris` has the end of the session look).

Concurrency: `append`, `seal`, `clear` and `abandon` are called with the inode's lock held. `find`
never waits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import trio

from tectonic_client.activity import STORE, Waiting, detach
from tectonic_client.blocks.buffers import Buffer, BufferPool
from tectonic_client.blocks.writer import BlockWriter, OpenBlock
from tectonic_client.errors import TectonicError
from tectonic_client.limits import CHECKSUM_UNIT_BYTES, LARGE_WRITE_BYTES
from tectonic_client.records import BlockRecord


@dataclass(frozen=True, slots=True)
class WriteServices:
    """What every log of a file system shares.

    `on_debris` is told of blocks whose chunks stay in their stores though nothing may name them.
    """

    writer: BlockWriter
    pool: BufferPool
    next_id: Callable[[], Awaitable[int]]
    nursery: trio.Nursery
    on_debris: Callable[[int], None]


class Placed(NamedTuple):
    """Where appended bytes went."""

    block_id: int
    block_offset: int
    length: int


class _Filling:
    """The chunk that appended bytes go into."""

    __slots__ = ("buffer", "fill")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.fill = 0


class _LogBlock:
    """A block of the log: its chunks are put in order, its length grows until it is left behind."""

    __slots__ = ("block", "full", "in_doubt", "length")

    def __init__(self, block: OpenBlock) -> None:
        self.block = block
        self.length = 0
        self.full = False
        self.in_doubt = False


class WriteLog:
    """See the module's text. Owns its buffers until they are put or abandoned."""

    def __init__(self, services: WriteServices) -> None:
        self._services = services
        self._geometry = services.writer.geometry
        self._blocks: list[_LogBlock] = []
        self._filling: _Filling | None = None
        self._in_flight: dict[tuple[int, int], Buffer] = {}
        self._settled = trio.Condition()
        self.error: TectonicError | None = None
        """Of the first put that failed: the log is to be abandoned."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to seal or to abandon."""
        return not self._blocks

    @property
    def unflushed_bytes(self) -> int:
        """Bytes that were appended and not yet published."""
        return sum(block.length for block in self._blocks)

    @property
    def holds_buffer(self) -> bool:
        """Whether memory is held that `seal` would give back."""
        return self._filling is not None

    # --- appending ----------------------------------------------------------------------------

    async def append(self, data: memoryview) -> list[Placed]:
        """Take `data` (any length) and say where it went.

        Waits for memory when the pool is used up. Raises `error` if that is set, and what taking a
        lease of ids raises. When it raises, or is cancelled, part of `data` may lie in the log; no
        extent says where.
        """
        placed = []
        while data:
            self._raise_error()
            filling = await self._room(len(data))
            current = self._blocks[-1]
            count = min(len(data), filling.buffer.size_bytes - filling.fill)
            filling.buffer.memory[filling.fill : filling.fill + count] = data[:count]
            placed.append(Placed(current.block.block_id, current.length, count))
            filling.fill += count
            current.length += count
            data = data[count:]
            if filling.fill == self._geometry.chunk_bytes:
                current.full = current.length >= self._geometry.block_bytes
                self._dispatch()
        return placed

    async def _room(self, wanted: int) -> _Filling:
        """The chunk being filled, with room for at least one byte."""
        if self._filling is not None and self._filling.fill == self._filling.buffer.size_bytes:
            self._grow(self._filling)
        if self._filling is None:
            if not self._blocks or self._blocks[-1].full:
                block_id = await self._services.next_id()
                self._blocks.append(_LogBlock(self._services.writer.open_block(block_id)))
            self._filling = _Filling(await self._services.pool.acquire(self._first_size(wanted)))
        return self._filling

    def _first_size(self, wanted: int) -> int:
        """Small files take little memory; a big writer gets a whole chunk at once."""
        chunk = self._geometry.chunk_bytes
        return chunk if wanted >= LARGE_WRITE_BYTES else min(chunk, CHECKSUM_UNIT_BYTES)

    def _grow(self, filling: _Filling) -> None:
        """Move to a larger buffer; where there is none, end the block here.

        Waiting for memory while holding some could deadlock with another log that does the same.
        """
        size = min(self._geometry.chunk_bytes, 8 * filling.buffer.size_bytes)
        larger = self._services.pool.try_acquire(size)
        if larger is None:
            self._blocks[-1].full = True
            self._dispatch()
            return
        larger.memory[: filling.fill] = filling.buffer.memory[: filling.fill]
        filling.buffer.release()
        filling.buffer = larger

    # --- putting ------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send the chunk being filled to its store."""
        assert self._filling is not None
        filling, self._filling = self._filling, None
        current = self._blocks[-1]
        index = (current.length - 1) // self._geometry.chunk_bytes
        self._in_flight[current.block.block_id, index] = filling.buffer
        self._services.nursery.start_soon(self._put, current.block, index, filling)

    async def _put(self, block: OpenBlock, index: int, filling: _Filling) -> None:
        detach()
        # When the client is cancelled its last flush still needs this chunk.
        with trio.CancelScope(shield=True):
            try:
                await self._services.writer.put_chunk(block, index, filling.buffer, filling.fill)
            except TectonicError as error:
                self.error = self.error or error
            finally:
                del self._in_flight[block.block_id, index]
                filling.buffer.release()
                async with self._settled:
                    self._settled.notify_all()

    async def _settle(self) -> None:
        async with self._settled:
            while self._in_flight:
                with Waiting(STORE):
                    await self._settled.wait()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # --- sealing ------------------------------------------------------------------------------

    async def seal(self) -> dict[int, BlockRecord]:
        """Make everything durable in the stores; returns the records of all blocks of the log.

        May be called again when it was cancelled or the publishing transaction failed; appending
        goes on in a new block. Raises the first error of any put: abandon the log then.
        """
        if self._blocks:
            # Also where it ends with a whole chunk: a block in doubt must not get any longer.
            self._blocks[-1].full = True
        if self._filling is not None:
            self._dispatch()
        await self._settle()
        self._raise_error()
        now = time.time_ns()
        return {
            entry.block.block_id: self._services.writer.seal(entry.block, entry.length, now)
            for entry in self._blocks
        }

    @property
    def in_doubt(self) -> set[int]:
        """Blocks that a transaction without an answer may have published."""
        return {entry.block.block_id for entry in self._blocks if entry.in_doubt}

    def doubt(self, block_ids: Iterable[int]) -> None:
        """The transaction that was to publish these blocks got no answer."""
        doubtful = set(block_ids)
        for entry in self._blocks:
            entry.in_doubt = entry.in_doubt or entry.block.block_id in doubtful

    def clear(self, published: Container[int]) -> Callable[[], Awaitable[None]]:
        """The sealed blocks are published, or no extent uses them: begin anew.

        Returns what is still to be done: it deletes the chunks of the latter.
        """
        assert not self._in_flight
        assert self._filling is None
        rest = [entry for entry in self._blocks if entry.block.block_id not in published]
        self._blocks = []
        return partial(self._discard, rest)

    async def abandon(self) -> None:
        """Drop everything: chunks already put are deleted, memory is given back.

        Not cut short by cancellation; puts that are under way are waited for.
        """
        with trio.CancelScope(shield=True):
            if self._filling is not None:
                self._filling.buffer.release()
                self._filling = None
            await self._settle()
            dropped, self._blocks, self.error = self._blocks, [], None
            await self._discard(dropped)

    async def _discard(self, dropped: list[_LogBlock]) -> None:
        with trio.CancelScope(shield=True):
            for entry in dropped:
                if entry.in_doubt:
                    self._services.on_debris(entry.block.block_id)
                else:
                    await self._services.writer.discard(entry.block)

    # --- reading ------------------------------------------------------------------------------

    def find(self, block_id: int, index: int) -> memoryview | None:
        """Memory of a chunk that is not in its store yet; valid until the next await."""
        buffer = self._in_flight.get((block_id, index))
        if buffer is not None:
            return buffer.memory
        if self._filling is None or self._blocks[-1].block.block_id != block_id:
            return None
        if (self._blocks[-1].length - 1) // self._geometry.chunk_bytes != index:
            return None
        return self._filling.buffer.memory
