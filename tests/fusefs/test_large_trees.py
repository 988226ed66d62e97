"""Very large directories, trees deeper than any path, names and links at their limit."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tectonic_client.limits import MAX_LINKS
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import OWNER
from tests.fusefs.mounts import mounted, tectonicfs

pytestmark = pytest.mark.fuse

_libc = ctypes.CDLL(None, use_errno=True)

_CREATORS = 16
"""Tasks that fill a directory at once: their transactions are committed together."""


class _Entry(ctypes.Structure):
    """struct dirent of glibc."""

    _fields_ = (
        ("inode", ctypes.c_uint64), ("position", ctypes.c_int64), ("length", ctypes.c_uint16),
        ("kind", ctypes.c_uint8), ("name", ctypes.c_char * 256),
    )  # fmt: skip


_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.POINTER(_Entry)
_libc.telldir.restype = ctypes.c_long


class _Listing:
    """An open directory, as C programs read it."""

    def __init__(self, path: Path) -> None:
        self._stream = ctypes.c_void_p(_libc.opendir(os.fsencode(path)))
        assert self._stream

    def next(self) -> str | None:
        entry = _libc.readdir(self._stream)
        return entry.contents.name.decode() if entry else None

    def rest(self) -> list[str]:
        return [name for name in iter(self.next, None) if name not in (".", "..")]

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, ctypes.c_long(position))

    def close(self) -> None:
        _libc.closedir(self._stream)


@contextmanager
def _listing(path: Path) -> Iterator[_Listing]:
    listing = _Listing(path)
    try:
        yield listing
    finally:
        listing.close()


def _fill(url: str, path: str, count: int) -> None:
    """Make `count` empty files below a directory, by another client than the mount."""

    async def create(volume: Volume, directory: int, numbers: range) -> None:
        for number in numbers:
            await volume.filesystem.mknod(directory, b"f%06d" % number, 0o644, OWNER)

    async def main() -> None:
        async with open_volume(url) as volume:
            directory = await volume.filesystem.resolve(path)
            async with trio.open_nursery() as nursery:
                for first in range(_CREATORS):
                    numbers = range(first, count, _CREATORS)
                    nursery.start_soon(create, volume, directory, numbers)

    trio.run(main)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count", [8_000, pytest.param(100_000, marks=[pytest.mark.stress, pytest.mark.slow])]
)
def test_a_listing_is_stable_while_entries_come_and_go(
    fuse: None, volume: str, tmp_path: Path, count: int
) -> None:
    """What exists all the time is listed once; a place that telldir gave leads on to what follows
    it, whatever was removed or made meanwhile."""
    rng = random.Random(7)
    with mounted(volume, tmp_path / "mnt") as mount:
        (mount.path / "d").mkdir()
        _fill(volume, "/d", count)
        with _listing(mount.path / "d") as listing:
            places = []
            order: list[str] = []
            while (name := listing.next()) is not None:
                order.append(name)
                if rng.random() < 0.01:
                    places.append((len(order), listing.tell()))
            assert sorted(order[2:]) == [f"f{number:06d}" for number in range(count)]
            removed = set(rng.sample(order[2:], count // 20))
            listing.seek(places[0][1])
            begun = [listing.next() for _ in range(count // 3)]
            for name in removed:
                (mount.path / "d" / name).unlink()
            for number in range(200):
                (mount.path / "d" / f"new{number}").touch()
            ended = [name for name in (*begun, *listing.rest()) if name and name[0] == "f"]
            old = [name for name in order[places[0][0] :] if name not in removed]
            assert [name for name in ended if name not in removed] == old
            for seen, position in rng.sample(places, min(30, len(places))):
                listing.seek(position)
                survivors = (name for name in order[seen:] if name not in removed)
                found = (name for name in iter(listing.next, None) if name[0] == "f")
                assert next(found, None) == next(survivors, None)
        left = set(order[2:]) - removed | {f"new{number}" for number in range(200)}
        assert sorted(os.listdir(mount.path / "d")) == sorted(left)
        tectonicfs("umount", mount.path)


def test_a_tree_deeper_than_any_path(here: Path) -> None:
    """700 levels, 8,400 bytes: made, written, renamed and read step by step, removed by rm."""
    name, depth = "directory-xx", 700
    place = os.open(here, os.O_DIRECTORY)
    for level in range(depth):
        os.mkdir(name, dir_fd=place)
        deeper = os.open(name, os.O_DIRECTORY, dir_fd=place)
        os.close(place)
        place = deeper
        if level == depth // 2:
            middle = os.dup(place)
    descriptor = os.open("f", os.O_CREAT | os.O_RDWR, dir_fd=place)
    os.write(descriptor, b"deep")
    os.fsync(descriptor)
    os.rename("f", "up", src_dir_fd=place, dst_dir_fd=middle)
    assert os.listdir(place) == []
    assert sorted(os.listdir(middle)) == [name, "up"]
    assert os.pread(descriptor, 10, 0) == b"deep"
    with pytest.raises(OSError, match="too long"):
        os.stat(here / "/".join([name] * depth))
    for _ in range(depth):
        above = os.open("..", os.O_DIRECTORY, dir_fd=place)
        os.close(place)
        place = above
    assert os.fstat(place).st_ino == here.stat().st_ino
    for opened in (place, middle, descriptor):
        os.close(opened)
    subprocess.run(["rm", "-r", here / name], check=True, timeout=100)
    assert os.listdir(here) == []


@pytest.mark.parametrize("first", range(1, 256, 32))
def test_any_byte_may_fill_a_name(here: Path, first: int) -> None:
    """255 times each byte but / is a name, found by look-up and listing."""
    folder = os.fsencode(here)
    names = [bytes([byte]) * 255 for byte in range(first, min(first + 32, 256)) if byte != 0x2F]
    for name in names:
        os.close(os.open(folder + b"/" + name, os.O_CREAT | os.O_EXCL))
        os.rename(folder + b"/" + name, folder + b"/" + name[:-1] + b"x")
        os.rename(folder + b"/" + name[:-1] + b"x", folder + b"/" + name)
        assert os.stat(folder + b"/" + name).st_nlink == 1
    assert sorted(os.listdir(folder)) == sorted(names)
    for name in names:
        os.unlink(folder + b"/" + name)
    assert os.listdir(folder) == []


def test_one_byte_more_is_too_long_for_every_call(here: Path) -> None:
    """256 bytes: ENAMETOOLONG wherever a name is made, looked up or removed."""
    (here / "f").touch()
    long, file = here / ("n" * 256), here / "f"
    calls: list[Callable[[], object]] = [
        long.mkdir, long.touch, long.stat, long.unlink, long.rmdir, lambda: long.symlink_to("f"),
        lambda: os.mkfifo(long), lambda: os.link(file, long), lambda: file.rename(long),
        lambda: long.rename(file), lambda: os.setxattr(long, "user.x", b""),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(OSError, match="too long") as raised:
            call()
        assert raised.value.errno == errno.ENAMETOOLONG
    assert os.listdir(here) == ["f"]


def test_a_file_has_at_most_so_many_names(fuse: None, volume: str, tmp_path: Path) -> None:
    """EMLINK, as ext4 has it, and the file stays as it was."""

    async def nearly_full(inode: int) -> None:
        async with open_volume(volume) as opened:
            await opened.kv.transact(
                lambda tx: write_inode(
                    tx, inode, replace(read_inode(tx, inode), nlink=MAX_LINKS - 1)
                )
            )

    with mounted(volume, tmp_path / "mnt", "attr_timeout=0") as mount:
        (mount.path / "f").touch()
        trio.run(nearly_full, (mount.path / "f").stat().st_ino)
        os.link(mount.path / "f", mount.path / "last")
        with pytest.raises(OSError, match="Too many links"):
            os.link(mount.path / "f", mount.path / "more")
        assert (mount.path / "f").stat().st_nlink == MAX_LINKS
        assert sorted(os.listdir(mount.path)) == ["f", "last"]
        (mount.path / "last").unlink()
        os.link(mount.path / "f", mount.path / "more")
