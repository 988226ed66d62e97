"""Access times: changed by reading as relatime has it, and by few transactions."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.filesystem.accesstimes import is_due
from tectonic_client.limits import MAX_NOTED_ACCESS_TIMES, RELATIME_NS
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import OWNER

__all__ = ["any_engine"]

KEEPING = VolumeOptions(access_times=True)


def _on(url: str, work: Callable[[Volume], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with open_volume(url, KEEPING) as volume:
                await work(volume)

    trio.run(main)


async def _written(volume: Volume, name: bytes = b"f") -> int:
    """A file with a few bytes; returns its inode."""
    fs = volume.filesystem
    attributes, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
    await fs.write(handle, 0, b"content")
    await fs.release(handle)
    return attributes.inode


async def _read(volume: Volume, inode: int, flags: int = os.O_RDONLY) -> None:
    handle = await volume.filesystem.open(inode, flags)
    assert await volume.filesystem.read(handle, 0, 100) == b"content"
    await volume.filesystem.release(handle)


def test_a_day_and_a_change_make_it_due() -> None:
    """The kernel's rule: not newer than the last change, or a day old."""
    assert is_due(5, 5, 6)
    assert not is_due(6, 5, 7)
    assert is_due(6, 5, 6 + RELATIME_NS)
    assert not is_due(6, 5, 5 + RELATIME_NS)


def test_the_first_read_after_a_change_counts(any_engine: NewVolume) -> None:
    """It shows at once and to others when it is written; further reads note nothing."""

    async def work(volume: Volume) -> None:
        fs, inode = volume.filesystem, await _written(volume)
        before = await fs.getattr(inode)
        await _read(volume, inode, os.O_RDONLY | os.O_NOATIME)
        assert not fs.access_times.noted
        await _read(volume, inode)
        read = await fs.getattr(inode)
        assert read.atime_ns > before.ctime_ns
        assert (read.mtime_ns, read.ctime_ns) == (before.mtime_ns, before.ctime_ns)
        await fs.access_times.write()
        assert not fs.access_times.noted
        async with open_volume(volume.url) as other:
            assert await other.filesystem.getattr(inode) == read
        await _read(volume, inode)
        assert not fs.access_times.noted
        handle = await fs.open(inode, os.O_RDWR)
        await fs.write(handle, 0, b"content")
        await fs.release(handle)
        await _read(volume, inode)
        assert (await fs.getattr(inode)).atime_ns > read.atime_ns

    _on(any_engine(), work)


def test_directories_and_links_are_read_too(any_engine: NewVolume) -> None:
    """A listing and readlink count; what a listing changes is written when the client ends."""
    url = any_engine()

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        link = (await fs.symlink(ROOT_INODE, b"l", b"target", OWNER)).inode
        before = await fs.getattr(ROOT_INODE)
        handle = await fs.opendir(ROOT_INODE)
        await fs.readdir(handle, 0)
        await fs.releasedir(handle)
        await fs.readlink(link)
        assert set(fs.access_times.noted) == {ROOT_INODE, link}
        await fs.access_times.write()
        written = await fs.getattr(ROOT_INODE)
        handle = await fs.opendir(ROOT_INODE)
        await fs.readdir(handle, 0)
        await fs.releasedir(handle)
        assert await fs.getattr(ROOT_INODE) == written
        assert before.atime_ns <= before.mtime_ns

    _on(url, work)

    async def look(volume: Volume) -> None:
        for path in ("/", "/l"):
            inode = await volume.filesystem.resolve(path, follow=False)
            found = await volume.filesystem.getattr(inode)
            assert found.atime_ns > found.mtime_ns
            assert found.atime_ns > found.ctime_ns

    _on(url, look)


def test_a_time_that_was_set_stays(any_engine: NewVolume) -> None:
    """utimens after a read wins over it, also where another client sets the time."""

    async def work(volume: Volume) -> None:
        fs, inode = volume.filesystem, await _written(volume)
        await _read(volume, inode)
        await fs.setattr(inode, AttributeChanges(atime_ns=7))
        assert (await fs.getattr(inode)).atime_ns == 7
        await _read(volume, inode)
        async with open_volume(volume.url) as other:
            await other.filesystem.setattr(inode, AttributeChanges(atime_ns=8))
        await fs.access_times.write()
        assert (await fs.getattr(inode)).atime_ns == 8

    _on(any_engine(), work)


def test_what_is_gone_or_too_much_is_passed_over(any_engine: NewVolume) -> None:
    """A removed file brings no record back; no more is noted than fits."""

    async def work(volume: Volume) -> None:
        fs, inode = volume.filesystem, await _written(volume)
        await _read(volume, inode)
        await fs.unlink(ROOT_INODE, b"f")
        for other in range(10**6, 10**6 + MAX_NOTED_ACCESS_TIMES + 5):
            fs.access_times.note(other, None, 1)
        assert len(fs.access_times.noted) == MAX_NOTED_ACCESS_TIMES
        await fs.access_times.write()
        assert not fs.access_times.noted

    _on(any_engine(), work)


@pytest.mark.parametrize(
    "options", [VolumeOptions(), VolumeOptions(access_times=True, read_only=True)]
)
def test_clients_that_keep_none_write_nothing(
    any_engine: NewVolume, options: VolumeOptions
) -> None:
    """By default, and read-only, reading changes nothing."""
    url = any_engine()

    async def prepare(volume: Volume) -> None:
        await _written(volume)

    async def look() -> None:
        async with open_volume(url, options) as volume:
            inode = await volume.filesystem.resolve("/f")
            before = await volume.filesystem.getattr(inode)
            await _read(volume, inode)
            assert not volume.filesystem.access_times.noted
            assert await volume.filesystem.getattr(inode) == before

    _on(url, prepare)
    trio.run(look)
