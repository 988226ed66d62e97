"""Damages chunks of a step in its stores, as a device would."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.limits import CHUNK_HEADER_BYTES
from tectonic_client.metadata.blocks import read_blocks
from tectonic_client.metadata.files import read_extents
from tectonic_client.volume import VolumeOptions, open_volume

Damage = Literal["flip", "flip header", "truncate", "remove"]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a file: where it is, and how messages name it."""

    path: Path
    block_id: int
    chunk: int
    store: str

    @property
    def words(self) -> tuple[str, str]:
        """What a message about it must contain."""
        return f"block {self.block_id:016x} chunk {self.chunk}", self.store

    def damage(self, how: Damage) -> None:
        """Change it behind the volume's back."""
        if how == "remove":
            self.path.unlink()
        elif how == "truncate":
            os.truncate(self.path, CHUNK_HEADER_BYTES + 100)
        else:
            offset = 20 if how == "flip header" else CHUNK_HEADER_BYTES + 100
            with self.path.open("r+b") as chunk:
                chunk.seek(offset)
                byte = chunk.read(1)[0]
                chunk.seek(offset)
                chunk.write(bytes([byte ^ 1]))


def chunks_of(url: str, path: str) -> list[StoredChunk]:
    """The chunks of a file of a volume, in the file's order."""

    async def find() -> list[tuple[ChunkKey, str]]:
        async with open_volume(url, VolumeOptions(read_only=True)) as volume:
            inode = await volume.filesystem.resolve(path)
            extents = await volume.kv.read(lambda tx: read_extents(tx, inode))
            ids = [extent.block_id for extent in extents]
            records = await volume.kv.read(lambda tx: read_blocks(tx, ids))
            return [
                (ChunkKey(block_id, index), volume.stores.get(place.store_id).name)
                for block_id, record in zip(ids, records, strict=True)
                for index, place in enumerate(record.places if record else ())
            ]

    found = []
    for key, store in trio.run(find):
        (chunk,) = Path(store).glob(f"chunks/*/{key}")
        found.append(StoredChunk(chunk, key.block_id, key.chunk, store))
    return found
