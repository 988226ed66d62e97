"""Compression of a chunk's payload in the zstd seekable format.

The payload is a row of independent zstd frames of FRAME_BYTES of content each (the last one short),
each with its content checksum, and a skippable frame with the seek table at the end, as "Zstandard
Seekable Format" version 0.1.0 lays down. `zstd -d` reads it; a range is read by decompressing only
the frames that it touches. Pure; the GIL is released in the heavy calls.

    seek table: magic 0x184D2A5E u32 | length u32 | entries | footer, little-endian
    entry:      compressed size u32 | content size u32
    footer:     number of frames u32 | descriptor u8 (0) | magic 0x8F92EAB1 u32
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import zstandard

from tectonic_client.errors import CorruptChunk
from tectonic_client.limits import MAX_CHUNK_BYTES, KiB, MiB

FRAME_BYTES: Final = 1 * MiB
_SAMPLE_BYTES: Final = 16 * KiB
_SAMPLES: Final = 4
_WORTHWHILE: Final = 7 / 8

_ENTRY: Final = struct.Struct("<II")
_TABLE_HEAD: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IBI")
_TABLE_MAGIC: Final = 0x184D2A5E
_FOOTER_MAGIC: Final = 0x8F92EAB1
_MAX_FRAMES: Final = MAX_CHUNK_BYTES // FRAME_BYTES


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


def read_frames(payload: memoryview, content_bytes: int) -> list[Frame]:
    """The frames of a payload from its seek table. Raises CorruptChunk unless all agrees."""
    if len(payload) < _FOOTER.size:
        raise CorruptChunk("compressed payload is too short for a seek table")
    count, descriptor, magic = _FOOTER.unpack_from(payload, len(payload) - _FOOTER.size)
    length = count * _ENTRY.size + _FOOTER.size
    start = len(payload) - length - _TABLE_HEAD.size
    if magic != _FOOTER_MAGIC or descriptor or count > _MAX_FRAMES or start < 0:
        raise CorruptChunk("compressed payload has no valid seek table")
    if _TABLE_HEAD.unpack_from(payload, start) != (_TABLE_MAGIC, length):
        raise CorruptChunk("seek table does not begin where it should")
    frames, position, content = [], 0, 0
    for number in range(count):
        place = start + _TABLE_HEAD.size + number * _ENTRY.size
        stored, held = _ENTRY.unpack_from(payload, place)
        frames.append(Frame(position, stored, content, held))
        position, content = position + stored, content + held
    if position != start or content != content_bytes:
        raise CorruptChunk("seek table does not add up to the chunk's length")
    if any(frame.content_bytes != FRAME_BYTES for frame in frames[:-1]):
        raise CorruptChunk("seek table has a short frame before the last")
    return frames


def decompress_range(
    payload: memoryview, content_bytes: int, start: int, target: memoryview
) -> None:
    """Fill `target` with content bytes from `start` on. Raises CorruptChunk."""
    end = start + len(target)
    for frame in read_frames(payload, content_bytes):
        first = max(start, frame.content_start)
        last = min(end, frame.content_start + frame.content_bytes)
        if first < last:
            _decompress_part(
                payload[frame.start : frame.start + frame.stored_bytes],
                frame,
                first - frame.content_start,
                target[first - start : last - start],
            )


def _decompress_part(stored: memoryview, frame: Frame, skip: int, target: memoryview) -> None:
    try:
        if skip == 0 and len(target) == frame.content_bytes:
            _read_whole(stored, target)
            return
        content = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=frame.content_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"zstd: {error}") from error
    if len(content) != frame.content_bytes:
        raise CorruptChunk("a frame holds another length than its seek table says")
    target[:] = memoryview(content)[skip : skip + len(target)]


def _read_whole(stored: memoryview, target: memoryview) -> None:
    position = 0
    with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
        while count := reader.readinto(target[position:]) if position < len(target) else 0:
            position += count
        # Reading on to the frame's end makes zstd compare its content checksum.
        if position != len(target) or reader.read(1):
            raise CorruptChunk("a frame holds another length than its seek table says")
