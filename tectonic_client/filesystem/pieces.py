"""Chunk by chunk, where the bytes of an open file lie. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tectonic_client.extents import Extent
from tectonic_client.filesystem.openinode import OpenInode
from tectonic_client.limits import CHECKSUM_UNIT_BYTES, COMPACT_MIN_EXTENTS


class Piece(NamedTuple):
    """A run of file bytes inside one chunk; `pending` while its block is not published."""

    file_offset: int
    length: int
    block_id: int
    chunk: int
    chunk_offset: int
    pending: bool

    @property
    def is_small(self) -> bool:
        """Whether it is not worth to load its whole chunk: the rest may lie anywhere in the file,
        or be overwritten."""
        return self.length < CHECKSUM_UNIT_BYTES


def is_scattered(extents: int, size: int, chunk_bytes: int) -> bool:
    """Whether a file of so many extents may have stretches that are worth compacting."""
    return extents >= COMPACT_MIN_EXTENTS + size // chunk_bytes


def pieces_between(state: OpenInode, chunk_bytes: int, start: int, end: int) -> Iterator[Piece]:
    """What the file bytes [start, end) consist of, in order; holes are left out."""
    position = start
    for extent in state.pending.lookup(start, end):
        published = state.extents.lookup(position, extent.file_offset)
        yield from _cut(published, chunk_bytes, pending=False)
        yield from _cut((extent,), chunk_bytes, pending=True)
        position = extent.file_offset + extent.length
    yield from _cut(state.extents.lookup(position, end), chunk_bytes, pending=False)


def _cut(extents: Iterable[Extent], chunk_bytes: int, *, pending: bool) -> Iterator[Piece]:
    for extent in extents:
        done = 0
        while done < extent.length:
            index, within = divmod(extent.block_offset + done, chunk_bytes)
            count = min(extent.length - done, chunk_bytes - within)
            yield Piece(extent.file_offset + done, count, extent.block_id, index, within, pending)
            done += count
