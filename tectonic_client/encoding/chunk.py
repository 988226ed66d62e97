"""The format of a chunk as stores keep it: one header page, then the payload.

    offset  size  field (little-endian)
    0       8     magic "TECTCHNK"
    8       2     version (1)
    10      1     flags: bit 0 set = payload is compressed (zstd seekable format)
    11      1     0
    12      4     checksum unit in bytes (65536)
    16      16    volume uuid
    32      8     block id
    40      4     chunk index in the block
    44      4     content length: bytes before compression
    48      4     payload length: bytes as stored
    52      4     CRC32C of the whole header page with this field 0
    56      8     0
    64      4*n   CRC32C of each unit of the payload, n = ceil(payload length / unit)
    ...           0 up to 4096
    4096    ...   payload, padded with zeros to a multiple of 4096

So a scan of the stores can rebuild or audit the block layer. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from tectonic_client.encoding.checksum import unit_count
from tectonic_client.errors import CorruptChunk, FormatTooNew
from tectonic_client.limits import (
    ALIGNMENT_BYTES,
    CHECKSUM_UNIT_BYTES,
    CHUNK_HEADER_BYTES,
    MAX_CHUNK_BYTES,
)

MAGIC: Final = b"TECTCHNK"
VERSION: Final = 1
_LAYOUT: Final = struct.Struct("<8sHBxI16sQIIII8x")
_CRC: Final = struct.Struct("<I")
_CRC_OFFSET: Final = 52
_TABLE_OFFSET: Final = _LAYOUT.size
_COMPRESSED: Final = 1


def padded(length: int) -> int:
    """`length` rounded up to what a store is given."""
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A chunk's header; `checksums` are packed as in the page."""

    volume_uuid: bytes
    block_id: int
    index: int
    content_bytes: int
    payload_bytes: int
    compressed: bool
    checksums: bytes

    def encode_into(self, page: memoryview) -> None:
        """Write the header page."""
        page[:] = bytes(CHUNK_HEADER_BYTES)
        _LAYOUT.pack_into(
            page, 0, MAGIC, VERSION, _COMPRESSED if self.compressed else 0, CHECKSUM_UNIT_BYTES,
            self.volume_uuid, self.block_id, self.index, self.content_bytes, self.payload_bytes, 0,
        )  # fmt: skip
        page[_TABLE_OFFSET : _TABLE_OFFSET + len(self.checksums)] = self.checksums
        _CRC.pack_into(page, _CRC_OFFSET, crc32c(page))

    @classmethod
    def decode(cls, page: memoryview) -> ChunkHeader:
        """Header of these bytes. Raises CorruptChunk, FormatTooNew."""
        if len(page) < CHUNK_HEADER_BYTES:
            raise CorruptChunk(f"{len(page)} bytes are too few for a chunk header")
        copy = bytearray(page[:CHUNK_HEADER_BYTES])
        magic, version, flags, unit, uuid, block_id, index, content, payload, crc = (
            _LAYOUT.unpack_from(copy)
        )
        if magic != MAGIC:
            raise CorruptChunk("no chunk header where one should be")
        _CRC.pack_into(copy, _CRC_OFFSET, 0)
        if crc32c(copy) != crc:
            raise CorruptChunk("checksum of the chunk header does not match")
        if version > VERSION:
            raise FormatTooNew(
                f"chunk version {version} is newer than {VERSION}: upgrade tectonicfs"
            )
        if unit != CHECKSUM_UNIT_BYTES or flags & ~_COMPRESSED:
            raise CorruptChunk("chunk header has unknown settings")
        compressed = bool(flags & _COMPRESSED)
        if not 0 < payload <= content <= MAX_CHUNK_BYTES or (payload < content) != compressed:
            raise CorruptChunk(f"chunk header announces {payload} bytes for {content}")
        table = bytes(copy[_TABLE_OFFSET : _TABLE_OFFSET + 4 * unit_count(payload)])
        return cls(uuid, block_id, index, content, payload, compressed, table)

    def check(self, volume_uuid: bytes, block_id: int, index: int) -> None:
        """Raise CorruptChunk unless this is the header of that chunk."""
        if self.volume_uuid != volume_uuid:
            raise CorruptChunk("the chunk belongs to another volume")
        if (self.block_id, self.index) != (block_id, index):
            raise CorruptChunk(f"the chunk is {self.block_id:016x}.{self.index:04x}")
