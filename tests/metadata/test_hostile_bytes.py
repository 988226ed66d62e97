"""Whatever bytes metadata and stores hold: a decoder gives a value or says what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tectonic_client.checkpoint import keys as checkpoint_keys
from tectonic_client.checkpoint import records as checkpoint_records
from tectonic_client.checkpoint.index import parse_index
from tectonic_client.checkpoint.layout import parse_header
from tectonic_client.checkpoint.tree import decode_tree
from tectonic_client.chunkstore.marker import StoreMarker
from tectonic_client.encoding.chunk import ChunkHeader
from tectonic_client.encoding.compression import read_seek_table, seek_table_bytes
from tectonic_client.errors import (
    CorruptCheckpoint,
    CorruptChunk,
    CorruptRecord,
    FormatTooNew,
    StoreMismatch,
)
from tectonic_client.metadata import keys
from tectonic_client.records import ExtentRecord, Record
from tests.golden.samples import CHUNK_HEADERS, RECORDS, encoded_header, with_field

SAMPLES = [
    *RECORDS.values(),
    checkpoint_records.MemberRecord(1, 2, 3, 4, 5, 6, 7, 8, "host"),
    checkpoint_records.AttemptRecord(
        1, 2, 3, 4, 5, 6, 7, "run/1", "host",
        checkpoint_records.Verdict(checkpoint_records.Outcome.RANKS_MISSING, "died", (3, 65_535)),
    ),
    checkpoint_records.PartRecord(1, 2, 3, 4, 5, 6),
    checkpoint_records.ObjectionRecord(
        checkpoint_records.ObjectionKind.ELSEWHERE, 101, 8, "host", "text"
    ),
]  # fmt: skip
EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def sealed(kind: int, version: int, body: bytes) -> bytes:
    """A record of any body, with the right checksum."""
    data = bytes((kind, version)) + body
    return data + crc32c(data).to_bytes(4, "little")


def bodies(sample: Record) -> st.SearchStrategy[bytes]:
    """Any bytes, and the sample's body with some of its bytes replaced, more or fewer of them."""
    body = sample.encode()[2:-4]
    numbers = st.sampled_from(EXTREMES).map(lambda number: struct.pack("<Q", number))
    place, patch = st.integers(0, len(body)), st.one_of(st.binary(max_size=9), numbers)
    replaced = st.builds(lambda at, new: body[:at] + new + body[at + len(new) :], place, patch)
    spliced = st.builds(lambda at, new, to: body[:at] + new + body[to:], place, patch, place)
    return st.one_of(st.binary(max_size=80), replaced, spliced)


@settings(max_examples=1000)
@given(st.data())
def test_a_record_of_any_body_is_a_value_or_corrupt(data: st.DataObject) -> None:
    """A right checksum over any body gives a record that is those bytes again, or CorruptRecord."""
    sample = data.draw(st.sampled_from(SAMPLES))
    version = data.draw(st.sampled_from([1, 1, 1, 0, 2, 255]))
    row = sealed(sample.KIND, version, data.draw(bodies(sample)))
    try:
        record = type(sample).decode(row)
    except (CorruptRecord, FormatTooNew):
        return
    assert record.encode()[2:-4] == row[2:-4]


@given(st.sampled_from(SAMPLES), st.binary(max_size=100))
def test_any_bytes_are_a_record_or_corrupt(sample: Record, row: bytes) -> None:
    """Bytes that nobody wrote are refused by every record's decoder."""
    with pytest.raises(CorruptRecord):
        type(sample).decode(row)
    with pytest.raises(CorruptRecord):
        ExtentRecord.fields(row)


# --- keys -------------------------------------------------------------------------------------

ID = st.integers(0, 2**64 - 1)
GROUP = st.builds(keys.group, st.sampled_from([keys.FILE, keys.DEAD_BLOCK]), ID)
PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "entry": (keys.parse_entry, keys.entry(7, b"name")),
    "xattr": (keys.parse_xattr, keys.xattr(7, b"user.name")),
    "extent": (keys.parse_extent, keys.extent(7, 4096)),
    "block owner": (keys.parse_block_owner, keys.block_owner(7, 9)),
    "group": (keys.parse_group, keys.quota(7)),
    "id": (keys.parse_id, keys.dead_block(7)),
    "lease": (keys.parse_lease, keys.lease(7)),
    "change": (keys.parse_change, keys.change(7, 9)),
    "attempt": (checkpoint_keys.parse_attempt, checkpoint_keys.attempt(7, 100)),
    "rank": (checkpoint_keys.parse_rank, checkpoint_keys.part(7, 9, 3)),
}


@settings(max_examples=300)
@given(
    st.sampled_from(list(PARSERS)), st.binary(max_size=40), st.integers(0, 40),
    st.binary(max_size=9),
)  # fmt: skip
def test_any_key_is_parsed_or_corrupt(name: str, key: bytes, cut: int, more: bytes) -> None:
    """Keys that are too short, too long or anything else give a value or CorruptRecord."""
    parse, right = PARSERS[name]
    parse(right)
    for candidate in (key, right[:cut], right + more, right[:cut] + more):
        with suppress(CorruptRecord):
            parse(candidate)


@given(GROUP, st.binary(min_size=1, max_size=9), st.integers(1, 0xFFFF))
def test_what_leads_to_another_key_is_refused(group: bytes, more: bytes, flip: int) -> None:
    """A key that the id in it does not lead back to is CorruptRecord: deleting it by that id would
    delete nothing, again and again."""
    assert keys.parse_id(group) == keys.parse_group(group + more)
    wrong_hash = group[:1] + (int.from_bytes(group[1:3]) ^ flip).to_bytes(2) + group[3:]
    for key in (wrong_hash, group + more):
        with pytest.raises(CorruptRecord):
            keys.parse_id(key)
    with pytest.raises(CorruptRecord):
        keys.parse_group(wrong_hash + more)


@given(ID, st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_an_entry_lies_where_its_name_leads(directory: int, name: bytes, wrong: int) -> None:
    """An entry's key is parsed only if looking its name up finds it."""
    key = keys.entry(directory, name)
    assert keys.parse_entry(key) == (keys.name_hash(name), name)
    if wrong != keys.name_hash(name):
        with pytest.raises(CorruptRecord):
            keys.parse_entry(keys.group(keys.NAME, directory) + wrong.to_bytes(8) + name)


@given(ID)
@example(keys.MAX_LEASE)
@example(keys.MAX_LEASE + 1)
def test_the_ids_of_a_lease_fit_a_key(number: int) -> None:
    """A lease whose ids would be too large for a key is CorruptRecord."""
    try:
        assert keys.parse_lease(keys.lease(number)) == number
    except CorruptRecord:
        assert number > keys.MAX_LEASE
    else:
        keys.block((number + 1) * 4096)


# --- chunks, markers, checkpoints -------------------------------------------------------------


@given(st.binary(max_size=100), st.integers(0, 4095), st.binary(max_size=9))
def test_any_bytes_are_a_chunk_header_or_corrupt(data: bytes, at: int, patch: bytes) -> None:
    """Any bytes, or a valid header with any bytes in it under a right checksum."""
    page = encoded_header(CHUNK_HEADERS["plain"])
    for candidate in (data, data.ljust(4096, b"\0"), with_field(page, at, patch)[:4096]):
        try:
            header = ChunkHeader.decode(memoryview(candidate))
        except (CorruptChunk, FormatTooNew):
            continue
        assert len(header.checksums) == 4 * -(-header.payload_bytes // 65536)


@given(st.binary(max_size=60), st.integers(0, 2**32), st.integers(1, 2**25))
def test_any_bytes_are_a_seek_table_or_corrupt(table: bytes, payload: int, content: int) -> None:
    """Any bytes of the right length, or not, where a seek table should be are CorruptChunk."""
    for candidate in (table, table.ljust(seek_table_bytes(content), b"\0")):
        with pytest.raises(CorruptChunk):
            read_seek_table(memoryview(candidate), payload, content)


@given(st.binary(max_size=60), st.integers(0, 35), st.binary(max_size=4))
def test_any_bytes_are_a_marker_or_a_mismatch(data: bytes, at: int, patch: bytes) -> None:
    """Any bytes in a store's marker are that marker, StoreMismatch or FormatTooNew."""
    marker = StoreMarker(bytes(16), 3)
    valid = marker.encode()
    for candidate in (data, valid[:at], valid[:at] + patch + valid[at + len(patch) :]):
        try:
            assert StoreMarker.decode(candidate, "/store") == marker
        except (StoreMismatch, FormatTooNew):
            continue


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["version", "root", "dict", "list", "array", "int", "float", "numpy",
                         "complex", "bytes", "ranks", "world_size", "dtype", "shape",
                         "data_offsets", "__metadata__"]) | st.text(max_size=3),
        inner, max_size=3,
    ),
)  # fmt: skip


@given(JSON, st.binary(max_size=60))
@example({"version": 1, "root": {"dict": [1]}}, b"[" * 100_000)
@example({"version": 1, "root": {"numpy": [["F32"], "00"]}}, b"9" * 5000)
def test_any_text_is_a_checkpoint_file_or_corrupt(value: object, data: bytes) -> None:
    """Any bytes or JSON as index, header or tree are a value, CorruptCheckpoint or too new."""
    text = json.dumps(value)
    for candidate in (data, text.encode()):
        header = len(candidate).to_bytes(8, "little") + candidate
        for parse in (
            lambda: parse_index(candidate),  # noqa: B023 - called at once
            lambda: parse_header(header, len(header)),  # noqa: B023 - called at once
            lambda: decode_tree(candidate.decode("utf-8", "replace")),  # noqa: B023 - as well
        ):
            try:
                parse()
            except (CorruptCheckpoint, FormatTooNew):
                continue
