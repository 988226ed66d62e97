"""A process that puts chunks until it is killed: python -m tests.chunkstore.putting_process ...

Arguments: the store's directory, the first block id, and optionally how many bytes of the next
chunk to write before it kills itself. Each acknowledged block id is printed as a line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.port import ChunkKey
from tests.contracts.chunkstore import PAGE, filled

UUID = bytes(range(16))
PAGES = 512


def _die_after(byte_count: int) -> None:
    """The next write stops after so many bytes, and with it the process."""
    write = os.pwritev

    def last_write(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        write(descriptor, [parts[0][:byte_count]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    os.pwritev = last_write  # type: ignore[assignment]


def main() -> None:
    directory, first = sys.argv[1], int(sys.argv[2])
    store = FlashStore(directory, volume_uuid=UUID, store_id=0)
    if len(sys.argv) > 3:
        _die_after(int(sys.argv[3]))
    block_id = first
    while True:
        store.put(ChunkKey(block_id, 0), [filled(PAGES * PAGE, block_id)])
        print(block_id, flush=True)
        block_id += 1


if __name__ == "__main__":
    main()
