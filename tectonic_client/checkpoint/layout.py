"""Where the bytes of a checkpoint file are: the safetensors format, and cutting it into chunks.

A file is `header length u64 little-endian | header JSON | data`. The header maps each tensor's name
to its dtype, shape and [start, end) in the data, and `__metadata__` to a map of strings. The data
has no holes and no overlaps (format description of the safetensors project, "Format").

What we write is padded with spaces (which the format allows behind the JSON) until the data begins
at a multiple of ALIGNMENT_BYTES, and its tensors are ordered by element size, large first, then as
in the state. So every tensor begins at a multiple of its element size: readers can map the file,
and no chunk border falls inside an element; the tensors of a layer stay close together.

Pure: plans from frozen values; parsing trusts nothing.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

from tectonic_client.checkpoint.dtypes import ELEMENT_TYPES
from tectonic_client.errors import CheckpointError, CorruptCheckpoint
from tectonic_client.limits import (
    ALIGNMENT_BYTES,
    MAX_CHECKPOINT_HEADER_BYTES,
    MAX_TENSOR_DIMENSIONS,
)

METADATA_KEY: Final = "__metadata__"
TREE_KEY: Final = "tectonicfs.tree"
LENGTH_BYTES: Final = 8
HEADER: Final = -1
"""In a piece: the bytes come from the header, not from a tensor."""

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file; bytes [start, end) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A file: `header_bytes` of header (length field included), then tensors in order of offset."""

    header_bytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        """Length of the data section."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.header_bytes + self.data_bytes

    def by_name(self) -> dict[str, TensorInfo]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}


class Shaped(NamedTuple):
    """What a tensor is, before it has a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def lay_out(tensors: Iterable[Shaped], metadata: Mapping[str, str]) -> tuple[Layout, bytes]:
    """Layout and header bytes (length field included) of a new file.

    Raises CheckpointError where the header would be larger than readers accept.
    """
    placed = tuple(_place(sorted(tensors, key=_element_bits, reverse=True)))
    header = _header(placed, metadata)
    return Layout(len(header), placed, metadata), header


def _element_bits(tensor: Shaped) -> int:
    return ELEMENT_TYPES[tensor.dtype].bits


def _place(tensors: Iterable[Shaped]) -> Iterator[TensorInfo]:
    position = 0
    for tensor in tensors:
        end = position + prod(tensor.shape) * _element_bits(tensor) // 8
        yield TensorInfo(tensor.name, tensor.dtype, tensor.shape, position, end)
        position = end


def _header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.end),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header_bytes = _round_up(LENGTH_BYTES + len(text), ALIGNMENT_BYTES)
    if header_bytes - LENGTH_BYTES > MAX_CHECKPOINT_HEADER_BYTES:
        raise CheckpointError(
            f"names, structure and scalars of the state take {len(text)} bytes, at most"
            f" {MAX_CHECKPOINT_HEADER_BYTES} are allowed: keep large data in arrays"
        )
    return _LENGTH.pack(header_bytes - LENGTH_BYTES) + text.ljust(header_bytes - LENGTH_BYTES)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# --- parsing ----------------------------------------------------------------------------------


def header_length(start: bytes | memoryview, file_bytes: int) -> int:
    """Length of the header, its length field included, from the first 8 bytes of a file.

    Raises CorruptCheckpoint where that is impossible, so that nothing large is read in vain.
    """
    if file_bytes < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise CorruptCheckpoint(f"a file of {file_bytes} bytes is too short for safetensors")
    (length,) = _LENGTH.unpack_from(start)
    if length > MAX_CHECKPOINT_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
        raise CorruptCheckpoint(
            f"safetensors header of {length} bytes announced in a file of {file_bytes} bytes"
        )
    return LENGTH_BYTES + int(length)


def parse_header(header: bytes | memoryview, file_bytes: int) -> Layout:
    """Layout of a file of `file_bytes` from its header (length field included).

    Raises CorruptCheckpoint unless the header is exactly what the format allows: tensors of known
    dtypes whose shapes, offsets and the file's length agree, without holes and overlaps.
    """
    length = header_length(header, file_bytes)
    if len(header) < length:
        raise CorruptCheckpoint(f"{len(header)} of {length} bytes of the header are there")
    try:
        entries = _parse_json(bytes(header[LENGTH_BYTES:length]))
        metadata = _metadata(entries.pop(METADATA_KEY, {}))
        parsed = [_tensor(name, entry) for name, entry in entries.items()]
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"safetensors header: {error}") from error
    tensors = tuple(sorted(parsed, key=lambda tensor: (tensor.start, tensor.end)))
    _check_coverage(tensors, file_bytes - length)
    return Layout(length, tensors, metadata)


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("does not begin with {")
    entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    assert isinstance(entries, dict)  # it begins with {
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("the same name appears twice")
    return entries


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("metadata is not a map of strings")
    return value


def _tensor(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"entry of {name!r} is not dtype, shape and data_offsets")
    dtype = entry["dtype"]
    element = ELEMENT_TYPES.get(dtype) if isinstance(dtype, str) else None
    if element is None:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    shape = _sizes(name, entry["shape"])
    offsets = _sizes(name, entry["data_offsets"])
    if len(shape) > MAX_TENSOR_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"{name!r} has {len(shape)} dimensions and {len(offsets)} offsets")
    start, end = offsets
    if (end - start) * 8 != prod(shape) * element.bits:
        raise ValueError(f"{name!r}: offsets {start} to {end} do not fit shape {shape} of {dtype}")
    return TensorInfo(name, element.code, shape, start, end)


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{name!r} has sizes that are not a list of non-negative integers")
    return tuple(value)


def _check_coverage(tensors: Sequence[TensorInfo], data_bytes: int) -> None:
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            raise CorruptCheckpoint(
                f"safetensors header: {tensor.name!r} begins at {tensor.start}, the data before it"
                f" ends at {position}"
            )
        position = tensor.end
    if position != data_bytes:
        raise CorruptCheckpoint(
            f"safetensors header describes {position} bytes of data, the file has {data_bytes}"
        )


# --- writing in chunks ------------------------------------------------------------------------


class Piece(NamedTuple):
    """Bytes [start, end) of tensor `source` (an index into the layout, or HEADER), found
    at `offset` of the chunk or read that the piece belongs to."""

    source: int
    start: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Bytes [file_offset, file_offset + length) of a file: chunk `chunk` of its block `block`."""

    block: int
    chunk: int
    file_offset: int
    length: int
    pieces: tuple[Piece, ...]


def plan_chunks(layout: Layout, block_bytes: int, chunk_bytes: int) -> list[ChunkPlan]:
    """Cut a file into blocks of `block_bytes`, and these into chunks of `chunk_bytes`."""
    find = _Finder(layout)
    plans = []
    for block_start in range(0, layout.file_bytes, block_bytes):
        block_end = min(block_start + block_bytes, layout.file_bytes)
        for start in range(block_start, block_end, chunk_bytes):
            end = min(start + chunk_bytes, block_end)
            place = (block_start // block_bytes, (start - block_start) // chunk_bytes)
            plans.append(ChunkPlan(*place, start, end - start, tuple(find.pieces(start, end))))
    return plans


class _Finder:
    """Finds what a range of a file consists of."""

    def __init__(self, layout: Layout) -> None:
        sizes = (tensor.end - tensor.start for tensor in layout.tensors)
        filled = [(index, size) for index, size in enumerate(sizes) if size]
        self._sources = [HEADER, *(index for index, _ in filled)]
        self._starts = [0]
        for length in (layout.header_bytes, *(size for _, size in filled)):
            self._starts.append(self._starts[-1] + length)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces of file bytes [start, end), in order and without gaps."""
        position, index = start, bisect_right(self._starts, start) - 1
        while position < end:
            base, stop = self._starts[index], min(end, self._starts[index + 1])
            yield Piece(self._sources[index], position - base, stop - base, position - start)
            position, index = stop, index + 1


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Read file bytes [file_offset, file_offset + length) and hand the pieces to their tensors.

    Bytes that belong to no piece were not asked for: reading on was cheaper than stopping.
    """

    file_offset: int
    length: int
    pieces: tuple[Piece, ...]


def plan_reads(
    layout: Layout, wanted: Iterable[int], borders: Iterable[int], *, gap_bytes: int
) -> list[ReadPlan]:
    """The reads that bring the `wanted` tensors (indices into the layout), in file order.

    No read crosses one of `borders` (file offsets at which chunks begin). Wanted ranges of one
    chunk that are at most `gap_bytes` apart share a read.
    """
    chosen = set(wanted)
    cuts = sorted({0, layout.file_bytes, *borders})
    find = _Finder(layout)
    plans = []
    for start, end in _cut(_runs(layout, chosen, gap_bytes), cuts):
        pieces = tuple(piece for piece in find.pieces(start, end) if piece.source in chosen)
        if pieces:
            plans.append(_trimmed(start, pieces))
    return plans


def _runs(layout: Layout, wanted: set[int], gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal file ranges that hold wanted tensors without a gap above `gap_bytes`."""
    base = layout.header_bytes
    run: tuple[int, int] | None = None
    for index in sorted(wanted):
        start, end = base + layout.tensors[index].start, base + layout.tensors[index].end
        if run is not None and start - run[1] <= gap_bytes:
            run = (run[0], end)
            continue
        if run is not None:
            yield run
        run = (start, end)
    if run is not None:
        yield run


def _cut(runs: Iterable[tuple[int, int]], cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut each run at every cut inside it."""
    for start, end in runs:
        inner = cuts[bisect_right(cuts, start) : bisect_right(cuts, end - 1)]
        yield from ((low, high) for low, high in pairwise((start, *inner, end)) if low < high)


def _trimmed(start: int, pieces: tuple[Piece, ...]) -> ReadPlan:
    """A read from the first piece to the last: a gap that a border cut off is not read."""
    shift = pieces[0].offset
    length = pieces[-1].offset + pieces[-1].end - pieces[-1].start - shift
    moved = tuple(piece._replace(offset=piece.offset - shift) for piece in pieces)
    return ReadPlan(start + shift, length, moved)
