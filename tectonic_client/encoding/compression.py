"""Compression of a chunk's payload in the zstd seekable format.

The payload is a row of independent zstd frames of FRAME_BYTES of content each (the last one short),
each with its content checksum, and a skippable frame with the seek table at the end, as "Zstandard
Seekable Format" version 0.1.0 lays down. `zstd -d` reads it; a range is read by fetching and
decompressing only the frames that it touches. Pure; the GIL is released in the heavy calls.

    seek table: magic 0x184D2A5E u32 | length u32 | entries | footer, little-endian
    entry:      compressed size u32 | content size u32
    footer:     number of frames u32 | descriptor u8 (0) | magic 0x8F92EAB1 u32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import zstandard

from tectonic_client.errors import CorruptChunk
from tectonic_client.limits import KiB, MiB

FRAME_BYTES: Final = 1 * MiB
_SAMPLE_BYTES: Final = 16 * KiB
_SAMPLES: Final = 4
_WORTHWHILE: Final = 7 / 8

_ENTRY: Final = struct.Struct("<II")
_TABLE_HEAD: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IBI")
_TABLE_MAGIC: Final = 0x184D2A5E
_FOOTER_MAGIC: Final = 0x8F92EAB1

MAX_STORED_FRAME_BYTES: Final = FRAME_BYTES + 4 * KiB
"""zstd stores what does not compress as it is: 3 bytes per 128 KiB and less than 32 besides."""


class Frame(NamedTuple):
    """One frame: where it lies in the payload, and what it holds."""

    start: int
    stored_bytes: int
    content_start: int
    content_bytes: int


def looks_compressible(data: memoryview) -> bool:
    """Whether a few samples of `data` compress: cheap, so that AUTO skips what does not."""
    if len(data) <= _SAMPLES * _SAMPLE_BYTES:
        return True
    step = (len(data) - _SAMPLE_BYTES) // (_SAMPLES - 1)
    samples = [data[i * step : i * step + _SAMPLE_BYTES] for i in range(_SAMPLES)]
    compressor = zstandard.ZstdCompressor(level=1)
    compressed = sum(len(compressor.compress(sample)) for sample in samples)
    return compressed < _WORTHWHILE * _SAMPLES * _SAMPLE_BYTES


def compress(source: memoryview, target: memoryview, level: int) -> int | None:
    """Compress `source` into `target`; returns the length, None where it saves less than 1/8."""
    limit = min(len(target), int(len(source) * _WORTHWHILE))
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    entries, position = [], 0
    for start in range(0, len(source), FRAME_BYTES):
        content = source[start : start + FRAME_BYTES]
        stored = _compress_frame(compressor, content, target[position:limit])
        if stored is None:
            return None
        entries.append(_ENTRY.pack(stored, len(content)))
        position += stored
    table = _seek_table(entries)
    if position + len(table) > limit:
        return None
    target[position : position + len(table)] = table
    return position + len(table)


def _compress_frame(
    compressor: zstandard.ZstdCompressor, content: memoryview, target: memoryview
) -> int | None:
    """Length of the frame, None where it does not fit."""
    position = 0
    with compressor.stream_reader(content, size=len(content)) as reader:
        while position < len(target):
            count = reader.readinto(target[position:])
            if not count:
                return position
            position += count
        return None if reader.read(1) else position


def _seek_table(entries: list[bytes]) -> bytes:
    body = b"".join(entries) + _FOOTER.pack(len(entries), 0, _FOOTER_MAGIC)
    return _TABLE_HEAD.pack(_TABLE_MAGIC, len(body)) + body


def seek_table_bytes(content_bytes: int) -> int:
    """Length of the seek table at the end of a payload that holds `content_bytes`."""
    return _TABLE_HEAD.size + _frame_count(content_bytes) * _ENTRY.size + _FOOTER.size


def _frame_count(content_bytes: int) -> int:
    return -(-content_bytes // FRAME_BYTES)


def read_seek_table(table: memoryview, payload_bytes: int, content_bytes: int) -> list[Frame]:
    """Frames by the seek table, which is the end of a payload.

    Raises CorruptChunk unless it is the table of `payload_bytes` that hold `content_bytes`: nothing
    in it is believed that does not add up.
    """
    count = _frame_count(content_bytes)
    if len(table) != seek_table_bytes(content_bytes) or len(table) > payload_bytes:
        raise CorruptChunk("compressed payload is too short for its seek table")
    if _TABLE_HEAD.unpack_from(table) != (_TABLE_MAGIC, len(table) - _TABLE_HEAD.size):
        raise CorruptChunk("seek table does not begin where it should")
    if _FOOTER.unpack_from(table, len(table) - _FOOTER.size) != (count, 0, _FOOTER_MAGIC):
        raise CorruptChunk("seek table has no valid end")
    frames, position, content = [], 0, 0
    for number in range(count):
        stored, held = _ENTRY.unpack_from(table, _TABLE_HEAD.size + number * _ENTRY.size)
        if held != min(FRAME_BYTES, content_bytes - content) or stored > MAX_STORED_FRAME_BYTES:
            raise CorruptChunk(f"seek table announces {stored} bytes for {held} in frame {number}")
        frames.append(Frame(position, stored, content, held))
        position, content = position + stored, content + held
    if position + len(table) != payload_bytes:
        raise CorruptChunk("seek table does not add up to the payload's length")
    return frames


def touched(frames: Sequence[Frame], start: int, end: int) -> Sequence[Frame]:
    """The frames that hold the content bytes [start, end), start < end."""
    return frames[start // FRAME_BYTES : _frame_count(end)]


def touched_bound(start: int, end: int) -> int:
    """The most payload bytes that the frames with the content bytes [start, end) can take."""
    return (_frame_count(end) - start // FRAME_BYTES) * MAX_STORED_FRAME_BYTES


def decompress(frames: Sequence[Frame], stored: memoryview, start: int, target: memoryview) -> None:
    """Fill `target` with content bytes from `start` on.

    `frames` are those that the range touches, `stored` their bytes. Raises CorruptChunk.
    """
    end = start + len(target)
    for frame in frames:
        first = max(start, frame.content_start)
        last = min(end, frame.content_start + frame.content_bytes)
        begin = frame.start - frames[0].start
        _decompress_part(
            stored[begin : begin + frame.stored_bytes],
            frame,
            first - frame.content_start,
            target[first - start : last - start],
        )


def _decompress_part(stored: memoryview, frame: Frame, skip: int, target: memoryview) -> None:
    try:
        # zstd allocates what a frame's header announces: compare before that.
        if zstandard.get_frame_parameters(stored).content_size != frame.content_bytes:
            raise CorruptChunk("a frame announces another length than its seek table")
        if len(target) == frame.content_bytes:
            _read_whole(stored, target)
            return
        content = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"zstd: {error}") from error
    if len(content) != frame.content_bytes:
        raise CorruptChunk("a frame holds another length than it announces")
    target[:] = memoryview(content)[skip : skip + len(target)]


def _read_whole(stored: memoryview, target: memoryview) -> None:
    """Decompress straight into `target`: zstd needs no window of its own for that."""
    position = 0
    with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
        while count := reader.readinto(target[position:]) if position < len(target) else 0:
            position += count
        # Reading on to the frame's end makes zstd compare its content checksum.
        if position != len(target) or reader.read(1):
            raise CorruptChunk("a frame holds another length than it announces")
