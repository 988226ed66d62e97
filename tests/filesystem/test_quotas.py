"""Quotas: what counts, what is refused, and that the count is right whatever happens."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.errors import (
    CrossQuota,
    FileSystemError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    TectonicError,
)
from tectonic_client.filesystem import quotasetting
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.filesystem.quotasetting import QuotaReport, QuotaSetting, list_quotas, report
from tectonic_client.types import ROOT_INODE, AttributeChanges, RenameFlag
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import OWNER, Faults, failing_client, new_volume
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine"]

KB = 1000


def _on(url: str, work: Callable[[Volume], Awaitable[None]]) -> None:
    """Run `work` with a client; another one then finds every count right and nothing left over."""

    async def main() -> None:
        with trio.fail_after(120):
            async with open_volume(url) as volume:
                await work(volume)
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


async def _set(volume: Volume, directory: int, size: int = 0, inodes: int = 0) -> None:
    await QuotaSetting(volume.kv, volume.ids, lambda seen: None).set(directory, size, inodes)


async def _report(volume: Volume, directory: int) -> QuotaReport:
    return await volume.kv.read(lambda tx: report(tx, directory))


async def _mkdir(fs: FileSystem, name: bytes, parent: int = ROOT_INODE) -> int:
    return (await fs.mkdir(parent, name, 0o755, OWNER)).inode


async def _write(fs: FileSystem, directory: int, name: bytes, size: int) -> int:
    attributes, handle = await fs.create(directory, name, 0o644, OWNER, os.O_RDWR)
    try:
        await fs.write(handle, 0, bytes(size))
        await fs.flush(handle)
    finally:
        await fs.release(handle)
    return attributes.inode


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few entries per transaction that a small tree takes several."""
    monkeypatch.setattr(quotasetting, "QUOTA_BATCH_ENTRIES", 2)


def test_bytes_are_limited(any_engine: NewVolume) -> None:
    """Writes and truncation beyond the limit are refused at once, also before anything is flushed;
    what is removed makes room."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        await _set(volume, home, size=500 * KB)
        first = await _write(fs, home, b"a", 300 * KB)
        _, handle = await fs.create(home, b"b", 0o644, OWNER, os.O_RDWR)
        await fs.write(handle, 0, bytes(150 * KB))
        with pytest.raises(QuotaExceeded, match="500000"):
            await fs.write(handle, 150 * KB, bytes(100 * KB))
        await fs.write(handle, 0, bytes(100 * KB))  # what is there may be overwritten
        await fs.write(handle, 150 * KB, bytes(50 * KB))
        await fs.release(handle)
        assert (await _report(volume, home)).used_bytes == 500 * KB
        with pytest.raises(QuotaExceeded):
            await fs.setattr(first, AttributeChanges(size=301 * KB))
        await fs.unlink(home, b"b")
        await fs.setattr(first, AttributeChanges(size=500 * KB))
        await fs.setattr(first, AttributeChanges(size=KB))
        assert await _report(volume, home) == QuotaReport(home, 500 * KB, 0, KB, 2)

    _on(any_engine(), work)


def test_inodes_are_limited() -> None:
    """Of whatever type; an open file without a name counts no more."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        await _set(volume, home, inodes=4)
        inner = await _mkdir(fs, b"inner", home)
        await fs.symlink(inner, b"link", b"target", OWNER)
        _, handle = await fs.create(inner, b"file", 0o644, OWNER, os.O_RDWR)
        for name in (b"one", b"two"):
            with pytest.raises(QuotaExceeded, match="4 inodes"):
                await fs.mknod(inner, name, stat.S_IFIFO | 0o644, OWNER)
        await fs.unlink(inner, b"file")
        await fs.mknod(inner, b"fifo", stat.S_IFIFO | 0o644, OWNER)
        await fs.release(handle)
        await _mkdir(fs, b"outside")
        assert (await _report(volume, inner)).used_inodes == 4

    _on(new_volume(), work)


@pytest.mark.usefixtures("small_pages")
def test_what_is_there_already_counts() -> None:
    """Setting a quota on a tree counts all of it; changing and removing it needs no new count."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        for number in range(5):
            inner = await _mkdir(fs, b"inner-%d" % number, home)
            await _write(fs, inner, b"file", 10 * KB)
            await fs.symlink(inner, b"link", b"target", OWNER)
        await _set(volume, home, size=20 * KB)
        assert await _report(volume, home) == QuotaReport(home, 20 * KB, 0, 50 * KB, 16)
        with pytest.raises(QuotaExceeded):
            await _write(fs, home, b"more", 1)
        await QuotaSetting(volume.kv, volume.ids, lambda seen: None).set(home, None, 99)
        assert await _report(volume, home) == QuotaReport(home, 20 * KB, 99, 50 * KB, 17)
        assert await volume.kv.read(list_quotas) == [await _report(volume, home)]
        await QuotaSetting(volume.kv, volume.ids, lambda seen: None).remove(home)
        await _write(fs, home, b"even more", 100 * KB)
        with pytest.raises(NotFound):
            await _report(volume, home)
        assert await volume.kv.read(list_quotas) == []

    _on(new_volume(), work)


@pytest.mark.usefixtures("small_pages")
def test_no_name_crosses_the_border() -> None:
    """Links and renames into, out of and between quotas are refused; within one they work, and a
    directory may move with its own quota."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        one, two, free = [await _mkdir(fs, name) for name in (b"one", b"two", b"free")]
        for directory in (one, two):
            await _set(volume, directory, size=100 * KB)
        inner = await _mkdir(fs, b"inner", one)
        files = {place: await _write(fs, place, b"file", KB) for place in (one, two, free)}
        for source, target in ((one, two), (one, free), (free, one)):
            with pytest.raises(CrossQuota):
                await fs.rename(source, b"file", target, b"moved")
            with pytest.raises(CrossQuota):
                await fs.link(files[source], target, b"linked")
            with pytest.raises(CrossQuota):
                await fs.rename(source, b"file", target, b"file", RenameFlag.EXCHANGE)
        await fs.rename(one, b"file", inner, b"moved")
        await fs.link(files[one], one, b"linked")
        await fs.rename(ROOT_INODE, b"one", free, b"one")
        with pytest.raises(CrossQuota):
            await fs.rename(free, b"one", two, b"one")
        assert await _report(volume, inner) == QuotaReport(one, 100 * KB, 0, KB, 3)

    _on(new_volume(), work)


def test_quotas_do_not_nest() -> None:
    """Neither below nor above another one can a quota be set, and the first stays as it is."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = await _mkdir(fs, b"top")
        middle = await _mkdir(fs, b"middle", top)
        inner = await _mkdir(fs, b"inner", middle)
        await _set(volume, middle, size=KB)
        for directory in (top, inner):
            with pytest.raises(InvalidArgument, match="within each other"):
                await _set(volume, directory, size=KB)
        assert await _report(volume, middle) == QuotaReport(middle, KB, 0, 0, 2)
        with pytest.raises(NotFound):
            await QuotaSetting(volume.kv, volume.ids, lambda seen: None).remove(inner)
        with pytest.raises(NotFound):
            await _report(volume, top)

    _on(new_volume(), work)


def test_removing_the_directory_removes_its_quota() -> None:
    """Nothing of the quota stays behind."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        await _set(volume, home, size=KB)
        await fs.rmdir(ROOT_INODE, b"home")
        await clean(volume)
        assert await volume.kv.read(list_quotas) == []

    _on(new_volume(), work)


def test_clones_count() -> None:
    """A clone counts like a copy; one that has no room is not made."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        await _set(volume, home, size=100 * KB)
        source = await _mkdir(fs, b"source", home)
        await _write(fs, source, b"file", 30 * KB)
        await fs.clone(source, home, b"first")
        await fs.clone(source, ROOT_INODE, b"outside")
        await fs.clone(await fs.resolve("/outside"), home, b"second")
        with pytest.raises(QuotaExceeded):
            await fs.clone(source, home, b"third")
        await volume.tasks.reclaim_orphans()
        assert await _report(volume, home) == QuotaReport(home, 100 * KB, 0, 90 * KB, 7)
        with pytest.raises(NotFound):
            await _report(volume, await fs.resolve("/outside"))

    _on(new_volume(), work)


def test_two_clients_share_a_quota(any_engine: NewVolume) -> None:
    """What one has flushed the other one knows when the limit is near."""

    async def work(volume: Volume) -> None:
        home = await _mkdir(volume.filesystem, b"home")
        await _set(volume, home, size=100 * KB)
        async with open_volume(volume.url) as other:
            await _write(volume.filesystem, home, b"one", 60 * KB)
            await _write(other.filesystem, home, b"two", 40 * KB)
            for client in (volume, other):
                with pytest.raises(QuotaExceeded):
                    await _write(client.filesystem, home, b"three", 1)
                await client.filesystem.unlink(home, b"three")

    _on(any_engine(), work)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_walk_that_was_cut_short_is_taken_up(steps: int) -> None:
    """Setting again counts the rest, once; removing and setting anew counts all anew."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        home = await _mkdir(fs, b"home")
        for number in range(9):
            await _write(fs, home, b"file-%d" % number, KB)
        faults = Faults()
        async with failing_client(volume.url, faults) as client:
            faults.kv.fail_transaction(steps, NotFound("injected"))
            with pytest.raises(TectonicError, match="injected"):
                await _set(client, home, size=50 * KB)
        await _set(volume, home, size=50 * KB)
        assert await _report(volume, home) == QuotaReport(home, 50 * KB, 0, 9 * KB, 10)
        async with failing_client(volume.url, faults := Faults()) as client:
            faults.kv.fail_transaction(steps, NotFound("injected"))
            with pytest.raises(TectonicError, match="injected"):
                await QuotaSetting(client.kv, client.ids, lambda seen: None).remove(home)
        await _set(volume, home, size=60 * KB)
        assert await _report(volume, home) == QuotaReport(home, 60 * KB, 0, 9 * KB, 10)

    _on(new_volume(), work)


@pytest.mark.parametrize("seed", range(5))
def test_the_count_is_right_after_anything(seed: int) -> None:
    """Random operations in and around two quotas, set while others work: the audit of all records
    finds what is used equal to what is there."""
    dice = random.Random(seed)

    async def change(volume: Volume) -> None:
        fs = volume.filesystem
        directories = [ROOT_INODE]
        for path in ("/one", "/two", "/one/inner", "/free"):
            directories.append(await fs.resolve(path))
        for _ in range(60):
            directory, other = dice.choice(directories), dice.choice(directories)
            name, new = (b"%d" % dice.randrange(6) for _ in range(2))
            try:
                match dice.randrange(8):
                    case 0 | 1 | 2:
                        await _write(fs, directory, name, dice.randrange(3 * KB))
                    case 3:
                        await fs.unlink(directory, name)
                    case 4:
                        await fs.rename(directory, name, other, new)
                    case 5:
                        inode = (await fs.lookup(directory, name)).inode
                        await fs.link(inode, other, new)
                    case 6:
                        inode = (await fs.lookup(directory, name)).inode
                        size = dice.randrange(3 * KB)
                        await fs.setattr(inode, AttributeChanges(size=size))
                    case 7:
                        inode = (await fs.lookup(directory, name)).inode
                        await fs.clone(inode, other, new)
            except FileSystemError:
                continue

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        one = await _mkdir(fs, b"one")
        for name in (b"two", b"free"):
            await _mkdir(fs, name)
        await _mkdir(fs, b"inner", one)
        async with open_volume(volume.url) as other, trio.open_nursery() as nursery:
            nursery.start_soon(change, volume)
            nursery.start_soon(change, other)
            await _set(volume, one, size=20 * KB, inodes=20)
            await _set(volume, await fs.resolve("/two"), inodes=5)

    _on(new_volume(), work)
