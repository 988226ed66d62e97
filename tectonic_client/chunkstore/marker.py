"""The marker of a store's directory: says which store of which volume it is.

A directory without the right marker is refused, so that a device that is not mounted, or another
volume's, never looks like an empty store. The file `tectonicfs-store`, 36 bytes, little-endian:

    offset  size  field
         0     8  magic "TECTSTOR"
         8     2  version u16 (1)
        10     2  0
        12    16  uuid of the volume
        28     2  store id u16
        30     2  0
        32     4  CRC32C u32 of the 32 bytes before it

Pure: no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from crc32c import crc32c

from tectonic_client.errors import FormatTooNew, StoreMismatch

MARKER: Final = "tectonicfs-store"
"""Name of the file."""

_MAGIC: Final = b"TECTSTOR"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sH")
_LAYOUT: Final = struct.Struct("<8sHxx16sHxx")
_CRC: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoreMarker:
    """Identity of a store."""

    volume_uuid: bytes
    store_id: int

    def __str__(self) -> str:
        return f"store {self.store_id} of volume {self.volume_uuid.hex()}"

    def encode(self) -> bytes:
        """Bytes of the marker."""
        data = _LAYOUT.pack(_MAGIC, _VERSION, self.volume_uuid, self.store_id)
        return data + _CRC.pack(crc32c(data))

    @classmethod
    def decode(cls, data: bytes, directory: str) -> Self:
        """Marker of these bytes. Raises StoreMismatch, FormatTooNew, naming `directory`."""
        if len(data) >= _HEAD.size:
            magic, version = _HEAD.unpack_from(data)
            if magic == _MAGIC and version > _VERSION:
                raise FormatTooNew(
                    f"store {directory}: its file {MARKER} has version {version},"
                    f" this release knows {_VERSION}: upgrade tectonicfs"
                )
        if len(data) == _LAYOUT.size + _CRC.size:
            _, _, volume_uuid, store_id = _LAYOUT.unpack_from(data)
            marker = cls(volume_uuid, store_id)
            # Compares everything: magic, version, zeros and checksum.
            if data == marker.encode():
                return marker
        raise StoreMismatch(f"store {directory}: its file {MARKER} is damaged")
