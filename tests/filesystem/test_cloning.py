"""Clones: what they hold, what they share, and that they appear whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from tectonic_client.errors import (
    Exists,
    InvalidArgument,
    NotFound,
    ReadOnly,
    StaleHandle,
    TectonicError,
    TransactionConflict,
    UnknownOutcome,
)
from tectonic_client.filesystem import cloning
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.types import ROOT_INODE, AttributeChanges, Owner
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import (
    KINDS,
    OWNER,
    Faults,
    Kind,
    end_sessions_left_by_this_process,
    failing_client,
    insist,
    load_file,
    new_volume,
    store_file,
)
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine"]

DATA = bytes(range(256)) * 1000
"""Some blocks of the test volumes."""

MAX_STEPS = 80


async def _inode(fs: FileSystem, path: str) -> int:
    return await fs.resolve(path, follow=False)


async def _chunks(volume: Volume) -> int:
    stores = [
        await volume.stores.run(store_id, lambda store: list(store.list(0, 2**63)))
        for store_id in volume.stores.ids()
    ]
    return sum(map(len, stores))


async def _tree(fs: FileSystem, directory: int) -> dict[str, tuple[object, ...]]:
    """What cp -a would keep of everything below a directory, by path."""
    found: dict[str, tuple[object, ...]] = {}

    async def walk(inode: int, prefix: str) -> None:
        handle = await fs.opendir(inode)
        cookie = 0
        while page := await fs.readdir(handle, cookie):
            for _, name, a in page:
                path = f"{prefix}/{os.fsdecode(name)}"
                content: object = None
                if stat.S_ISREG(a.mode):
                    content = await _content(fs, a.inode)
                elif stat.S_ISLNK(a.mode):
                    content = await fs.readlink(a.inode)
                nlink = a.nlink
                found[path] = (a.mode, a.uid, a.gid, a.rdev, a.size, a.mtime_ns, nlink, content)
                if stat.S_ISDIR(a.mode):
                    await walk(a.inode, path)
            cookie = page[-1].cookie
        await fs.releasedir(handle)

    await walk(directory, "")
    return found


async def _content(fs: FileSystem, inode: int) -> bytes:
    handle = await fs.open(inode, os.O_RDONLY)
    try:
        size = (await fs.getattr(inode)).size
        return b"".join(
            [bytes(await fs.read(handle, at, 100_000)) for at in range(0, size, 100_000)]
        )
    finally:
        await fs.release(handle)


async def _make_tree(fs: FileSystem) -> int:
    """Files of several sizes, a sparse one, links, a fifo, directories in directories."""
    top = (await fs.mkdir(ROOT_INODE, b"top", 0o750, OWNER)).inode
    inner = (await fs.mkdir(top, b"inner", 0o2755, OWNER)).inode
    await fs.mkdir(inner, b"empty", 0o700, OWNER)
    await fs.symlink(inner, b"link", b"../nowhere", OWNER)
    await fs.mknod(inner, b"fifo", stat.S_IFIFO | 0o600, OWNER)
    for number in range(5):
        _, handle = await fs.create(inner, b"file-%d" % number, 0o640, OWNER, os.O_RDWR)
        await fs.write(handle, number * 200_000, DATA[: number * 50_000])
        await fs.flush(handle)
        await fs.release(handle)
    linked = (await fs.lookup(inner, b"file-3")).inode
    await fs.link(linked, top, b"another-name")
    for inode in (linked, inner, top):
        await fs.setattr(inode, AttributeChanges(mtime_ns=1_000_000_007))
    return top


def _on(url: str, work: Callable[[Volume], Awaitable[None]]) -> None:
    """Run `work` with a client; another one then finds nothing left over."""

    async def main() -> None:
        with trio.fail_after(120):
            async with open_volume(url) as volume:
                await work(volume)
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


@pytest.mark.postgres
def test_a_tree_is_cloned_without_a_chunk(any_engine: NewVolume) -> None:
    """Everything that cp -a keeps is there, and the stores hold no chunk more."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = await _make_tree(fs)
        chunks = await _chunks(volume)
        seen: list[int] = []
        report = await fs.clone(
            top, ROOT_INODE, b"copy", on_progress=lambda report: seen.append(report.files)
        )
        assert await _chunks(volume) == chunks
        copy = await fs.lookup(ROOT_INODE, b"copy")
        assert await _tree(fs, copy.inode) == await _tree(fs, top)
        original = await fs.getattr(top)
        assert (copy.mode, copy.nlink, copy.mtime_ns) == (original.mode, 3, 1_000_000_007)
        assert (report.files, report.directories, report.others) == (5, 3, 2)
        assert seen[-1] == 5
        names = [await _inode(fs, f"/copy/{name}") for name in ("another-name", "inner/file-3")]
        assert names[0] == names[1] != await _inode(fs, "/top/another-name")

    _on(any_engine(), work)


def test_original_and_clone_go_separate_ways() -> None:
    """Writes, truncation and deletion of one are not seen in the other; the last one's end frees
    the chunks."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        await store_file(fs, b"a", DATA)
        inode = (await fs.lookup(ROOT_INODE, b"a")).inode
        for name in (b"b", b"c"):
            await fs.clone(inode, ROOT_INODE, name)
        await store_file(fs, b"a", b"new", offset=70_000)
        await fs.setattr(await _inode(fs, "/b"), AttributeChanges(size=100))
        assert await load_file(fs, b"a") == DATA[:70_000] + b"new" + DATA[70_003:]
        assert await load_file(fs, b"b") == DATA[:100]
        await fs.unlink(ROOT_INODE, b"a")
        await clean(volume)
        assert await load_file(fs, b"c") == DATA
        for name in (b"b", b"c"):
            await fs.unlink(ROOT_INODE, name)
        await clean(volume)
        assert await _chunks(volume) == 0

    _on(new_volume(), work)


def test_a_clone_holds_what_was_not_flushed_yet() -> None:
    """This client's own writes are part of the clone, whether or not they were flushed."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"a", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, DATA)
        await fs.clone(attributes.inode, ROOT_INODE, b"b")
        await fs.release(handle)
        assert await load_file(fs, b"b") == DATA

    _on(new_volume(), work)


def test_many_extents_take_many_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of more extents than one transaction may copy is cloned whole, alone and in a tree."""
    monkeypatch.setattr(cloning, "RECLAIM_BATCH_ROWS", 2)
    monkeypatch.setattr(cloning, "CLONE_BATCH_ENTRIES", 2)

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = await _make_tree(fs)
        await fs.clone(top, ROOT_INODE, b"copy")
        assert await _tree(fs, await _inode(fs, "/copy")) == await _tree(fs, top)
        await store_file(fs, b"a", DATA * 3)
        await fs.clone(await _inode(fs, "/a"), ROOT_INODE, b"b")
        assert await load_file(fs, b"b") == DATA * 3

    _on(new_volume(), work)


@pytest.mark.parametrize("changes", [1, 100])
def test_a_file_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
    """Its clone is one state of it; where it never stands still, an error and no clone."""
    monkeypatch.setattr(cloning, "RECLAIM_BATCH_ROWS", 1)
    left = changes

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        await store_file(fs, b"a", DATA)
        inode = await _inode(fs, "/a")
        transact = volume.kv.transact

        async def changing(fn: Callable[..., object], **options: bool) -> object:
            """Another client changes the file just before each look whether it has changed."""
            nonlocal left
            if getattr(fn, "func", None) is cloning.Cloner._settle and left:
                left -= 1
                async with open_volume(volume.url) as other:
                    await store_file(other.filesystem, b"a", bytes([left]) * len(DATA))
            return await transact(fn, **options)

        monkeypatch.setattr(volume.kv, "transact", changing)
        if changes == 1:
            await fs.clone(inode, ROOT_INODE, b"b")
            assert await load_file(fs, b"b") == bytes(len(DATA))
        else:
            with pytest.raises(TransactionConflict, match="changed"):
                await fs.clone(inode, ROOT_INODE, b"b")
            assert not await fs.exists("/b")
        monkeypatch.undo()

    _on(new_volume(), work)


def test_what_is_refused() -> None:
    """A name that exists, no directory to clone into, a directory into itself, a removed source, a
    read-only client: a typed error, and nothing is made."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = await _make_tree(fs)
        inner = await _inode(fs, "/top/inner")
        with pytest.raises(Exists):
            await fs.clone(inner, top, b"inner")
        for into in (top, inner):
            with pytest.raises(InvalidArgument, match="itself"):
                await fs.clone(top, into, b"copy")
        with pytest.raises(StaleHandle):
            await fs.clone(inner, 12_345, b"copy")
        with pytest.raises(StaleHandle):
            await fs.clone(12_345, top, b"copy")
        handle = await fs.open(await _inode(fs, "/top/inner/file-1"), os.O_RDONLY)
        removed = await _inode(fs, "/top/inner/file-1")
        await fs.unlink(inner, b"file-1")
        with pytest.raises(StaleHandle):
            await fs.clone(removed, top, b"copy")
        await fs.release(handle)
        assert not await fs.exists("/top/copy")
        async with open_volume(volume.url, VolumeOptions(read_only=True)) as reader:
            with pytest.raises(ReadOnly):
                await reader.filesystem.clone(inner, top, b"copy")

    _on(new_volume(), work)


def test_another_owner_gets_no_setuid_program() -> None:
    """Copies belong to who made them, without the bits that were meant for the original's owner."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        made = await fs.mknod(ROOT_INODE, b"a", stat.S_IFREG | 0o6755, OWNER)
        other = Owner(OWNER.uid + 1, OWNER.gid + 1)
        await fs.clone(made.inode, ROOT_INODE, b"b", other)
        copy = await fs.lookup(ROOT_INODE, b"b")
        assert (copy.uid, copy.gid, stat.S_IMODE(copy.mode)) == (*other, 0o755)
        await fs.clone(made.inode, ROOT_INODE, b"c", OWNER)
        assert stat.S_IMODE((await fs.lookup(ROOT_INODE, b"c")).mode) == 0o6755

    _on(new_volume(), work)


def test_a_cancelled_clone_leaves_nothing() -> None:
    """Cancelled anywhere on its way: no name, and what was copied is reclaimed."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = await _make_tree(fs)
        before = await _tree(fs, ROOT_INODE)
        for after in range(1, 12):
            calls = 0
            with trio.CancelScope() as scope:

                def stop(_: object, scope: trio.CancelScope = scope, after: int = after) -> None:
                    nonlocal calls
                    calls += 1
                    if calls == after:
                        scope.cancel()

                await fs.clone(top, ROOT_INODE, b"copy", on_progress=stop)
            if not scope.cancelled_caught:
                break
            assert await _tree(fs, ROOT_INODE) == before
            await volume.tasks.reclaim_orphans()
            await clean(volume)
            await assert_no_leaks(volume)
        assert calls > 5

    _on(new_volume(), work)


@pytest.mark.parametrize("kind", KINDS[:5], ids=str)
def test_cloning_survives_a_fault_at_each_step(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clone is whole or not there, and a second try makes it; nothing is left over."""
    monkeypatch.setattr(cloning, "RECLAIM_BATCH_ROWS", 3)
    monkeypatch.setattr(cloning, "CLONE_BATCH_ENTRIES", 3)

    async def attempt(n: int) -> bool:
        url, faults = new_volume(), Faults()
        async with open_volume(url) as volume:
            top = await _make_tree(volume.filesystem)
            expected = await _tree(volume.filesystem, top)
        with suppress(TectonicError):  # closing may meet the fault too
            async with failing_client(url, faults) as volume:
                fs = volume.filesystem
                kind.plan(faults, n)
                unsure = False
                try:
                    await fs.clone(top, ROOT_INODE, b"copy")
                except TectonicError as error:
                    unsure = isinstance(error, UnknownOutcome)
                came = not faults.pending
                faults.clear()
                with suppress(NotFound):
                    copy = await fs.lookup(ROOT_INODE, b"copy")
                    assert await _tree(fs, copy.inode) == expected
                    assert not came or unsure
                    return came
                await insist(lambda: fs.clone(top, ROOT_INODE, b"copy"))
                assert await _tree(fs, await _inode(fs, "/copy")) == expected
        async with open_volume(url) as volume:
            await end_sessions_left_by_this_process(volume)
            await clean(volume)
            await assert_no_leaks(volume)
        return came

    async def main() -> None:
        for n in range(1, MAX_STEPS):
            with trio.fail_after(30):
                try:
                    if not await attempt(n):
                        return
                except BaseException as error:
                    error.add_note(f"the fault was at step {n}")
                    raise
        raise AssertionError(f"more than {MAX_STEPS} steps")

    trio.run(main)
