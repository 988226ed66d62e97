"""A volume of which one record is wrong: its operations fail with an error of ours or work, and
what the record does not belong to stays as it was."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial

import trio
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.errors import TectonicError
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.filesystem.quotasetting import QuotaSetting, list_quotas, report
from tectonic_client.kv.port import Transaction
from tectonic_client.metadata import keys
from tectonic_client.metadata.files import read_extents
from tectonic_client.types import ROOT_INODE, AttributeChanges
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import CHUNK_BYTES, OWNER, new_volume
from tests.leaks import clean

DATA = bytes(range(256)) * 40
NUMBERS = [0, 1, 2, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


async def store(fs: FileSystem, parent: int, name: bytes, data: bytes) -> int:
    attributes, handle = await fs.create(parent, name, 0o644, OWNER, os.O_RDWR)
    await fs.write(handle, 0, data)
    await fs.release(handle)
    return attributes.inode


async def load(fs: FileSystem, inode: int) -> bytes:
    handle = await fs.open(inode, os.O_RDONLY)
    try:
        return bytes(await fs.read(handle, 0, CHUNK_BYTES))
    finally:
        await fs.release(handle)


async def populate(volume: Volume) -> None:
    """Some of everything in `work`, and a file that has nothing to do with it in `safe`."""
    fs = volume.filesystem
    safe = (await fs.mkdir(ROOT_INODE, b"safe", 0o755, OWNER)).inode
    await store(fs, safe, b"file", DATA)
    work = (await fs.mkdir(ROOT_INODE, b"work", 0o755, OWNER)).inode
    await fs.setxattr(work, b"user.tectonicfs.coherence", b"push")
    inner = (await fs.mkdir(work, b"inner", 0o755, OWNER)).inode
    await store(fs, inner, b"deep", DATA)
    inode = await store(fs, work, b"file", DATA)
    handle = await fs.open(inode, os.O_RDWR)
    for position in (3, 900, 5000):
        await fs.write(handle, position, b"x" * 7)
        await fs.flush(handle)
    await fs.release(handle)
    await fs.setxattr(inode, b"user.name", b"value")
    await fs.symlink(work, b"link", b"file", OWNER)
    await fs.link(inode, work, b"second")
    await fs.mknod(work, b"fifo", stat.S_IFIFO | 0o644, OWNER, 0)
    await QuotaSetting(volume.kv, volume.ids, lambda seen: None).set(inner, 2**40, 1000)


# --- what is wrong ----------------------------------------------------------------------------

Row = tuple[bytes, bytes]


def resealed(value: bytes, body: bytes) -> bytes:
    """The record with another body, under the right checksum."""
    data = value[:2] + body
    return data + crc32c(data).to_bytes(4, "little")


@st.composite
def wrong_values(draw: st.DrawFn) -> Callable[[Row], Row]:
    """Another number somewhere in the body, or a body of another length."""
    at = draw(st.integers(0, 60))
    width = draw(st.sampled_from(["<B", "<H", "<I", "<Q"]))
    number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * struct.calcsize(width))
    patch = draw(st.sampled_from([struct.pack(width, number), b""]))
    more = draw(st.sampled_from([b"", b"", b"", b"\0", b"\xff" * 8]))

    def change(row: Row) -> Row:
        key, value = row
        body = value[2:-4]
        place = at % (len(body) + 1)
        changed = body[:place] + patch + body[place + len(patch) :]
        return key, resealed(value, changed[: len(body)] + more)

    return change


@st.composite
def wrong_keys(draw: st.DrawFn) -> Callable[[Row], Row]:
    """The record under a key that is shorter, longer, or has another byte."""
    cut, more = draw(st.integers(0, 12)), draw(st.binary(max_size=9))
    return lambda row: (row[0][: max(len(row[0]) - cut, 1)] + more, row[1])


# --- what is done with it ---------------------------------------------------------------------


async def ours(work: Awaitable[object]) -> None:
    """It works or fails with an error of ours."""
    with suppress(TectonicError):
        await work


async def try_inode(fs: FileSystem, inode: int) -> None:
    await ours(fs.getattr(inode))
    await ours(fs.listxattr(inode))
    await ours(fs.getxattr(inode, b"user.name"))
    await ours(fs.readlink(inode))
    await ours(load(fs, inode))
    await ours(list_all(fs, inode))
    with suppress(TectonicError):
        handle = await fs.open(inode, os.O_RDWR)
        await ours(fs.write(handle, 100, b"y" * 2000))
        await ours(fs.fsync(handle))
        await ours(fs.release(handle))
    await ours(fs.setattr(inode, AttributeChanges(size=4000)))
    await ours(fs.setattr(inode, AttributeChanges(mode=0o700, mtime_ns=5)))
    await ours(fs.setxattr(inode, b"user.other", b"value"))
    await ours(fs.removexattr(inode, b"user.name"))


async def list_all(fs: FileSystem, inode: int) -> list[bytes]:
    handle, names, cookie = await fs.opendir(inode), [], 0
    while page := await fs.readdir(handle, cookie, 2):
        names += [entry.name for entry in page]
        cookie = page[-1].cookie
    return names


async def try_everything(volume: Volume, inodes: list[int], parent: int) -> None:
    fs = volume.filesystem
    for inode in inodes:
        await try_inode(fs, inode)
        await ours(volume.kv.read(lambda tx, inode=inode: report(tx, inode)))
    await ours(volume.kv.read(list_quotas))
    await ours(fs.clone(parent, ROOT_INODE, b"clone"))
    await ours(fs.rename(parent, b"file", parent, b"renamed"))
    for name in (b"renamed", b"second", b"link", b"fifo", b"inner"):
        await ours(fs.lookup(parent, name))
        await ours(fs.link(inodes[-1], parent, name + b"-2"))
        await ours(fs.unlink(parent, name))
        await ours(fs.rmdir(parent, name))
    await ours(store(fs, parent, b"new", DATA))
    await ours(clean(volume))
    await ours(fs.keep_removed_files())
    await ours(fs.sync())


VITAL = (keys.GLOBAL, keys.SESSION, keys.FOLLOWER)
"""What concerns all files: the superblock, stores, this client itself."""


async def is_vital(volume: Volume, row: Row) -> bool:
    """Whether the file in `safe` cannot be expected to be readable without this record."""
    fs = volume.filesystem
    path = [ROOT_INODE, await fs.resolve("/safe"), await fs.resolve("/safe/file")]
    blocks = await volume.kv.read(lambda tx: [e.block_id for e in read_extents(tx, path[-1])])
    groups = [
        *(keys.group(layer, inode) for layer in (keys.FILE, keys.NAME) for inode in path),
        *(keys.group(keys.BLOCK, block_id) for block_id in blocks),
    ]
    return row[0].startswith((*VITAL, *groups))


async def damage(volume: Volume, choose: int, change: Callable[[Row], Row]) -> bool:
    """Change one record; returns whether it is a vital one."""
    rows = await volume.kv.read(lambda tx: tx.scan(b"", b"\xff" * 8))
    old = rows[choose % len(rows)]
    new = change(old)

    def swap(tx: Transaction) -> None:
        tx.delete(old[0])
        tx.put(*new)

    vital = await is_vital(volume, old)
    await volume.kv.transact(swap)
    return vital


async def run(choose: int, change: Callable[[Row], Row]) -> None:
    """Make a volume, damage one record of it, use it, and again as another client."""
    url = new_volume()
    used, vital = False, False
    failed: TectonicError | None = None
    try:
        async with open_volume(url) as volume:
            await populate(volume)
            names = [b"/safe/file", b"/work", b"/work/inner", b"/work/inner/deep", b"/work/file",
                     b"/work/link", b"/work/fifo"]  # fmt: skip
            find = partial(volume.filesystem.resolve, follow=False)
            safe, work, *others = [await find(name) for name in names]
            vital = await damage(volume, choose, change)
            with trio.fail_after(60):
                await try_everything(volume, [work, *others], work)
                if not vital:
                    assert await load(volume.filesystem, safe) == DATA
            used = True
    except TectonicError as error:  # of the last flush
        failed = error
    assert used, failed
    with suppress(TectonicError) if vital else nullcontext(), trio.fail_after(60):
        async with open_volume(url) as volume:
            await ours(clean(volume))
            found = await load(volume.filesystem, safe)
            assert vital or found == DATA


@settings(max_examples=150)
@given(st.integers(0, 10_000), wrong_values() | wrong_keys())
def test_one_wrong_record_is_an_error_of_ours(choose: int, change: Callable[[Row], Row]) -> None:
    """Numbers that nobody meant, bodies and keys of another length, all under a right checksum: no
    operation, cleaning or closing raises anything else or hangs, and other files stay readable."""
    trio.run(run, choose, change)
