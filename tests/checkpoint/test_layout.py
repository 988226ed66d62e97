"""The safetensors layout: written, parsed, cut into chunks and reads; judged by the library."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.checkpoint.dtypes import ELEMENT_TYPES
from tectonic_client.checkpoint.layout import (
    HEADER,
    Layout,
    Piece,
    Shaped,
    header_length,
    lay_out,
    parse_header,
    plan_chunks,
    plan_reads,
)
from tectonic_client.checkpoint.state import flatten
from tectonic_client.errors import CheckpointError, CorruptCheckpoint
from tests.checkpoint.samples import arrays, serialised, tensors

WHOLE_BYTES = [code for code, element in ELEMENT_TYPES.items() if element.bits % 8 == 0]

shaped_lists = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
        st.sampled_from(WHOLE_BYTES),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ).map(lambda fields: Shaped(*fields)),
    max_size=12,
    unique_by=lambda tensor: tensor.name,
)
metadata_maps = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)


def file_of(state: Any, metadata: dict[str, str] | None = None) -> tuple[Layout, bytes]:
    """The whole file of a state, made from layout and leaves."""
    flat = flatten(state)
    leaves = {leaf.name: leaf for leaf in flat.leaves}
    shaped = [Shaped(leaf.name, leaf.dtype, leaf.shape) for leaf in flat.leaves]
    layout, header = lay_out(shaped, metadata or {})
    data = bytearray(layout.file_bytes)
    data[: len(header)] = header
    for tensor in layout.tensors:
        start = layout.header_bytes + tensor.start
        leaf = leaves[tensor.name]
        leaf.copy_out(0, leaf.nbytes, memoryview(data)[start : start + leaf.nbytes])
    return layout, bytes(data)


# --- the format -------------------------------------------------------------------------------


def test_the_library_reads_torch_tensors(tmp_path: Path) -> None:
    """safetensors.torch reads every dtype and layout that we write, bit for bit, with metadata."""
    state = {name: t for name, t in tensors().items() if "e8m0" not in name}
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(state, {"k": "wörld"})[1])
    back = safetensors.torch.load_file(path)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert serialised(back[name]) == serialised(tensor)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"k": "wörld"}


def test_the_library_reads_numpy_arrays() -> None:
    """safetensors.numpy reads our arrays, strided, big-endian and empty ones included."""
    state = {name: a for name, a in arrays().items() if not name.startswith(("bfloat", "float8"))}
    back = safetensors.numpy.load(file_of(state)[1])
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


def test_the_library_reads_one_slice(tmp_path: Path) -> None:
    """A slice read by the library through our offsets is the tensor's."""
    tensor = torch.randn(64, 33)
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"a": torch.ones(3, dtype=torch.float64), "w": tensor})[1])
    with safetensors.safe_open(path, "pt") as file:
        assert torch.equal(file.get_slice("w")[10:20, 5:9], tensor[10:20, 5:9])


def test_we_parse_what_the_library_writes() -> None:
    """Files of the safetensors library parse to the same tensors and offsets of their data."""
    state = {k: t.contiguous().clone() for k, t in tensors().items() if "e8m0" not in k}
    data = safetensors.torch.save(state, {"who": "them"})
    layout = parse_header(data[: header_length(data, len(data))], len(data))
    assert layout.metadata == {"who": "them"}
    assert {tensor.name: tensor.shape for tensor in layout.tensors} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    for tensor in layout.tensors:
        start = layout.header_bytes + tensor.start
        end = layout.header_bytes + tensor.end
        assert data[start:end] == serialised(state[tensor.name])


@given(shaped_lists, metadata_maps)
def test_written_headers_parse_back(shaped: list[Shaped], metadata: dict[str, str]) -> None:
    """Parsing a header gives the layout it was written from; data and elements are aligned."""
    layout, header = lay_out(shaped, metadata)
    assert parse_header(header, layout.file_bytes) == layout
    assert layout.header_bytes % 4096 == 0
    for tensor in layout.tensors:
        assert tensor.start * 8 % ELEMENT_TYPES[tensor.dtype].bits == 0
    order = {tensor.name: number for number, tensor in enumerate(shaped)}
    bits = [ELEMENT_TYPES[tensor.dtype].bits for tensor in layout.tensors]
    numbers = [order[tensor.name] for tensor in layout.tensors]
    assert list(zip(bits, numbers, strict=True)) == sorted(
        zip(bits, numbers, strict=True), key=lambda pair: (-pair[0], pair[1])
    )


@given(shaped_lists)
def test_the_library_accepts_every_header(shaped: list[Shaped]) -> None:
    """The library finds our headers valid, whatever the names and shapes."""
    layout, header = lay_out(shaped, {})
    whole = header + bytes(layout.data_bytes)
    found = safetensors.deserialize(whole)  # type: ignore[no-untyped-call]
    assert sorted(name for name, _ in found) == sorted(tensor.name for tensor in layout.tensors)


def test_a_huge_header_is_refused_before_it_is_written() -> None:
    """Structure beyond what readers accept is a clear error at save."""
    with pytest.raises(CheckpointError, match="keep large data in arrays"):
        lay_out([], {"tree": "x" * 100_000_000})


# --- hostile files ----------------------------------------------------------------------------


def framed(text: bytes, data: int = 0) -> tuple[bytes, int]:
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


HOSTILE: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "cut": (b"\x00" * 7, 7),
    "huge length": (struct.pack("<Q", 1 << 63), 1 << 62),
    "length beyond the limit": (struct.pack("<Q", 100_000_001), 1 << 40),
    "length beyond the file": (struct.pack("<Q", 100), 50),
    "not all there": (struct.pack("<Q", 100) + b"{}", 1000),
    "no JSON": framed(b"{"),
    "leading space": framed(b" {}"),
    "list": framed(b"[]"),
    "not UTF-8": framed(b'{"\xff":1}'),
    "deep": framed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "digits": framed(b'{"a":' + b"9" * 100_000 + b"}"),
    "entry": framed(b'{"a":1}'),
    "duplicate": framed(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), 8),
    "metadata": framed(b'{"__metadata__":{"a":1}}'),
    "metadata list": framed(b'{"__metadata__":[]}'),
    "nested duplicate": framed(b'{"a":{"dtype":"F32","dtype":"F32"}}'),
    "trailing data": framed(b"{}", 1),
} | {
    name: framed(json.dumps({"a": changed}).encode(), 8)
    for name, changed in {
        "missing field": {"dtype": "F32", "shape": [2]},
        "extra field": entry(more=1),
        "dtype": entry(dtype="F33"),
        "dtype list": entry(dtype=["F32"]),
        "negative": entry(shape=[-2]),
        "bool": entry(shape=[True, 2]),
        "float": entry(shape=[2.0]),
        "shape": entry(shape=[3]),
        "overflow": entry(shape=[1 << 62, 1 << 62, 1 << 62]),
        "dimensions": entry(shape=[1] * 65 + [2]),
        "shape text": entry(shape="2"),
        "offsets": entry(data_offsets=[0]),
        "reversed": entry(data_offsets=[8, 0]),
        "beyond": entry(shape=[3], data_offsets=[0, 12]),
        "hole": entry(shape=[1], data_offsets=[4, 8]),
        "short": entry(shape=[1], data_offsets=[0, 4]),
        "odd bits": entry(dtype="F4", shape=[1], data_offsets=[0, 1]),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str) -> None:
    """Each way to lie in a header is CorruptCheckpoint in one line, without reading far."""
    data, file_bytes = HOSTILE[name]
    with pytest.raises(CorruptCheckpoint) as caught:
        parse_header(data, file_bytes)
    assert "\n" not in str(caught.value)


def test_overlaps_are_refused() -> None:
    """Two tensors may not share bytes."""
    entries = {"a": entry(), "b": entry(data_offsets=[4, 12])}
    with pytest.raises(CorruptCheckpoint, match="'b' begins at 4, the data before it ends at 8"):
        parse_header(*framed(json.dumps(entries).encode(), 12))


@given(shaped_lists, st.data())
def test_damaged_headers(shaped: list[Shaped], data: st.DataObject) -> None:
    """A damaged header parses to something consistent or is CorruptCheckpoint, nothing else."""
    layout, header = lay_out(shaped, {"k": "v"})
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpoint):
        parsed = parse_header(bytes(damaged), layout.file_bytes)
        assert parsed.file_bytes == layout.file_bytes


# --- plans ------------------------------------------------------------------------------------


def read_pieces(layout: Layout, header: bytes, whole: bytes, pieces: Iterable[Piece]) -> bytes:
    """What the pieces say, laid end to end; each must begin where the one before it ended."""
    found = b""
    for piece in pieces:
        assert piece.offset == len(found)
        assert piece.start < piece.end
        base = 0 if piece.source == HEADER else (
            layout.header_bytes + layout.tensors[piece.source].start
        )  # fmt: skip
        source = header if piece.source == HEADER else whole
        found += source[base + piece.start : base + piece.end]
    return found


@given(shaped_lists, st.integers(1, 6), st.integers(512, 4096), st.binary(min_size=1))
def test_chunks_cover_the_file(
    shaped: list[Shaped], chunks_per_block: int, chunk_bytes: int, noise: bytes
) -> None:
    """Chunk plans, in order, are the file: blocks and chunks full but the last, pieces gapless."""
    layout, header = lay_out(shaped, {})
    whole = header + (noise * (layout.data_bytes // len(noise) + 1))[: layout.data_bytes]
    block_bytes = chunks_per_block * chunk_bytes
    plans = plan_chunks(layout, block_bytes, chunk_bytes)
    for plan in plans:
        place = plan.block * block_bytes + plan.chunk * chunk_bytes
        assert plan.file_offset == place
        assert plan.length == min(chunk_bytes, layout.file_bytes - place)
        data = read_pieces(layout, header, whole, plan.pieces)
        assert data == whole[place : place + plan.length]
    assert sum(plan.length for plan in plans) == layout.file_bytes


def test_blocks_that_are_no_multiple_of_chunks() -> None:
    """The last chunk of each block is short where the block size demands it."""
    layout, _ = lay_out([Shaped("x", "U8", (20_000,))], {})
    plans = plan_chunks(layout, 10_000, 4_096)
    assert [(p.block, p.chunk, p.length) for p in plans] == [
        (0, 0, 4096), (0, 1, 4096), (0, 2, 1808), (1, 0, 4096), (1, 1, 4096), (1, 2, 1808),
        (2, 0, 4096),
    ]  # fmt: skip


def test_a_file_without_data_is_one_chunk() -> None:
    """A state of scalars only still has a file: its header."""
    layout, header = lay_out([Shaped("e", "F32", (0,))], {})
    (plan,) = plan_chunks(layout, 1 << 20, 1 << 16)
    assert plan.pieces == (Piece(HEADER, 0, len(header), 0),)


@given(shaped_lists, st.data())
def test_reads_bring_exactly_what_is_wanted(shaped: list[Shaped], data: st.DataObject) -> None:
    """Every wanted byte is read once and nothing else handed out; no read crosses a border,
    begins or ends in a gap, or skips less than the gap that is worth a read of its own."""
    layout, header = lay_out(shaped, {})
    whole = header + bytes(range(256)) * (layout.data_bytes // 256 + 1)
    count = len(layout.tensors)
    wanted = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    borders = data.draw(st.lists(st.integers(0, layout.file_bytes), max_size=8))
    gap_bytes = data.draw(st.sampled_from((0, 8, 100, 10_000)))
    found = {
        index: bytearray(b"\xee" * (t.end - t.start)) for index, t in enumerate(layout.tensors)
    }
    seen = dict.fromkeys(wanted, 0)
    plans = plan_reads(layout, wanted, borders, gap_bytes=gap_bytes)
    for plan in plans:
        buffer = whole[plan.file_offset : plan.file_offset + plan.length]
        assert not any(
            plan.file_offset < border < plan.file_offset + plan.length for border in borders
        )
        assert plan.pieces[0].offset == 0
        last = plan.pieces[-1]
        assert last.offset + last.end - last.start == plan.length
        for piece in plan.pieces:
            seen[piece.source] += piece.end - piece.start
            bytes_read = buffer[piece.offset : piece.offset + piece.end - piece.start]
            found[piece.source][piece.start : piece.end] = bytes_read
    for index in wanted:
        tensor = layout.tensors[index]
        start, end = layout.header_bytes + tensor.start, layout.header_bytes + tensor.end
        assert seen[index] == tensor.end - tensor.start
        assert found[index] == whole[start:end]
    ends = [(plan.file_offset, plan.file_offset + plan.length) for plan in plans]
    for (_, end), (start, _) in pairwise(ends):
        assert start >= end
        between = any(end <= border <= start for border in borders)
        assert between or start - end > gap_bytes


def test_reading_everything_takes_one_read_per_chunk() -> None:
    """A whole load reads each chunk once, from its first to its last wanted byte."""
    layout, _ = lay_out([Shaped(f"t{i}", "F32", (1000,)) for i in range(50)], {})
    borders = range(0, layout.file_bytes, 65_536)
    plans = plan_reads(layout, range(50), borders, gap_bytes=0)
    assert [plan.file_offset for plan in plans] == [4096, *borders[1:]]
    assert sum(plan.length for plan in plans) == layout.data_bytes
