"""Compressed payloads: round trips, ranges, the standard format, lies."""

from __future__ import annotations

import io
import random
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.encoding.compression import (
    FRAME_BYTES,
    MAX_STORED_FRAME_BYTES,
    compress,
    decompress,
    looks_compressible,
    read_seek_table,
    seek_table_bytes,
    touched,
    touched_bound,
)
from tectonic_client.errors import CorruptChunk
from tectonic_client.limits import KiB, MiB


def text(length: int) -> bytes:
    """Bytes that compress to about half."""
    piece = bytes(random.Random(1).choices(b"abcdefghijklmnop", k=100_000))
    return (piece * (length // len(piece) + 1))[:length]


def noise(length: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(2).randbytes(length)


def compressed(content: bytes, level: int = 1) -> bytes:
    """The payload of `content`."""
    target = bytearray(len(content))
    length = compress(memoryview(content), memoryview(target), level)
    assert length is not None
    return bytes(target[:length])


def read_range(payload: bytes, content_bytes: int, start: int, end: int) -> bytes:
    """Content bytes by way of the seek table and only the frames that are needed."""
    table = memoryview(payload)[-seek_table_bytes(content_bytes) :]
    frames = touched(read_seek_table(table, len(payload), content_bytes), start, end)
    first, last = frames[0].start, frames[-1].start + frames[-1].stored_bytes
    assert last - first <= touched_bound(start, end)
    target = bytearray(end - start)
    decompress(frames, memoryview(payload)[first:last], start, memoryview(target))
    return bytes(target)


CONTENT = text(2 * MiB + 300_000)
PAYLOAD = compressed(CONTENT)


@given(
    a=st.integers(0, len(CONTENT)) | st.sampled_from([0, FRAME_BYTES, 2 * FRAME_BYTES]),
    b=st.integers(0, len(CONTENT)) | st.sampled_from([FRAME_BYTES, len(CONTENT)]),
)
def test_any_range_is_read_back(a: int, b: int) -> None:
    """Every range of the content comes back from just the frames that it touches."""
    start, end = min(a, b), max(a, b)
    if start < end:
        assert read_range(PAYLOAD, len(CONTENT), start, end) == CONTENT[start:end]


@given(length=st.integers(1_000, 3 * MiB), level=st.sampled_from([1, 3, 9]))
@settings(max_examples=15)
def test_any_length_is_read_back(length: int, level: int) -> None:
    """Content of any length and level comes back whole."""
    content = CONTENT[:length] if length <= len(CONTENT) else text(length)
    payload = compressed(content, level)
    assert read_range(payload, length, 0, length) == content


def test_a_standard_decoder_reads_the_payload() -> None:
    """The payload is a plain zstd stream with content checksums, and a skippable frame behind."""
    reader = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(PAYLOAD), read_across_frames=True
    )
    assert reader.read() == CONTENT
    assert zstandard.get_frame_parameters(PAYLOAD).has_checksum


def test_the_seek_table_is_that_of_the_standard() -> None:
    """Magic numbers and entries lie where the "Zstandard Seekable Format" puts them."""
    frames = struct.unpack_from("<I", PAYLOAD, len(PAYLOAD) - 9)[0]
    assert frames == 3
    assert PAYLOAD[-5:] == bytes((0,)) + struct.pack("<I", 0x8F92EAB1)
    table = PAYLOAD[-(8 + 8 * frames + 9) :]
    assert struct.unpack_from("<II", table) == (0x184D2A5E, 8 * frames + 9)
    assert [struct.unpack_from("<II", table, 8 + 8 * i)[1] for i in range(frames)] == [
        MiB, MiB, 300_000,
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 100, 4096, 300_000, 2 * MiB])
def test_what_does_not_compress_is_given_up(length: int) -> None:
    """Noise, and whatever saves less than 1/8, is not compressed; the target is not overrun."""
    source = noise(length)
    target = bytearray(length + 100)
    assert compress(memoryview(source), memoryview(target), 1) is None
    assert target[length * 7 // 8 :] == bytes(len(target) - length * 7 // 8)


@given(room=st.integers(0, len(PAYLOAD) + 10))
@settings(max_examples=25)
def test_a_target_that_is_too_small_is_given_up(room: int) -> None:
    """Compression into a target that cannot hold the payload says so, whatever the point."""
    target = bytearray(room)
    length = compress(memoryview(CONTENT), memoryview(target), 1)
    assert length == (len(PAYLOAD) if room >= len(PAYLOAD) else None)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(text(MiB), True), (noise(MiB), False), (noise(1000), True), (bytes(65_537), True)],
)
def test_samples_tell_what_compresses(content: bytes, expected: bool) -> None:
    """Samples find noise; what is hardly larger than the samples is left to the compressor."""
    assert looks_compressible(memoryview(content)) is expected


@given(position=st.integers(0, len(PAYLOAD) - 1), bit=st.integers(0, 7))
@settings(max_examples=200)
def test_a_flipped_bit_never_changes_the_content(position: int, bit: int) -> None:
    """Even without the chunk's checksums, a damaged payload is CorruptChunk or its content."""
    copy = bytearray(PAYLOAD)
    copy[position] ^= 1 << bit
    try:
        found = read_range(bytes(copy), len(CONTENT), 0, len(CONTENT))
    except CorruptChunk:
        return
    assert found == CONTENT


@given(cut=st.integers(1, len(PAYLOAD)))
@settings(max_examples=25)
def test_a_payload_cut_short_is_refused(cut: int) -> None:
    """A payload that lost its end, or all of it, is CorruptChunk."""
    with pytest.raises(CorruptChunk):
        read_range(PAYLOAD[:-cut], len(CONTENT), 0, 10)


def _table(entries: list[tuple[int, int]], *, count: int | None = None) -> bytes:
    body = b"".join(struct.pack("<II", *entry) for entry in entries)
    body += struct.pack("<IBI", len(entries) if count is None else count, 0, 0x8F92EAB1)
    return struct.pack("<II", 0x184D2A5E, len(body)) + body


@pytest.mark.parametrize(
    "table",
    [
        _table([(1000, MiB), (1000, MiB)]),  # does not add up to the payload
        _table([(2000, MiB), (2000, MiB - 1)]),  # a shorter frame than the content has
        _table([(2000, MiB - 1), (2000, MiB + 1)]),  # a short frame before the last
        _table([(2000, 2 * MiB)]),  # one frame too few
        _table([(1000, MiB), (1000, MiB), (2000, 0)]),  # one frame too many
        _table([(2000, MiB), (2000, MiB)], count=2**32 - 1),  # a number of frames that is a lie
        _table([(MAX_STORED_FRAME_BYTES + 1, MiB), (2000, MiB)]),  # grown beyond what zstd can
        b"\x00" * 33,
        b"",
    ],
)
def test_a_seek_table_that_lies_is_refused(table: bytes) -> None:
    """Frame numbers and lengths are believed only where they add up."""
    payload_bytes = 4000 + len(_table([(0, 0), (0, 0)]))
    with pytest.raises(CorruptChunk):
        read_seek_table(memoryview(table), payload_bytes, 2 * MiB)


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.compress(bytes(200 * KiB)),  # more than the table says
        zstandard.compress(bytes(50 * KiB)),  # less
        # a header that announces 16 TiB
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**44) + bytes(20),
        # a skippable frame that announces the right length
        struct.pack("<II", 0x184D2A50, 100 * KiB) + bytes(100 * KiB),
        b"",
        b"not a zstd frame at all",
    ],
)
@pytest.mark.parametrize("end", [100 * KiB, 100 * KiB - 1])
def test_a_frame_of_another_length_is_refused(frame: bytes, end: int) -> None:
    """A frame that holds or announces another length than the seek table says is CorruptChunk."""
    table = _table([(len(frame), 100 * KiB)])
    with pytest.raises(CorruptChunk):
        read_range(frame + table, 100 * KiB, 0, end)
