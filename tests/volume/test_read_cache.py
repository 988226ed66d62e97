"""How much of the buffers the data that is read ahead may occupy."""

from __future__ import annotations

import os

import pytest
import trio

from tectonic_client.limits import MiB
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import FormatOptions, VolumeOptions, format_volume, open_volume


@pytest.mark.parametrize(("limit_bytes", "chunks"), [(None, 12), (6 * MiB, 3), (0, 1), (2**40, 12)])
def test_the_read_cache_stays_inside_its_limit(limit_bytes: int | None, chunks: int) -> None:
    """A sequential reader fills it and no more: at most the pool's share, at least the chunk that
    it waits for, which is let in beyond the limit while nothing else can go."""
    url = "memory://read-cache"
    options = FormatOptions("c", ("memory://read-cache-s",), chunk_bytes=2 * MiB, force=True)
    format_volume(url, options)
    size = 64 * MiB

    async def main() -> None:
        opened = VolumeOptions(memory_limit_bytes=64 * MiB, read_cache_bytes=limit_bytes)
        async with open_volume(url, opened) as volume:
            files = volume.filesystem
            _, handle = await files.create(ROOT_INODE, b"f", 0o644, Owner(0, 0), os.O_RDWR)
            for offset in range(0, size, MiB):
                await files.write(handle, offset, bytes(MiB))
            await files.flush(handle)
            most = 0
            for offset in range(0, size, MiB):
                assert await files.read(handle, offset, MiB) == bytes(MiB)
                most = max(most, volume.cache.chunks)
            assert most <= chunks + 1
            assert most >= min(chunks, 4), "it holds less than it may"
            await files.release(handle)

    trio.run(main)
