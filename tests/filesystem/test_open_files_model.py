"""Open files against those of the host: several handles, unlinked and replaced under them."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.errors import NotFound
from tectonic_client.records import Codec
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import FormatOptions, Volume, format_volume, open_volume
from tests.filesystem.faultrig import OWNER
from tests.leaks import assert_no_leaks, clean

_numbers = itertools.count()
_names = st.sampled_from([b"a", b"b"])
_slots = st.integers(0, 3)
_flags = st.sampled_from(
    [os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_RDWR | os.O_APPEND, os.O_RDWR | os.O_CREAT]
)
_offsets = st.one_of(st.integers(0, 300), st.sampled_from([4096, 65_000, 65_536, 131_072, 300_000]))
_data = st.one_of(
    st.binary(min_size=1, max_size=100),
    st.tuples(st.integers(0, 255), st.sampled_from([5_000, 65_536, 70_000, 200_000])).map(
        lambda pair: bytes((pair[0], 255 - pair[0])) * (pair[1] // 2)
    ),
)
_steps = st.one_of(
    st.tuples(st.just("open"), _slots, _names, _flags),
    st.tuples(st.just("open"), _slots, _names, st.just(os.O_RDWR | os.O_CREAT)),
    st.tuples(st.just("close"), _slots),
    st.tuples(st.just("write"), _slots, _offsets, _data),
    st.tuples(st.just("write"), _slots, _offsets, _data),
    st.tuples(st.just("read"), _slots, _offsets, st.sampled_from([1, 100, 70_000, 400_000])),
    st.tuples(st.just("truncate"), _slots, _offsets),
    st.tuples(st.just("flush"), _slots),
    st.tuples(st.just("stat"), _slots),
    st.tuples(st.just("unlink"), _names),
    st.tuples(st.just("rename"), _names, _names),
    st.tuples(st.sampled_from(["sync", "give memory", "expire", "forget chunks", "collect"])),
)


class _Pair:
    """A file open on both sides."""

    def __init__(self, descriptor: int, handle: int, inode: int) -> None:
        self.descriptor = descriptor
        self.handle = handle
        self.inode = inode


class _BothSides:
    """Does each step to the host directory and to the volume, and compares."""

    def __init__(self, root: Path, volume: Volume) -> None:
        self._root = os.fsencode(root) + b"/"
        self._volume = volume
        self._fs = volume.filesystem
        self._open: dict[int, _Pair] = {}

    def _exists(self, name: bytes) -> bool:
        return os.path.lexists(self._root + name)

    async def do(self, step: str, *arguments: object) -> None:
        await getattr(self, "_" + step.replace(" ", "_"))(*arguments)

    async def _open_(self, slot: int, name: bytes, flags: int) -> None:
        await self._close(slot)
        try:
            inode = (await self._fs.lookup(ROOT_INODE, name)).inode
            descriptor = os.open(self._root + name, flags)
            self._open[slot] = _Pair(descriptor, await self._fs.open(inode, flags), inode)
        except NotFound:
            assert not self._exists(name)
            if flags & os.O_CREAT:
                descriptor = os.open(self._root + name, flags)
                created, handle = await self._fs.create(ROOT_INODE, name, 0o644, OWNER, flags)
                self._open[slot] = _Pair(descriptor, handle, created.inode)

    async def _close(self, slot: int) -> None:
        pair = self._open.pop(slot, None)
        if pair is not None:
            os.close(pair.descriptor)
            await self._fs.release(pair.handle)

    async def close_all(self) -> None:
        for slot in list(self._open):
            await self._close(slot)

    async def _write(self, slot: int, offset: int, data: bytes) -> None:
        pair = self._open.get(slot)
        if pair is not None:
            # pwrite(2) appends, whatever the offset, to a file opened with O_APPEND.
            os.pwrite(pair.descriptor, data, offset)
            assert await self._fs.write(pair.handle, offset, data) == len(data)

    async def _read(self, slot: int, offset: int, size: int) -> None:
        pair = self._open.get(slot)
        if pair is not None:
            found = bytes(await self._fs.read(pair.handle, offset, size))
            assert found == os.pread(pair.descriptor, size, offset)

    async def _truncate(self, slot: int, size: int) -> None:
        pair = self._open.get(slot)
        if pair is not None:
            os.ftruncate(pair.descriptor, size)
            changed = await self._fs.setattr(pair.inode, AttributeChanges(size=size))
            assert changed.size == size

    async def _flush(self, slot: int) -> None:
        if slot in self._open:
            await self._fs.flush(self._open[slot].handle)

    async def _stat(self, slot: int) -> None:
        pair = self._open.get(slot)
        if pair is not None:
            found, expected = await self._fs.getattr(pair.inode), os.fstat(pair.descriptor)
            assert (found.size, found.nlink) == (expected.st_size, expected.st_nlink)

    async def _unlink(self, name: bytes) -> None:
        try:
            await self._fs.unlink(ROOT_INODE, name)
        except NotFound:
            assert not self._exists(name)
        else:
            os.unlink(self._root + name)

    async def _rename(self, old: bytes, new: bytes) -> None:
        try:
            await self._fs.rename(ROOT_INODE, old, ROOT_INODE, new)
        except NotFound:
            assert not self._exists(old)
        else:
            os.rename(self._root + old, self._root + new)

    async def _sync(self) -> None:
        await self._fs.sync()

    async def _give_memory(self) -> None:
        await self._fs.flush_idle_buffers()

    async def _expire(self) -> None:
        await self._fs.flush_expired(0)

    async def _forget_chunks(self) -> None:
        self._volume.cache.clear()

    async def _collect(self) -> None:
        await self._volume.tasks.reclaim_orphans()
        await self._volume.cleaner.reclaim_abandoned_orphans()
        await self._volume.cleaner.delete_dead_blocks()


async def _play(url: str, root: Path, steps: list[tuple[str, ...]]) -> None:
    async with open_volume(url) as volume:
        both = _BothSides(root, volume)
        for number, (step, *arguments) in enumerate(steps):
            try:
                await both.do("open_" if step == "open" else step, *arguments)
            except BaseException as error:
                error.add_note(f"step {number}: {step} {arguments}")
                raise
        await both.close_all()
    assert volume.pool.used_bytes == 0, "leaked buffers"
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)
        fs = volume.filesystem
        handle = await fs.opendir(ROOT_INODE)
        entries = await fs.readdir(handle, 0)
        assert {entry.name.decode() for entry in entries} == set(os.listdir(root))
        for entry in entries:
            reading = await fs.open(entry.attributes.inode, os.O_RDONLY)
            content = (root / entry.name.decode()).read_bytes()
            assert bytes(await fs.read(reading, 0, 2**20)) == content
            await fs.release(reading)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    steps=st.lists(_steps, min_size=3, max_size=40),
    codec=st.sampled_from([Codec.NONE, Codec.ZSTD]),
)
def test_open_files_agree_with_the_host(steps: list[tuple[str, ...]], codec: Codec) -> None:
    """Whatever several handles do, and whatever happens to the names and in the background."""
    url = f"memory://open-files-{next(_numbers)}"
    options = FormatOptions(
        name="model", stores=(f"{url}-store",), block_bytes=128 * 1024, chunk_bytes=64 * 1024,
        codec=codec,
    )  # fmt: skip
    format_volume(url, options)
    with tempfile.TemporaryDirectory(prefix="tectonicfs-model-") as root:
        trio.run(_play, url, Path(root), steps)
