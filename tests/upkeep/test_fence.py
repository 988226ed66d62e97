"""Clients that are declared dead while they live: they lose what they had not published, no more.

The victim claims to be of another host, so that only its heartbeat tells that it lives. It is
stopped, declared dead and cleaned up after at each step of what it does, and then goes on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import trio

from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.errors import SessionLost, StaleHandle
from tectonic_client.kv.port import KV
from tectonic_client.metadata import sessions
from tectonic_client.metadata.sessions import Host
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.faultrig import OWNER, load_file, load_tree, new_volume, store_file
from tests.leaks import assert_no_leaks, clean

OLD = bytes(range(256)) * 900
NEW = bytes(reversed(range(256))) * 1100

MAX_STEPS = 60


class Pause:
    """Runs `meanwhile` at the n-th step of a client, which stands still until it has ended."""

    def __init__(self, n: int, meanwhile: Callable[[], None]) -> None:
        self._left = n
        self._meanwhile = meanwhile
        self.armed = False

    @property
    def came(self) -> bool:
        """Whether the client got that far."""
        return self._left <= 0

    def step(self) -> None:
        """The client is between two steps."""
        if self.armed:
            self._left -= 1
            if self._left == 0:
                with ThreadPoolExecutor(1) as thread:  # a loop of its own needs a thread of its own
                    thread.submit(self._meanwhile).result()

    def options(self) -> VolumeOptions:
        """How to open the client."""
        return VolumeOptions(
            wrap_kv=lambda kv: _PausedKV(kv, self),  # type: ignore[arg-type,return-value]
            wrap_store=lambda store: _PausedStore(store, self),  # type: ignore[arg-type,return-value]
        )


class _PausedKV:
    """Steps before and after each transaction."""

    def __init__(self, inner: KV, pause: Pause) -> None:
        self._inner = inner
        self._pause = pause
        self.reads_may_block = False
        self.read = inner.read

    def transact(self, fn: Callable[[object], object], *, durable: bool = False) -> object:
        self._pause.step()
        result = self._inner.transact(fn, durable=durable)
        self._pause.step()
        return result


class _PausedStore:
    """Steps before and after each put and delete."""

    def __init__(self, inner: ChunkStore, pause: Pause) -> None:
        self._inner = inner
        self._pause = pause

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self._pause.step()
        self._inner.put(key, parts)
        self._pause.step()

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        self._pause.step()
        self._inner.delete(keys)
        self._pause.step()


@asynccontextmanager
async def _of_another_host(
    url: str, options: VolumeOptions, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Volume]:
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "this_host", lambda: Host("elsewhere", "elsewhere"))
        client = open_volume(url, options)
        volume = await client.__aenter__()
    try:
        yield volume
    except BaseException as error:
        await client.__aexit__(type(error), error, error.__traceback__)
        raise
    await client.__aexit__(None, None, None)


async def _declare_dead_and_go_on(url: str) -> None:
    """What the others do meanwhile: clean up, and write files of their own."""
    async with open_volume(url) as volume:
        await clean(volume)
        await store_file(volume.filesystem, b"others", OLD)
        # No look at leftovers yet: the victim's threads may be putting chunks right now.
        await clean(volume)


async def _write(volume: Volume) -> None:
    await store_file(volume.filesystem, b"new", NEW)


async def _overwrite(volume: Volume) -> None:
    await store_file(volume.filesystem, b"old", NEW, offset=500)


async def _write_long_unflushed(volume: Volume) -> None:
    fs = volume.filesystem
    handle = await fs.open((await fs.lookup(ROOT_INODE, b"old")).inode, os.O_RDWR)
    try:
        for offset in range(0, len(NEW), 50_000):
            await fs.write(handle, offset, NEW[offset : offset + 50_000])
    finally:
        await fs.release(handle)


async def _remove(volume: Volume) -> None:
    await volume.filesystem.unlink(ROOT_INODE, b"old")
    await volume.tasks.reclaim_orphans()
    await volume.cleaner.delete_dead_blocks()


async def _make_directories(volume: Volume) -> None:
    fs = volume.filesystem
    top = await fs.mkdir(ROOT_INODE, b"given up", 0o755, OWNER)
    await fs.rmdir(ROOT_INODE, b"given up")
    await volume.tasks.reclaim_orphans()
    with pytest.raises(StaleHandle):
        await fs.getattr(top.inode)


@pytest.mark.parametrize(
    "work", [_write, _overwrite, _write_long_unflushed, _remove, _make_directories]
)
def test_a_client_declared_dead_at_any_step_harms_nobody(
    work: Callable[[Volume], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It succeeds or gets SessionLost; nothing of it is half there, leaked, or others' to miss."""

    async def attempt(n: int) -> bool:
        url, lost = new_volume(), False

        def meanwhile() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sessions, "SESSION_EXPIRY_S", 0.0)
                trio.run(_declare_dead_and_go_on, url)

        async with open_volume(url) as volume:
            await store_file(volume.filesystem, b"old", OLD)
        pause = Pause(n, meanwhile)
        try:
            async with _of_another_host(url, pause.options(), monkeypatch) as victim:
                await trio.testing.wait_all_tasks_blocked()
                pause.armed = True
                await work(victim)
        except SessionLost:
            lost = True
        assert victim.pool.used_bytes == 0, "leaked buffers"
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            found = await load_tree(volume.filesystem)
        assert found.pop(b"others", OLD) == OLD
        assert _is_before(found) if lost else not _is_before(found) or work is _make_directories
        return pause.came

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            with trio.fail_after(20):
                try:
                    if not await attempt(n):
                        return
                except BaseException as error:
                    error.add_note(f"declared dead at step {n}")
                    raise
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)


def _is_before(found: dict[bytes, bytes]) -> bool:
    """Whether the file system's content is what it was, but for an empty new file."""
    return found == {b"old": OLD} or found == {b"old": OLD, b"new": b""}


def test_reading_goes_on_after_the_session_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose session ended reads what is published, by others too."""

    async def main() -> None:
        url = new_volume()
        async with _of_another_host(url, VolumeOptions(), monkeypatch) as victim:
            await store_file(victim.filesystem, b"old", OLD)
            await victim.kv.transact(
                lambda tx: sessions.end_session(tx, victim.session_id, victim.ids.leases)
            )
            async with open_volume(url) as other:
                await store_file(other.filesystem, b"others", NEW)
            assert await load_file(victim.filesystem, b"others") == NEW
            with pytest.raises(SessionLost):
                await victim.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)

    trio.run(main)
