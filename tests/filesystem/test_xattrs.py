"""Extended attributes and policies: kept, bounded, shared, and gone with their inode."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.errors import (
    InvalidArgument,
    NameTooLong,
    NoSpace,
    NoSuchAttribute,
    NotSupported,
    StaleHandle,
    ValueTooLarge,
)
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import OWNER, new_volume
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine"]

COHERENCE = b"user.tectonicfs.coherence"


def _on(url: str, work: Callable[[Volume], Awaitable[None]]) -> None:
    """Run `work` with a client; another one then finds nothing wrong."""

    async def main() -> None:
        with trio.fail_after(60):
            async with open_volume(url) as volume:
                await work(volume)
            async with open_volume(url) as volume:
                await clean(volume)
                await assert_no_leaks(volume)

    trio.run(main)


async def _file(volume: Volume, name: bytes = b"f", parent: int = ROOT_INODE) -> int:
    return (await volume.filesystem.mknod(parent, name, 0o644, OWNER)).inode


def test_they_are_kept(any_engine: NewVolume) -> None:
    """Set, replaced, listed, removed, seen by another client, cloned, and gone with the inode."""

    async def work(volume: Volume) -> None:
        fs, inode = volume.filesystem, await _file(volume)
        before = await fs.getattr(inode)
        await fs.setxattr(inode, b"user.a", b"\x00\xff" * 30_000)
        await fs.setxattr(inode, b"security.b", b"")
        await fs.setxattr(inode, b"user.a", b"1")
        assert (await fs.getattr(inode)).ctime_ns > before.ctime_ns
        async with open_volume(volume.url) as other:
            assert await other.filesystem.listxattr(inode) == [b"security.b", b"user.a"]
            assert await other.filesystem.getxattr(inode, b"user.a") == b"1"
        await fs.clone(inode, ROOT_INODE, b"copy")
        copy = (await fs.lookup(ROOT_INODE, b"copy")).inode
        await fs.removexattr(inode, b"user.a")
        assert await fs.listxattr(inode) == [b"security.b"]
        assert await fs.getxattr(copy, b"user.a") == b"1"
        await fs.removexattr(inode, b"security.b")
        for name in (b"user.a", b"security.b"):
            with pytest.raises(NoSuchAttribute):
                await fs.getxattr(inode, name)
            with pytest.raises(NoSuchAttribute):
                await fs.removexattr(inode, name)
        await fs.unlink(ROOT_INODE, b"copy")
        await clean(volume)
        with pytest.raises(StaleHandle):
            await fs.getxattr(copy, b"user.a")

    _on(any_engine(), work)


def test_a_policy_is_listed_where_it_can_be_read() -> None:
    """A symbolic link and a fifo inherit it, and do not list it: getxattr(2) could not read it."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = (await fs.mkdir(ROOT_INODE, b"top", 0o755, OWNER)).inode
        await fs.setxattr(top, COHERENCE, b"push")
        link = (await fs.symlink(top, b"link", b"target", OWNER)).inode
        fifo = (await fs.mknod(top, b"fifo", stat.S_IFIFO | 0o644, OWNER)).inode
        for inode in (link, fifo):
            assert await fs.listxattr(inode) == []
            await fs.setxattr(inode, b"trusted.a", b"1")
            assert await fs.listxattr(inode) == [b"trusted.a"]
            assert await fs.getxattr(inode, COHERENCE) == b"push"

    _on(new_volume(), work)


def test_a_file_without_capability_is_not_asked_at_each_write() -> None:
    """One look at the metadata serves the writes up to the next change of the file's record; what
    this client sets in between is found."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_WRONLY)
        inode, asked = attributes.inode, 0
        await fs.setxattr(inode, b"user.a", b"1")
        plain = fs.getxattr

        async def counted(inode: int, name: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return await plain(inode, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs, "getxattr", counted)
            for _ in range(3):
                assert await fs.clear_privileges(handle) is None
            assert asked == 1
            await fs.setxattr(inode, b"security.capability", b"1")
            assert await fs.clear_privileges(handle) == inode
            assert await fs.clear_privileges(handle) is None
            assert asked == 3
        assert await fs.listxattr(inode) == [b"user.a"]
        await fs.release(handle)

    _on(new_volume(), work)


def test_limits_and_names() -> None:
    """Beyond Linux's limits, or in a namespace that is not kept: a typed error, nothing changed."""

    async def work(volume: Volume) -> None:
        fs, inode = volume.filesystem, await _file(volume)
        with pytest.raises(ValueTooLarge):
            await fs.setxattr(inode, b"user.a", bytes(65_537))
        with pytest.raises(NameTooLong):
            await fs.setxattr(inode, b"user." + b"x" * 251, b"")
        for name in (b"system.posix_acl_access", b"security.selinux", b"x"):
            for call in (fs.getxattr(inode, name), fs.setxattr(inode, name, b"")):
                with pytest.raises(NotSupported):
                    await call
        with pytest.raises(InvalidArgument):
            await fs.setxattr(inode, b"user.", b"")
        assert await fs.listxattr(inode) == []
        for number in range(256):
            await fs.setxattr(inode, b"user.%0250d" % number, b"")
        with pytest.raises(NoSpace):
            await fs.setxattr(inode, b"user.one more", b"")
        assert sum(len(name) + 1 for name in await fs.listxattr(inode)) == 65_536

    _on(new_volume(), work)


def test_an_open_file_learns_of_its_own_attributes() -> None:
    """The short way for what the kernel asks at each write never hides what this client has set."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        attributes, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, 2)
        inode = attributes.inode
        with pytest.raises(NoSuchAttribute):
            await fs.getxattr(inode, b"security.capability")
        await fs.write(handle, 0, b"data")
        await fs.setxattr(inode, b"security.capability", b"1")
        assert await fs.getxattr(inode, b"security.capability") == b"1"
        await fs.flush(handle)
        assert await fs.getxattr(inode, b"security.capability") == b"1"
        await fs.removexattr(inode, b"security.capability")
        with pytest.raises(NoSuchAttribute):
            await fs.getxattr(inode, b"security.capability")
        await fs.release(handle)

    _on(new_volume(), work)


def test_the_coherence_policy() -> None:
    """push or ttl; new entries inherit it, others keep what they have; nothing else is a policy."""

    async def work(volume: Volume) -> None:
        fs = volume.filesystem
        top = (await fs.mkdir(ROOT_INODE, b"top", 0o755, OWNER)).inode
        old = await _file(volume, b"old", top)
        await fs.setxattr(top, COHERENCE, b"push")
        inner = (await fs.mkdir(top, b"inner", 0o755, OWNER)).inode
        new = await _file(volume, b"new", inner)
        for inode in (top, inner, new):
            assert await fs.getxattr(inode, COHERENCE) == b"push"
            assert await fs.listxattr(inode) == [COHERENCE]
        with pytest.raises(NoSuchAttribute):
            await fs.getxattr(old, COHERENCE)
        await fs.setxattr(inner, COHERENCE, b"ttl")
        await fs.removexattr(top, COHERENCE)
        for inode in (top, inner, await _file(volume, b"newer", inner)):
            assert await fs.listxattr(inode) == []
            with pytest.raises(NoSuchAttribute):
                await fs.removexattr(inode, COHERENCE)
        for name, value in ((COHERENCE, b"never"), (b"user.tectonicfs.other", b"1")):
            with pytest.raises(InvalidArgument):
                await fs.setxattr(top, name, value)
        with pytest.raises(InvalidArgument):
            await fs.removexattr(top, b"user.tectonicfs.other")

    _on(new_volume(), work)
