"""The write log of one inode: unflushed bytes, appended in the order they were written.

Bytes go into a chunk buffer; a full buffer is put to its store in the background while the next one
fills; a full block is left behind and the next one begun. Extents (kept by the inode's owner) say
which file bytes lie where, so a random write costs an append and an extent, nothing else. Nothing
here is visible to other clients: `seal` makes every byte durable in the stores and hands over the
block records for the metadata transaction that publishes them.

Concurrency: `append`, `seal` and `abandon` are called with the inode's lock held. `find` never
waits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import trio

from tectonic_client.blocks.buffers import Buffer, BufferPool
from tectonic_client.blocks.writer import BlockWriter, OpenBlock
from tectonic_client.errors import TectonicError
from tectonic_client.limits import CHECKSUM_UNIT_BYTES, LARGE_WRITE_BYTES
from tectonic_client.records import BlockRecord


@dataclass(frozen=True, slots=True)
class WriteServices:
    """What every log of a file system shares."""

    writer: BlockWriter
    pool: BufferPool
    next_id: Callable[[], Awaitable[int]]
    nursery: trio.Nursery


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

    __slots__ = ("block", "full", "length")

    def __init__(self, block: OpenBlock) -> None:
        self.block = block
        self.length = 0
        self.full = False


class WriteLog:
    """See the module's text. Owns its buffers until they are put or abandoned."""

    def __init__(self, services: WriteServices) -> None:
        self._services = services
        self._geometry = services.writer.geometry
        self._blocks: list[_LogBlock] = []
        self._filling: _Filling | None = None
        self._in_flight: dict[tuple[int, int], Buffer] = {}
        self._settled = trio.Condition()
        self._error: TectonicError | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to seal."""
        return not self._blocks

    @property
    def holds_buffer(self) -> bool:
        """Whether memory is held that `seal` would give back."""
        return self._filling is not None

    # --- appending ----------------------------------------------------------------------------

    async def append(self, data: memoryview) -> list[Placed]:
        """Take `data` (any length) and say where it went.

        Waits for memory when the pool is used up. Raises the error of an earlier background put:
        the log is then to be abandoned.
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
        try:
            await self._services.writer.put_chunk(block, index, filling.buffer, filling.fill)
        except TectonicError as error:
            self._error = self._error or error
        finally:
            del self._in_flight[block.block_id, index]
            filling.buffer.release()
            with trio.CancelScope(shield=True):
                async with self._settled:
                    self._settled.notify_all()

    async def _settle(self) -> None:
        async with self._settled:
            while self._in_flight:
                await self._settled.wait()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- sealing ------------------------------------------------------------------------------

    async def seal(self) -> dict[int, BlockRecord]:
        """Make everything durable in the stores; returns the records of all blocks of the log.

        May be called again when the publishing transaction failed: appending goes on in new
        blocks only after `clear`. Raises the first error of any put: abandon the log then.
        """
        if self._filling is not None:
            self._dispatch()
        await self._settle()
        self._raise_error()
        now = time.time_ns()
        return {
            entry.block.block_id: self._services.writer.seal(entry.block, entry.length, now)
            for entry in self._blocks
        }

    def clear(self) -> None:
        """The sealed blocks are published: begin anew."""
        assert not self._in_flight
        assert self._filling is None
        self._blocks.clear()

    async def abandon(self) -> None:
        """Drop everything: chunks already put are deleted, memory is given back."""
        if self._filling is not None:
            self._filling.buffer.release()
            self._filling = None
        await self._settle()
        dropped, self._blocks, self._error = self._blocks, [], None
        for entry in dropped:
            await self._services.writer.discard(entry.block)

    async def discard_unused(self, used: set[int]) -> None:
        """Delete the chunks of blocks that no extent uses: overwritten before they were flushed."""
        for entry in self._blocks:
            if entry.block.block_id not in used:
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
