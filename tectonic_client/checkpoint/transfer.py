"""Moves bytes between the arrays of a state and blocks: the fast path of save and load.

Saving, each chunk is one call in one worker thread: its pieces are copied from the arrays into a
pool buffer, checksummed while in cache and put. Loading is the reverse. A few chunks are under way
at once; memory is what the pool has, whatever the size of the state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import trio

from tectonic_client.blocks.writer import OpenBlock
from tectonic_client.checkpoint.layout import (
    HEADER,
    ChunkPlan,
    Layout,
    ReadPlan,
    plan_chunks,
    plan_reads,
)
from tectonic_client.checkpoint.leaves import Leaf
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.encoding.chunk import padded
from tectonic_client.errors import (
    CorruptCheckpoint,
    CorruptionError,
    FormatTooNew,
    StaleHandle,
    StoreUnavailable,
)
from tectonic_client.extents import Extent, ExtentMap
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import CHECKPOINT_TRANSFERS
from tectonic_client.metadata.blocks import read_blocks
from tectonic_client.metadata.inodes import read_inode
from tectonic_client.metadata.tails import live_extents
from tectonic_client.records import BlockRecord
from tectonic_client.volume import Volume

T = TypeVar("T")

UNREADABLE: Final = (CorruptionError, FormatTooNew, StoreUnavailable)
"""What is wrong with stored data, not with the question. A bad sector is a StoreUnavailable."""

_TENSORS_NAMED: Final = 8
"""Tensors of a bad chunk that a message spells out: a chunk may hold thousands."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file whose chunks are durable and that no metadata names yet."""

    size_bytes: int
    blocks: Mapping[int, BlockRecord]
    extents: Sequence[Extent]


async def write_file(
    volume: Volume, layout: Layout, header: bytes, leaves: Mapping[str, Leaf], now_ns: int
) -> WrittenFile:
    """Put the bytes of a file that is laid out; durable in the stores on return.

    Raises NoSpace and other store errors; what was put until then is deleted again.
    """
    geometry = volume.writer.geometry
    plans = plan_chunks(layout, geometry.block_bytes, geometry.chunk_bytes)
    count = plans[-1].block + 1
    blocks = [volume.writer.open_block(await volume.ids.next_id()) for _ in range(count)]
    sources = [leaves[tensor.name] for tensor in layout.tensors]

    async def put(plan: ChunkPlan) -> None:
        buffer = await volume.pool.acquire(padded(plan.length))
        try:
            fill = partial(_fill, plan, memoryview(header), sources)
            block = blocks[plan.block]
            await volume.writer.put_chunk(block, plan.chunk, buffer, plan.length, fill=fill)
        finally:
            buffer.release()

    try:
        await _at_once(put, plans)
    except BaseException:
        await _discard(volume, blocks)
        raise
    return _seal(volume, blocks, layout.file_bytes, now_ns)


async def write_bytes(volume: Volume, data: bytes, now_ns: int) -> WrittenFile:
    """Put a small file of given content, as `write_file` does."""
    layout = Layout(len(data), (), {})
    return await write_file(volume, layout, data, {}, now_ns)


def _fill(plan: ChunkPlan, header: memoryview, sources: list[Leaf], memory: memoryview) -> None:
    """In a worker thread: bring the chunk's bytes together."""
    for piece in plan.pieces:
        target = memory[piece.offset : piece.offset + piece.end - piece.start]
        if piece.source == HEADER:
            target[:] = header[piece.start : piece.end]
        else:
            sources[piece.source].copy_out(piece.start, piece.end, target)


def _seal(volume: Volume, blocks: list[OpenBlock], size_bytes: int, now_ns: int) -> WrittenFile:
    block_bytes = volume.writer.geometry.block_bytes
    extents = [
        Extent(start, min(block_bytes, size_bytes - start), blocks[number].block_id, 0)
        for number, start in enumerate(range(0, size_bytes, block_bytes))
    ]
    records = {
        block.block_id: volume.writer.seal(block, extent.length, now_ns)
        for block, extent in zip(blocks, extents, strict=True)
    }
    return WrittenFile(size_bytes, records, extents)


async def _discard(volume: Volume, blocks: Iterable[OpenBlock]) -> None:
    with trio.CancelScope(shield=True):
        for block in blocks:
            await volume.writer.discard(block)


async def discard_file(volume: Volume, written: WrittenFile) -> None:
    """Delete the chunks of a file that will not be published."""
    await _discard(
        volume,
        (
            OpenBlock(block_id, dict(enumerate(record.places)))
            for block_id, record in written.blocks.items()
        ),
    )


async def _at_once(work: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Run `work` on all items, a few at a time; the first error ends it."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    with unwrapped_groups():
        async with trio.open_nursery() as nursery:
            for _ in range(CHECKPOINT_TRANSFERS):
                nursery.start_soon(worker)


# --- loading ----------------------------------------------------------------------------------


class StoredFile:
    """A published file, as it was when it was opened; `name` is for messages."""

    def __init__(
        self, volume: Volume, name: str, size_bytes: int, extents: Sequence[Extent],
        blocks: Mapping[int, BlockRecord],
    ) -> None:  # fmt: skip
        self._volume = volume
        self.name = name
        self.size_bytes = size_bytes
        self._extents = ExtentMap()
        for extent in extents:
            self._extents.insert(extent)
        self._blocks = blocks

    @classmethod
    async def open(cls, volume: Volume, path: str) -> StoredFile:
        """The file at an absolute path. Raises NotFound, StaleHandle."""
        inode = await volume.filesystem.resolve(path)

        def load(tx: ReadTransaction) -> tuple[int, list[Extent], dict[int, BlockRecord | None]]:
            record = read_inode(tx, inode)
            extents = live_extents(tx, inode, record)
            ids = list(dict.fromkeys(extent.block_id for extent in extents))
            return (
                record.size,
                extents,
                dict(zip(ids, read_blocks(tx, ids), strict=True)),
            )

        size, extents, found = await volume.kv.read(load)
        blocks = {block_id: record for block_id, record in found.items() if record is not None}
        if len(blocks) != len(found):
            raise StaleHandle(f"{path} was removed while it was being opened")
        return cls(volume, path, size, extents, blocks)

    def borders(self) -> list[int]:
        """File offsets at which chunks begin."""
        chunk_bytes = self._volume.record.chunk_bytes
        return [
            extent.file_offset + start - extent.block_offset
            for extent in self._extents
            for start in range(
                -(-extent.block_offset // chunk_bytes) * chunk_bytes,
                extent.block_offset + extent.length,
                chunk_bytes,
            )
        ] + [extent.file_offset for extent in self._extents]

    async def read(self, start: int, length: int) -> bytearray:
        """File bytes [start, start + length). Raises CorruptCheckpoint where there are none."""
        result = bytearray(length)
        target = memoryview(result)
        for extent in self._between(start, start + length):
            position = extent.file_offset - start
            await self._volume.reader.read_into(
                extent.block_id, self._blocks[extent.block_id], extent.block_offset,
                target[position : position + extent.length], context=self.name,
            )  # fmt: skip
        return result

    def _between(self, start: int, end: int) -> list[Extent]:
        """The parts of extents that hold [start, end), all of it."""
        parts = self._extents.lookup(start, end)
        if sum(part.length for part in parts) != end - start:
            raise CorruptCheckpoint(f"{self.name}: bytes {start} to {end} are not all there")
        return parts

    async def scatter(
        self, plans: Iterable[ReadPlan], targets: Mapping[int, Sequence[Leaf]]
    ) -> None:
        """Carry out reads: hand each piece's bytes to all leaves of its source.

        Raises CorruptChunk, ChunkMissing and CorruptCheckpoint, naming file and tensors.
        """

        async def fetch(plan: ReadPlan) -> None:
            try:
                await self._fetch(plan, targets)
            except CorruptionError as error:
                names = {leaf.name for p in plan.pieces for leaf in targets.get(p.source, ())}
                raise type(error)(f"{_named(names)}: {error}") from error

        await _at_once(fetch, plans)

    async def _fetch(self, plan: ReadPlan, targets: Mapping[int, Sequence[Leaf]]) -> None:
        (extent,) = self._between(plan.file_offset, plan.file_offset + plan.length)
        index, start = divmod(extent.block_offset, self._volume.record.chunk_bytes)
        await self._volume.reader.read_scatter(
            extent.block_id, self._blocks[extent.block_id], index, start, start + plan.length,
            partial(_hand_out, plan, targets), context=self.name,
        )  # fmt: skip

    async def verify(self, layout: Layout) -> list[str]:
        """Read all tensors and compare them with their checksums; returns what cannot be read.

        Raises CorruptCheckpoint where bytes of the file are in no block.
        """
        self._between(0, self.size_bytes)
        everything = range(len(layout.tensors))
        problems: list[str] = []

        async def check(plan: ReadPlan) -> None:
            try:
                await self._fetch(plan, {})
            except UNREADABLE as error:
                names = {layout.tensors[piece.source].name for piece in plan.pieces}
                problems.append(f"{_named(names)}: {error}")

        await _at_once(check, plan_reads(layout, everything, self.borders(), gap_bytes=0))
        return problems


def _named(tensors: Collection[str]) -> str:
    """How messages name the tensors of a read."""
    shown = ", ".join(sorted(tensors)[:_TENSORS_NAMED])
    more = len(tensors) - _TENSORS_NAMED
    noun = "tensor" if len(tensors) == 1 else "tensors"
    return f"{noun} {shown}" + (f" and {more} more" if more > 0 else "")


def _hand_out(plan: ReadPlan, targets: Mapping[int, Sequence[Leaf]], view: memoryview) -> None:
    """In a worker thread: bring the bytes of a read to their tensors."""
    for piece in plan.pieces:
        source = view[piece.offset : piece.offset + piece.end - piece.start]
        for leaf in targets.get(piece.source, ()):
            leaf.copy_in(piece.start, piece.end, source)
