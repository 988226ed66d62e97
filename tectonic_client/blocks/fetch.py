"""Fetching of chunk ranges: the part of a read that runs in a worker thread.

Reads the checksum units that a range touches, compares each with the checksum in the chunk's
header, and the header with the block's record. Headers are kept (bounded), with the seek table of a
compressed chunk; a read from a chunk's start brings its header along. Waits for stores, not for
memory: that is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from tectonic_client.blocks.buffers import header_page
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.encoding.checksum import first_bad_unit
from tectonic_client.encoding.chunk import ChunkHeader, padded
from tectonic_client.encoding.compression import (
    decompress,
    read_seek_table,
    seek_table_bytes,
    touched,
    touched_bound,
)
from tectonic_client.errors import (
    ChunkMissing,
    CorruptChunk,
    CorruptRecord,
    FormatTooNew,
    StoreUnavailable,
)
from tectonic_client.limits import (
    CHECKSUM_UNIT_BYTES,
    CHUNK_HEADER_BYTES,
    MAX_CACHED_CHUNK_HEADERS,
)
from tectonic_client.records import BlockRecord


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Content bytes [start, end) of one chunk, and who asks (for messages)."""

    key: ChunkKey
    record: BlockRecord
    start: int
    end: int
    context: str

    def check(self) -> None:
        """Raise CorruptRecord where the block's record cannot be followed for this range."""
        if not 0 <= self.key.chunk < len(self.record.places):
            problem = f"its record names {len(self.record.places)} chunks"
        elif not 0 <= self.start < self.end <= self.content_bytes:
            problem = f"bytes {self.start} to {self.end} of {self.content_bytes} are asked for"
        elif not 0 < self.stored_bytes <= self.content_bytes:
            problem = f"its record names {self.stored_bytes} bytes for {self.content_bytes}"
        else:
            return
        raise CorruptRecord(f"{self}: {problem}")

    def __str__(self) -> str:
        where = f"block {self.key.block_id:016x} chunk {self.key.chunk}"
        return f"{self.context}: {where}" if self.context else where

    @property
    def content_bytes(self) -> int:
        """Content of the whole chunk."""
        begin = self.key.chunk * self.record.chunk_bytes
        return min(self.record.chunk_bytes, self.record.length - begin)

    @property
    def stored_bytes(self) -> int:
        """Payload of the whole chunk."""
        return self.record.places[self.key.chunk].stored_bytes

    @property
    def compressed(self) -> bool:
        """Whether payload and content differ; the header must agree."""
        return self.stored_bytes != self.content_bytes


class _Known(NamedTuple):
    """What is kept of a chunk: its header, and its seek table once that was needed."""

    header: ChunkHeader
    table: bytes


class ChunkFetcher:
    """Fetches ranges of one volume's chunks. Blocks; safe to use from any number of threads."""

    def __init__(self, volume_uuid: bytes) -> None:
        self._volume_uuid = volume_uuid
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._lock = Lock()

    # --- chunks as they are -------------------------------------------------------------------

    def plain_bytes(self, wanted: ChunkRange) -> int:
        """Memory that `fetch_plain` needs."""
        first, last = _units(wanted.start, wanted.end, wanted.stored_bytes)
        size = padded(last - first)
        with_header = size + CHUNK_HEADER_BYTES
        if first == 0 and with_header <= wanted.record.chunk_bytes:
            with self._lock:
                if wanted.key not in self._known:
                    return with_header
        return size

    def fetch_plain(self, wanted: ChunkRange, store: ChunkStore, memory: memoryview) -> memoryview:
        """The part of `memory` (of `plain_bytes`) that then holds the range, verified.

        Raises CorruptChunk, ChunkMissing, StoreUnavailable, FormatTooNew, all naming the chunk.
        """
        first, last = _units(wanted.start, wanted.end, wanted.stored_bytes)
        lead = len(memory) - padded(last - first)
        with _named(wanted, store):
            if lead:
                self._read(wanted, store, 0, memory, lead + last)
                header = self._accept(wanted, memory[:lead])
            else:
                header = self._header(wanted, store).header
                self._read(wanted, store, CHUNK_HEADER_BYTES + first, memory, last - first)
            self._verify(wanted, header, first, memory[lead : lead + last - first])
        return memory[lead + wanted.start - first : lead + wanted.end - first]

    def room(self, ranges: Sequence[ChunkRange]) -> int:
        """Memory that `fetch_plain` needs for any of these ranges, its header known or not."""
        most = max(self.plain_bytes(wanted) for wanted in ranges) + CHUNK_HEADER_BYTES
        return min(most, ranges[0].record.chunk_bytes)

    def fetch(
        self, wanted: ChunkRange, store: ChunkStore, memory: Sequence[memoryview]
    ) -> memoryview:
        """The range, verified, in `memory`: of `room`, or of a compressed chunk two pieces, of
        `compressed_bytes` and for the content. Raises as `fetch_plain`."""
        if not wanted.compressed:
            return self.fetch_plain(wanted, store, memory[0][: self.plain_bytes(wanted)])
        payload, content = memory
        view = content[: wanted.end - wanted.start]
        self.fetch_compressed(wanted, store, payload[: self.compressed_bytes(wanted)], view)
        return view

    # --- compressed chunks --------------------------------------------------------------------

    def compressed_bytes(self, wanted: ChunkRange) -> int:
        """Memory that `fetch_compressed` needs: the frames and the units that they begin in."""
        frames = touched_bound(wanted.start, wanted.end) + 2 * CHECKSUM_UNIT_BYTES
        return min(padded(wanted.stored_bytes), frames)

    def fetch_compressed(
        self, wanted: ChunkRange, store: ChunkStore, memory: memoryview, target: memoryview
    ) -> None:
        """Decompress the range into `target` by way of `memory` (of `compressed_bytes`).

        Raises CorruptChunk, ChunkMissing, StoreUnavailable, FormatTooNew, all naming the chunk.
        """
        with _named(wanted, store):
            header, table = self._header(wanted, store)
            present = wanted.stored_bytes
            if not table:
                present, table = self._fetch_table(wanted, store, header, memory)
            all_frames = read_seek_table(
                memoryview(table), wanted.stored_bytes, wanted.content_bytes
            )
            frames = touched(all_frames, wanted.start, wanted.end)
            begin, end = frames[0].start, frames[-1].start + frames[-1].stored_bytes
            if begin < present:
                present, last = _units(begin, end, wanted.stored_bytes)
                self._fetch(wanted, store, header, present, last, memory)
            decompress(frames, memory[begin - present : end - present], wanted.start, target)

    def _fetch_table(
        self, wanted: ChunkRange, store: ChunkStore, header: ChunkHeader, memory: memoryview
    ) -> tuple[int, bytes]:
        """Fetch the payload's end, or all of it if there is room: (where it begins, its table)."""
        stored_bytes, size = wanted.stored_bytes, seek_table_bytes(wanted.content_bytes)
        first = 0
        if len(memory) < stored_bytes:
            first, _ = _units(stored_bytes - size, stored_bytes, stored_bytes)
        self._fetch(wanted, store, header, first, stored_bytes, memory)
        table = bytes(memory[max(stored_bytes - first - size, 0) : stored_bytes - first])
        self._keep(wanted.key, _Known(header, table))
        return first, table

    # --- headers ------------------------------------------------------------------------------

    def _header(self, wanted: ChunkRange, store: ChunkStore) -> _Known:
        with self._lock:
            known = self._known.get(wanted.key)
            if known is not None:
                self._known.move_to_end(wanted.key)
        if known is None:
            page = header_page()
            self._read(wanted, store, 0, page, CHUNK_HEADER_BYTES)
            return _Known(self._accept(wanted, page), b"")
        _compare(wanted, known.header)
        return known

    def _accept(self, wanted: ChunkRange, page: memoryview) -> ChunkHeader:
        """The header on `page`, if it is that of the chunk; kept for the next time."""
        header = ChunkHeader.decode(page)
        header.check(self._volume_uuid, wanted.key.block_id, wanted.key.chunk)
        _compare(wanted, header)
        self._keep(wanted.key, _Known(header, b""))
        return header

    def _keep(self, key: ChunkKey, known: _Known) -> None:
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            if len(self._known) > MAX_CACHED_CHUNK_HEADERS:
                self._known.popitem(last=False)

    def _forget(self, key: ChunkKey) -> None:
        with self._lock:
            self._known.pop(key, None)

    # --- bytes --------------------------------------------------------------------------------

    def _fetch(
        self, wanted: ChunkRange, store: ChunkStore, header: ChunkHeader, first: int, last: int,
        memory: memoryview,
    ) -> None:  # fmt: skip
        """Payload bytes [first, last), `first` at a unit's begin, into `memory`, verified."""
        part = memory[: padded(last - first)]
        self._read(wanted, store, CHUNK_HEADER_BYTES + first, part, last - first)
        self._verify(wanted, header, first, part[: last - first])

    def _read(
        self, wanted: ChunkRange, store: ChunkStore, offset: int, target: memoryview, needed: int
    ) -> None:
        """Fill `target` from the stored chunk, at least `needed` bytes of it."""
        got = store.get_into(wanted.key, offset, target)
        if got < needed:
            self._forget(wanted.key)
            raise CorruptChunk(f"cut short: {got} of {needed} bytes at {offset} are there")

    def _verify(
        self, wanted: ChunkRange, header: ChunkHeader, first: int, payload: memoryview
    ) -> None:
        """Compare payload bytes, which begin with a unit at `first`, with their checksums."""
        unit = first // CHECKSUM_UNIT_BYTES
        end = -(-(first + len(payload)) // CHECKSUM_UNIT_BYTES)
        bad = first_bad_unit(payload, header.checksums[4 * unit : 4 * end])
        if bad is not None:
            self._forget(wanted.key)
            raise CorruptChunk(f"checksum of unit {unit + bad} does not match")


def _units(start: int, end: int, payload_bytes: int) -> tuple[int, int]:
    """The payload bytes [start, end) widened to whole checksum units."""
    first = start // CHECKSUM_UNIT_BYTES * CHECKSUM_UNIT_BYTES
    return first, min(-(-end // CHECKSUM_UNIT_BYTES) * CHECKSUM_UNIT_BYTES, payload_bytes)


def _compare(wanted: ChunkRange, header: ChunkHeader) -> None:
    """The header must say what the block's record says."""
    if (header.payload_bytes, header.content_bytes) != (wanted.stored_bytes, wanted.content_bytes):
        raise CorruptChunk(
            f"its header announces {header.payload_bytes} bytes for {header.content_bytes},"
            f" the block's record {wanted.stored_bytes} for {wanted.content_bytes}"
        )


@contextmanager
def _named(wanted: ChunkRange, store: ChunkStore) -> Iterator[None]:
    """Say in errors which file, block, chunk and store they are about."""
    try:
        yield
    except ChunkMissing as error:
        raise ChunkMissing(f"{wanted} is missing in {store.name}") from error
    except (CorruptChunk, StoreUnavailable, FormatTooNew) as error:
        raise type(error)(f"{wanted} in {store.name}: {error}") from error
