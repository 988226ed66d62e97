"""What file I/O stands on: the parts of a client that reading and writing share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tectonic_client.blocks.reader import BlockReader
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.filesystem.audience import Audience
from tectonic_client.filesystem.blocktable import BlockTable
from tectonic_client.filesystem.chunkcache import ChunkCache
from tectonic_client.filesystem.writelog import WriteServices
from tectonic_client.kv.executor import AsyncKV

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileServices:
    """What file I/O stands on."""

    kv: AsyncKV
    session_id: int
    stores: StoreSet
    write: WriteServices
    reader: BlockReader
    cache: ChunkCache
    table: BlockTable
    chunk_bytes: int
    on_blocks_freed: Callable[[], None]
    on_scattered: Callable[[int], None]
    on_tail: Callable[[int], None]
    audience: Audience
