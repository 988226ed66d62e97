"""The port of a chunk store: one failure domain that keeps immutable chunks.

A chunk is put whole, read in ranges, never changed, deleted once. A store knows nothing of what is
inside; headers and checksums are made and checked above it (`records.ChunkHeader`,
`blocks.reader`). Calls block and are made from a few threads at once; every method is safe to call
concurrently, also from several processes.

Order of calls: put -> get*/head* -> delete. Block ids are never used twice, so a key that was
deleted is never put again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ChunkKey(NamedTuple):
    """Names a chunk: the block's id and the chunk's number in it."""

    block_id: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.block_id:016x}.{self.chunk:04x}"


class ChunkInfo(NamedTuple):
    """One listed chunk; `size_bytes` as the store holds it (a torn put may be short)."""

    key: ChunkKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Space of a store in bytes. A store without a limit reports what its provider reports.

    `device` says which device the space is on, where that can be told: stores on one share it.
    """

    total_bytes: int
    free_bytes: int
    device: int | None = None


class ChunkStore(Protocol):
    """One store of a volume."""

    name: str
    """How messages call it: its URL without credentials."""

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        """Store the concatenation of `parts` under `key`, durable (power loss) on return.

        Each part is aligned to ALIGNMENT_BYTES in address and length (the last may be padded by
        the caller with zeros); `blocks.buffers` gives such memory. On any error the chunk is
        not there afterwards, or only as a torn leftover that no metadata names.

        Raises Exists (the key is taken; the old chunk is untouched), NoSpace, ReadOnly,
        StoreUnavailable.
        """

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        """Read from `offset` into `target`; returns the bytes read, fewer only at the chunk's end.

        `offset`, the address and the length of `target` are multiples of ALIGNMENT_BYTES.
        Raises ChunkMissing, StoreUnavailable.
        """

    def head(self, key: ChunkKey) -> int:
        """Size in bytes as stored. Raises ChunkMissing, StoreUnavailable."""

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        """Remove chunks; those that are not there are fine. Raises ReadOnly, StoreUnavailable."""

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        """Chunks with first_block_id <= block id < end_block_id, ordered by key.

        Chunks put or deleted meanwhile may or may not appear. Raises StoreUnavailable.
        """

    def usage(self) -> StoreUsage:
        """Total and free space. Raises StoreUnavailable."""

    def close(self) -> None:
        """Release descriptors; idempotent."""
