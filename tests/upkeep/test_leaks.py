"""The leak checker finds every record and chunk that is missing, or there for nothing."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.metadata import files, keys, sessions
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import FormatOptions, Volume, format_volume, open_volume
from tests.leaks import assert_no_leaks, find_leaks

OWNER = Owner(0, 0)


def _run(name: str, body: Callable[[Volume], Awaitable[None]]) -> None:
    url = f"memory://{name}"
    format_volume(
        url,
        FormatOptions(
            name="leaks", stores=(f"{url}-0", f"{url}-1"), chunk_bytes=65_536, block_bytes=131_072
        ),
    )

    async def main() -> None:
        with trio.fail_after(60):
            async with open_volume(url) as volume:
                await _fill(volume)
                await assert_no_leaks(volume)
                await body(volume)

    trio.run(main)


async def _fill(volume: Volume) -> None:
    """A little of everything that a volume can hold."""
    fs = volume.filesystem
    outer = await fs.mkdir(ROOT_INODE, b"outer", 0o755, OWNER)
    inner = await fs.mkdir(outer.inode, b"inner", 0o755, OWNER)
    await fs.symlink(outer.inode, b"link", b"../target", OWNER)
    file, handle = await fs.create(inner.inode, b"file", 0o644, OWNER, os.O_RDWR)
    for position in (0, 150_000, 50_000):
        await fs.write(handle, position, bytes(200_000))
        await fs.flush(handle)
    await fs.release(handle)
    await fs.link(file.inode, ROOT_INODE, b"second")
    await volume.cleaner.delete_dead_blocks()


def test_every_missing_record_is_found() -> None:
    """Whichever single record is taken away, the checker finds it, and nothing once it is back."""

    async def body(volume: Volume) -> None:
        rows = await volume.kv.read(lambda tx: tx.scan(b"", b"\xff"))
        free = (keys.GLOBAL, keys.SESSION, keys.LEASE)
        for key, value in rows:
            times = key[:1] == keys.FILE and key[11:12] == keys.PARENT_TIMES
            if key[:1] in free or times:
                continue
            await volume.kv.transact(lambda tx, key=key: tx.delete(key))
            assert await find_leaks(volume), f"{key!r} is not missed"
            await volume.kv.transact(lambda tx, key=key, value=value: tx.put(key, value))
        await assert_no_leaks(volume)

    _run("missing-records", body)


def test_every_missing_or_surplus_chunk_is_found() -> None:
    """A chunk that is gone, short, in the wrong store or named by nothing is a finding."""

    async def body(volume: Volume) -> None:
        for store_id in volume.stores.ids():
            store, other = volume.stores.get(store_id), volume.stores.get(1 - store_id)
            for info in list(store.list(0, 2**63)):
                content = bytearray(info.size_bytes)
                store.get_into(info.key, 0, memoryview(content))
                store.delete([info.key])
                assert await find_leaks(volume)
                other.put(info.key, [memoryview(content)])
                assert await find_leaks(volume)
                other.delete([info.key])
                store.put(info.key, [memoryview(content)[:4096]])
                assert await find_leaks(volume)
                store.delete([info.key])
                store.put(info.key, [memoryview(content)])
        await assert_no_leaks(volume)
        volume.stores.get(0).put(ChunkKey(2**40, 0), [memoryview(bytes(4096))])
        assert await find_leaks(volume)

    _run("missing-chunks", body)


def test_what_a_dead_client_left_is_found() -> None:
    """A lease without its session, a session without its process, and a dead block are findings."""

    async def body(volume: Volume) -> None:
        session_id = await volume.kv.transact(lambda tx: sessions.open_session(tx, "victim"))
        lease = await volume.kv.transact(lambda tx: sessions.take_lease(tx, session_id))
        await assert_no_leaks(volume)
        await volume.kv.transact(lambda tx: tx.delete(keys.session(session_id)))
        assert await find_leaks(volume) == [
            f"lease {lease} belongs to session {session_id}, which ended"
        ]
        await volume.kv.transact(lambda tx: sessions.drop_lease(tx, lease))
        await volume.filesystem.unlink(ROOT_INODE, b"second")
        await assert_no_leaks(volume)
        inode = await volume.filesystem.resolve(b"/outer/inner/file")
        # Not through the file system, whose background tasks would clean up behind it.
        await volume.kv.transact(lambda tx: files.cut(tx, inode, 0))
        assert await find_leaks(volume)
        await volume.cleaner.delete_dead_blocks()
        await assert_no_leaks(volume)

    _run("dead-client", body)
