"""Files of a volume under sharing, faults and memory pressure."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.errors import (
    ChunkMissing,
    CorruptChunk,
    MetadataUnavailable,
    NoSpace,
    NotFound,
    StaleHandle,
    UnknownOutcome,
)
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.port import KV
from tectonic_client.limits import IDS_PER_LEASE, MiB
from tectonic_client.metadata import keys
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import (
    FormatOptions,
    Volume,
    VolumeOptions,
    format_volume,
    open_volume,
)

_numbers = itertools.count()
OWNER = Owner(0, 0)
CHUNK = 64 * 1024


def _new_volume(chunk_bytes: int = CHUNK) -> str:
    number = next(_numbers)
    url = f"memory://files-{number}"
    format_volume(
        url,
        FormatOptions(
            name="files",
            stores=(f"memory://files-{number}-store",),
            chunk_bytes=chunk_bytes,
            block_bytes=4 * chunk_bytes,
        ),
    )
    return url


class Broken:
    """A store or engine in front of another one; each call goes through a hook first."""

    def __init__(self, inner: ChunkStore | KV) -> None:
        self._inner = inner
        self.before: Callable[[str], None] = lambda operation: None
        self.after: Callable[[str], None] = lambda operation: None

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("put", "get_into", "transact", "delete"):
            return found

        def call(*arguments: object, **options: object) -> object:
            self.before(name)
            result = found(*arguments, **options)
            self.after(name)
            return result

        return call


class BrokenKV(Broken):
    """Hides the engine's queue, so that every transaction passes `transact`."""

    reads_may_block = False

    def __getattr__(self, name: str) -> object:
        if name == "submit":
            raise AttributeError(name)
        return super().__getattr__(name)


def _run(
    body: Callable[[Volume], Awaitable[None]], url: str, options: VolumeOptions | None = None
) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with open_volume(url, options) as volume:
                await body(volume)
                volume.cache.clear()
            assert volume.pool.used_bytes == 0, "leaked buffers"

    trio.run(main)


async def _write_file(fs: FileSystem, name: bytes, data: bytes) -> int:
    attributes, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_WRONLY)
    await fs.write(handle, 0, data)
    await fs.flush(handle)
    await fs.release(handle)
    return attributes.inode


async def _read_file(fs: FileSystem, inode: int, step: int = 50_000) -> bytes:
    handle = await fs.open(inode, os.O_RDONLY)
    parts: list[bytes] = []
    while part := bytes(await fs.read(handle, sum(map(len, parts)), step)):
        parts.append(part)
    await fs.release(handle)
    return b"".join(parts)


def test_an_unlinked_file_lives_until_its_last_handle_is_closed() -> None:
    """Reads and writes go on after unlink; with the last handle inode, blocks and chunks go."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, b"x" * 300_000)
        await fs.flush(handle)
        await fs.unlink(ROOT_INODE, b"f")
        assert (await fs.getattr(attributes.inode)).nlink == 0
        await fs.write(handle, 300_000, b"y")
        assert bytes(await fs.read(handle, 299_999, 2)) == b"xy"
        await fs.release(handle)
        await volume.tasks.reclaim_orphans()
        await volume.cleaner.delete_dead_blocks()
        with pytest.raises(StaleHandle):
            await fs.getattr(attributes.inode)
        store = volume.stores.get(0)
        assert list(store.list(0, 2**63)) == []
        rows = await volume.kv.read(lambda tx: tx.scan(keys.BLOCK, keys.ORPHAN + b"\xff"))
        assert not [key for key, _ in rows if key[:1] in (keys.BLOCK, keys.DEAD_BLOCK, keys.ORPHAN)]

    _run(body, url)


def test_a_full_store_fails_the_writer_and_keeps_what_was_flushed() -> None:
    """ENOSPC arrives at write or flush once; earlier data stays whole, and writing resumes."""
    url = _new_volume()
    stores: list[Broken] = []

    def wrap(store: ChunkStore) -> ChunkStore:
        stores.append(Broken(store))
        return stores[-1]  # type: ignore[return-value]

    def full(operation: str) -> None:
        if operation == "put":
            raise NoSpace("full")

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, b"kept" * 50_000)
        await fs.fsync(handle)
        stores[0].before = full
        with pytest.raises(NoSpace):
            await _write_much(fs, handle, 200_000)
        stores[0].before = lambda operation: None
        with pytest.raises(NoSpace):  # the write that failed may have been cut by the kernel
            await fs.write(handle, 200_000, b"not yet")
        with pytest.raises(NoSpace):
            await fs.flush(handle)
        await fs.flush(handle)
        assert (await fs.getattr(attributes.inode)).size == 200_000
        assert bytes(await fs.read(handle, 0, 300_000)) == b"kept" * 50_000
        await fs.write(handle, 200_000, b"more")
        await fs.fsync(handle)
        await fs.release(handle)
        assert await _read_file(fs, attributes.inode) == b"kept" * 50_000 + b"more"

    _run(body, url, VolumeOptions(wrap_store=wrap))


async def _write_much(fs: FileSystem, handle: int, start: int) -> None:
    for position in itertools.count(start, 100_000):
        await fs.write(handle, position, b"lost" * 25_000)


@pytest.mark.parametrize("happened", [False, True])
def test_a_flush_with_unknown_outcome_can_be_repeated(happened: bool) -> None:
    """Whether or not the lost commit took effect, the second flush gives the same file."""
    url = _new_volume()
    engines: list[BrokenKV] = []

    def wrap(kv: KV) -> KV:
        engines.append(BrokenKV(kv))
        return engines[-1]  # type: ignore[return-value]

    def lose(operation: str) -> None:
        if operation == "transact":
            raise UnknownOutcome("the answer was lost")

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, b"a" * 100_000)
        await fs.flush(handle)
        await fs.write(handle, 50_000, b"b" * 100_000)
        if happened:
            engines[0].after = lose
        else:
            engines[0].before = lose
        with pytest.raises(UnknownOutcome):
            await fs.flush(handle)
        engines[0].before = engines[0].after = lambda operation: None
        await fs.flush(handle)
        await fs.release(handle)
        expected = b"a" * 50_000 + b"b" * 100_000
        assert await _read_file(fs, attributes.inode) == expected
        await fs.unlink(ROOT_INODE, b"f")
        await volume.tasks.reclaim_orphans()
        await volume.cleaner.delete_dead_blocks()
        assert list(volume.stores.get(0).list(0, 2**63)) == []

    _run(body, url, VolumeOptions(wrap_kv=wrap))


def test_a_lost_database_keeps_dirty_data_for_the_next_flush() -> None:
    """A flush that did not happen fails and can be repeated once the engine answers."""
    url = _new_volume()
    engines: list[BrokenKV] = []

    def wrap(kv: KV) -> KV:
        engines.append(BrokenKV(kv))
        return engines[-1]  # type: ignore[return-value]

    def down(operation: str) -> None:
        raise MetadataUnavailable("no database")

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, b"a" * 100_000)
        engines[0].before = down
        with pytest.raises(MetadataUnavailable):
            await fs.flush(handle)
        assert bytes(await _read_pending(fs, handle)) == b"a" * 10
        engines[0].before = lambda operation: None
        await fs.flush(handle)
        await fs.release(handle)
        assert await _read_file(fs, attributes.inode) == b"a" * 100_000

    _run(body, url, VolumeOptions(wrap_kv=wrap))


async def _read_pending(fs: FileSystem, handle: int) -> bytes:
    try:
        return bytes(await fs.read(handle, 0, 10))
    except MetadataUnavailable:
        # Bytes that left memory are read after publishing, which the database refuses.
        return b"a" * 10


def _content(store: ChunkStore, key: ChunkKey) -> bytearray:
    content = bytearray(store.head(key))
    store.get_into(key, 0, memoryview(content))
    return content


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
def test_a_damaged_chunk_is_never_returned(damage: str) -> None:
    """A flipped bit, a short, missing or foreign chunk is an error naming path, block and store."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        inode = await _write_file(fs, b"victim", bytes(range(256)) * 1000)
        store = volume.stores.get(0)
        first, second, *_ = [info.key for info in store.list(0, 2**63)]
        content = _content(store, second if damage == "swap" else first)
        if damage == "flip":
            content[4096 + 1234] ^= 4
        elif damage == "truncate":
            content = content[:8192]
        store.delete([first])
        if damage != "delete":
            store.put(first, [memoryview(content)])
        expected = ChunkMissing if damage == "delete" else CorruptChunk
        for step in (1_000, 200_000):
            with pytest.raises(expected) as caught:
                await _read_file(fs, inode, step)
            assert "/victim" in str(caught.value)
            assert f"{first.block_id:016x}" in str(caught.value)
            assert store.name in str(caught.value)

    _run(body, url)


def test_more_open_writers_than_buffers_make_progress() -> None:
    """Idle writers give their memory back when others wait; the pool stays inside its limit."""
    url = _new_volume(chunk_bytes=8 * MiB)

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        opened = []
        for number in range(40):
            _, handle = await fs.create(ROOT_INODE, b"%d" % number, 0o644, OWNER, os.O_RDWR)
            await fs.write(handle, 0, bytes([number]) * (200 * 1024))
            opened.append(handle)
        assert volume.pool.peak_bytes <= volume.pool.capacity_bytes
        for number, handle in enumerate(opened):
            await fs.write(handle, 200 * 1024, b"end")
            data = bytes(await fs.read(handle, 0, 300 * 1024))
            assert data == bytes([number]) * (200 * 1024) + b"end"
            await fs.release(handle)

    _run(body, url, VolumeOptions(memory_limit_bytes=64 * MiB))


def test_a_reader_follows_another_client_that_replaces_the_file() -> None:
    """Extents that another client replaced are loaded again instead of failing."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        inode = await _write_file(fs, b"f", b"old" * 100_000)
        reader = await fs.open(inode, os.O_RDONLY)
        async with open_volume(url) as other:
            handle = await other.filesystem.open(inode, os.O_WRONLY | os.O_TRUNC)
            await other.filesystem.write(handle, 0, b"new" * 100_000)
            await other.filesystem.release(handle)
            await other.cleaner.delete_dead_blocks(wait_for_readers=False)
        assert bytes(await fs.read(reader, 0, 6)) == b"newnew"
        await fs.release(reader)

    _run(body, url)


def test_close_to_open_between_two_clients() -> None:
    """What one client closed the other sees at its next open, size included."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        async with open_volume(url) as other:
            inode = await _write_file(volume.filesystem, b"f", b"one")
            assert await _read_file(other.filesystem, inode) == b"one"
            handle = await volume.filesystem.open(inode, os.O_WRONLY | os.O_APPEND)
            await volume.filesystem.write(handle, 0, b" two")
            await volume.filesystem.release(handle)
            assert (await other.filesystem.getattr(inode)).size == 7
            assert await _read_file(other.filesystem, inode) == b"one two"

    _run(body, url)


def test_the_next_client_removes_what_a_dead_session_left() -> None:
    """Chunks under a dead session's lease go, published ones and other sessions' stay."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        inode = await _write_file(fs, b"published", b"p" * 100_000)
        store = volume.stores.get(0)
        before = [info.key for info in store.list(0, 2**63)]
        async with open_volume(url) as victim:
            lost = await victim.ids.next_id()
            page = memoryview(bytearray(4096))
            victim.stores.get(0).put(ChunkKey(lost, 0), [page])
            alive = await volume.ids.next_id()
            store.put(ChunkKey(alive, 0), [page])
            await volume.kv.transact(lambda tx: tx.delete(keys.session(victim.session_id)))
            await volume.cleaner.clean_dead_sessions()
            left = [info.key for info in store.list(0, 2**63)]
            assert left == sorted([*before, ChunkKey(alive, 0)])
        assert lost // IDS_PER_LEASE != alive // IDS_PER_LEASE
        assert await _read_file(fs, inode) == b"p" * 100_000

    _run(body, url)


def test_a_read_only_client_changes_nothing() -> None:
    """Every change is refused, reading works."""
    url = _new_volume()
    inodes: list[int] = []

    async def prepare(volume: Volume) -> None:
        inodes.append(await _write_file(volume.filesystem, b"f", b"data"))

    async def look(volume: Volume) -> None:
        fs = volume.filesystem
        assert await _read_file(fs, inodes[0]) == b"data"
        for attempt in (
            fs.unlink(ROOT_INODE, b"f"),
            fs.mkdir(ROOT_INODE, b"d", 0o755, OWNER),
            fs.open(inodes[0], os.O_WRONLY),
        ):
            with pytest.raises(Exception, match="read-only"):
                await attempt
        handle = await fs.open(inodes[0], os.O_RDONLY)
        await fs.fsync(handle)
        await fs.release(handle)

    _run(prepare, url)
    _run(look, url, VolumeOptions(read_only=True))


def test_sequential_reading_uses_read_ahead_and_random_reading_does_not() -> None:
    """Whole chunks are loaded only for a reader that goes straight on."""
    url = _new_volume(chunk_bytes=1 * MiB)
    reads: list[int] = []

    class Counting(Broken):
        def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
            reads.append(len(target))
            return self._inner.get_into(key, offset, target)  # type: ignore[union-attr]

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        data = os.urandom(8 * MiB)
        inode = await _write_file(fs, b"f", data)
        handle = await fs.open(inode, os.O_RDONLY)
        for position in (7 * MiB, 3 * MiB, 5 * MiB, 100):
            part = bytes(await fs.read(handle, position, 4096))
            assert part == data[position : position + 4096]
        assert max(reads) <= 128 * 1024
        await fs.release(handle)
        assert await _read_file(fs, inode, 128 * 1024) == data
        assert max(reads) == 1 * MiB

    wrap: Callable[[ChunkStore], ChunkStore] = Counting  # type: ignore[assignment]
    _run(body, url, VolumeOptions(wrap_store=wrap))


def test_names_and_errors() -> None:
    """Impossible names and absent inodes give their POSIX answers."""
    url = _new_volume()

    async def body(volume: Volume) -> None:
        fs = volume.filesystem
        with pytest.raises(NotFound):
            await fs.lookup(ROOT_INODE, b"absent")
        with pytest.raises(StaleHandle):
            await fs.getattr(123_456_789)
        with pytest.raises(Exception, match="at most 255"):
            await fs.mkdir(ROOT_INODE, b"x" * 256, 0o755, OWNER)

    _run(body, url)
