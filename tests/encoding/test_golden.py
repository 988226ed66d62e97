"""Persisted formats stay as they are: golden files, and damage that never goes unseen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tectonic_client import records
from tectonic_client.encoding.chunk import ChunkHeader
from tectonic_client.errors import CorruptChunk, CorruptRecord, FormatTooNew
from tectonic_client.metadata import changerecords
from tests.golden.samples import (
    CHUNK_HEADERS,
    RECORDS,
    encoded_header,
    header_file,
    record_file,
    with_field,
)


def damaged(data: bytes) -> Iterator[bytes]:
    """Every way to flip one bit, and every way to cut the end off."""
    for position in range(len(data)):
        for bit in range(8):
            copy = bytearray(data)
            copy[position] ^= 1 << bit
            yield bytes(copy)
    for length in range(len(data)):
        yield data[:length]


def test_every_record_has_a_golden_file() -> None:
    """A record that is added to the format is also pinned by a golden file."""
    kinds = {
        cls for module in (records, changerecords)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, records.Record) and cls is not records.Record
    }  # fmt: skip
    assert {type(record) for record in RECORDS.values()} == kinds
    assert len({kind.KIND for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_the_bytes_of_the_golden_file(name: str) -> None:
    """Records of version 1 are written and read byte for byte as when the version was made."""
    golden = record_file(name).read_bytes()
    assert RECORDS[name].encode() == golden
    assert type(RECORDS[name]).decode(golden) == RECORDS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_is_refused(name: str) -> None:
    """A record with any flipped bit or any end cut off is CorruptRecord."""
    kind = type(RECORDS[name])
    for data in damaged(RECORDS[name].encode()):
        with pytest.raises(CorruptRecord):
            kind.decode(data)


@pytest.mark.parametrize("name", CHUNK_HEADERS)
def test_chunk_headers_are_the_bytes_of_the_golden_file(name: str) -> None:
    """Chunk headers of version 1 are written and read byte for byte as when it was made."""
    golden = header_file(name).read_bytes()
    assert encoded_header(CHUNK_HEADERS[name]) == golden
    assert ChunkHeader.decode(memoryview(golden)) == CHUNK_HEADERS[name]


def test_a_damaged_chunk_header_is_refused() -> None:
    """A chunk header with any flipped bit or any end cut off is CorruptChunk."""
    for data in damaged(header_file("plain").read_bytes()):
        with pytest.raises(CorruptChunk):
            ChunkHeader.decode(memoryview(data))


def test_a_chunk_header_of_a_newer_version_is_refused_as_such() -> None:
    """A reader says that a chunk is too new for it, instead of calling it corrupt."""
    page = with_field(header_file("plain").read_bytes(), 8, b"\x02\x00")
    with pytest.raises(FormatTooNew, match="upgrade"):
        ChunkHeader.decode(memoryview(page))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (10, b"\x02"),  # a flag that nobody knows
        (10, b"\x01"),  # compressed, and yet as long as its content
        (12, (4096).to_bytes(4, "little")),  # another checksum unit
        (44, (1).to_bytes(4, "little")),  # payload longer than the content
        (44, (2**25 + 1).to_bytes(4, "little")),  # more content than a chunk may have
        (48, (0).to_bytes(4, "little")),  # no payload
        (48, (5).to_bytes(4, "little")),  # less payload, and yet not compressed
    ],
)
def test_a_chunk_header_that_contradicts_itself_is_refused(offset: int, value: bytes) -> None:
    """Fields that make no sense are CorruptChunk even under a matching checksum."""
    page = with_field(header_file("plain").read_bytes(), offset, value)
    with pytest.raises(CorruptChunk, match=r"announces|unknown"):
        ChunkHeader.decode(memoryview(page))
