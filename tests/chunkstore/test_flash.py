"""The flash store: contract with and without O_DIRECT, its directory, its files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tectonic_client.chunkstore import flash
from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.marker import MARKER, StoreMarker
from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey
from tectonic_client.errors import FormatTooNew, StoreMismatch, StoreUnavailable
from tectonic_client.limits import IDS_PER_LEASE
from tests.contracts.chunkstore import (
    KEY,
    PAGE,
    ChunkStoreContract,
    OpenStore,
    aligned,
    closing,
    filled,
    list_all,
    read,
)

UUID, OTHER_UUID = bytes(range(16)), bytes(range(1, 17))


def open_flash(directory: Path, *, read_only: bool = False) -> FlashStore:
    return FlashStore(str(directory), volume_uuid=UUID, store_id=0, read_only=read_only)


def chunk_path(directory: Path, key: ChunkKey) -> Path:
    return directory / "chunks" / f"{key.block_id // IDS_PER_LEASE % 256:02x}" / str(key)


@pytest.fixture
def directory(disk_path: Path) -> Path:
    """An initialised store."""
    path = disk_path / "store"
    FlashStore.initialise(str(path), UUID, 0)
    return path


@pytest.fixture
def store(directory: Path) -> Iterator[FlashStore]:
    opened = open_flash(directory)
    yield opened
    opened.close()


class TestDirect(ChunkStoreContract):
    store_class = FlashStore

    @pytest.fixture
    def open_store(self, directory: Path) -> Iterator[OpenStore]:
        yield from closing(lambda read_only: open_flash(directory, read_only=read_only))

    def test_is_direct(self, open_store: OpenStore) -> None:
        """These tests go past the page cache."""
        store = open_store()
        assert isinstance(store, FlashStore)
        assert store.direct_io


class TestBuffered(ChunkStoreContract):
    store_class = FlashStore

    @pytest.fixture
    def open_store(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
        monkeypatch.setattr(flash, "_supports_direct_io", lambda directory, root: False)
        yield from closing(lambda read_only: open_flash(directory, read_only=read_only))

    def test_is_buffered(self, open_store: OpenStore) -> None:
        """These tests go through the page cache."""
        store = open_store()
        assert isinstance(store, FlashStore)
        assert not store.direct_io


# --- the directory ----------------------------------------------------------------------------


def test_layout(directory: Path, store: FlashStore) -> None:
    """Files lie where FORMAT.md says: by the low byte of the lease, named in hexadecimal."""
    assert (directory / MARKER).read_bytes() == StoreMarker(UUID, 0).encode()
    fan_outs = sorted(path.name for path in (directory / "chunks").iterdir())
    assert fan_outs == [f"{number:02x}" for number in range(256)]
    store.put(ChunkKey(0x1AB * IDS_PER_LEASE + 5, 10), [filled(PAGE)])
    assert (directory / "chunks/ab/00000000001ab005.000a").read_bytes() == filled(PAGE)


def test_initialise_makes_the_store_but_no_parents(tmp_path: Path) -> None:
    """A directory that is missing above the store may be a device's: said, and nothing is made."""
    for prepare in (FlashStore.check, partial(FlashStore.initialise, volume_uuid=UUID, store_id=0)):
        with pytest.raises(StoreMismatch, match=f"no directory {tmp_path / 'a/b'} .*mkdir -p"):
            prepare(str(tmp_path / "a/b/c"))
        assert not list(tmp_path.iterdir())
    FlashStore.initialise(str(tmp_path / "a"), UUID, 0)
    open_flash(tmp_path / "a").close()


def test_initialise_accepts_an_empty_device(tmp_path: Path) -> None:
    """A new file system, with its lost+found, is empty enough."""
    (tmp_path / "lost+found").mkdir()
    FlashStore.initialise(str(tmp_path), UUID, 0)
    open_flash(tmp_path).close()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "chunks2"])
def test_initialise_refuses_foreign_directories(tmp_path: Path, name: str, force: bool) -> None:
    """A directory with other things in it is left alone, forced or not."""
    (tmp_path / name).write_text("precious")
    with pytest.raises(StoreMismatch, match="not empty and not a chunk store"):
        FlashStore.initialise(str(tmp_path), UUID, 0, force=force)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_initialise_refuses_files(tmp_path: Path, path: str) -> None:
    """A file in the place of the directory, or of one above it, is one clear error."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StoreMismatch, match=str(tmp_path / path)):
        FlashStore.initialise(str(tmp_path / path), UUID, 0, force=True)


def test_force_spares_what_is_no_chunk(directory: Path, store: FlashStore) -> None:
    """Where somebody put other files among the chunks, force stops at them and says which."""
    stray = directory / "chunks/07/notes.txt"
    stray.write_text("precious")
    with pytest.raises(StoreMismatch, match=r"notes\.txt is not a chunk"):
        FlashStore.initialise(str(directory), OTHER_UUID, 0, force=True)
    (moved,) = directory.rglob("notes.txt")
    moved.rename(directory.parent / "notes.txt")
    FlashStore.initialise(str(directory), OTHER_UUID, 0, force=True)
    assert (directory.parent / "notes.txt").read_text() == "precious"
    assert {path.name for path in directory.iterdir()} == {MARKER, "chunks"}


def test_clients_of_a_removed_store(directory: Path, store: FlashStore) -> None:
    """A client that still has the old store open cannot write into the new one."""
    FlashStore.initialise(str(directory), OTHER_UUID, 0, force=True)
    with pytest.raises(StoreUnavailable):
        store.put(KEY, [filled(PAGE)])
    new = FlashStore(str(directory), volume_uuid=OTHER_UUID, store_id=0)
    assert list_all(new) == []
    new.put(KEY, [filled(PAGE)])
    new.close()


class _Interrupted(Exception):
    """What stops `initialise` in tests."""


@contextmanager
def _stopped_at(call: str, number: int) -> Iterator[None]:
    """The n-th call of a function of `os` raises _Interrupted."""
    real, calls = getattr(os, call), itertools.count(1)

    def stopping(*args: object, **kwargs: object) -> object:
        if next(calls) == number:
            raise _Interrupted
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, stopping)
        yield


def _old_or_new_or_none(directory: Path) -> str:
    """Which store the directory is; what opens must be whole."""
    for name, uuid, expected in (("old", OTHER_UUID, [KEY]), ("new", UUID, [])):
        try:
            store = FlashStore(str(directory), volume_uuid=uuid, store_id=0)
        except StoreMismatch:
            continue
        with contextlib.closing(store):
            assert [info.key for info in list_all(store)] == expected
            store.put(ChunkKey(IDS_PER_LEASE, 0), [filled(PAGE)])
            return name
    return "none"


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "unlink", "rmdir", "write"])
def test_interrupted_initialise(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Stopped at any step, it leaves the old store, the new one or none; force begins again."""
    monkeypatch.setattr(flash, "_FAN_OUT", 4)
    seen = set()
    for number in itertools.count(1):
        directory = disk_path / str(number)
        FlashStore.initialise(str(directory), OTHER_UUID, 0)
        with contextlib.closing(
            FlashStore(str(directory), volume_uuid=OTHER_UUID, store_id=0)
        ) as old:
            old.put(KEY, [filled(PAGE)])
        with contextlib.suppress(_Interrupted), _stopped_at(call, number):
            FlashStore.initialise(str(directory), UUID, 0, force=True)
            break
        seen.add(_old_or_new_or_none(directory))
        FlashStore.initialise(str(directory), UUID, 0, force=True)
        assert _old_or_new_or_none(directory) == "new"
        assert {path.name for path in directory.iterdir()} == {MARKER, "chunks"}
    assert "none" in seen


def test_missing_directory(tmp_path: Path) -> None:
    """A directory that is not there, or is a file, is a mismatch that asks about the mount."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StoreMismatch, match="mounted") as raised:
            open_flash(path)
        assert str(path) in str(raised.value)


def test_empty_directory(tmp_path: Path) -> None:
    """An empty directory, as below a device that is not mounted, is no empty store."""
    with pytest.raises(StoreMismatch, match="is not a chunk store: is its device mounted"):
        open_flash(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_marker(directory: Path) -> None:
    """A damaged marker, or a newer release's, is refused."""
    marker = directory / MARKER
    content = marker.read_bytes()
    marker.write_bytes(content[:-1])
    with pytest.raises(StoreMismatch, match="damaged"):
        open_flash(directory)
    marker.write_bytes(content[:8] + b"\2" + content[9:])
    with pytest.raises(FormatTooNew, match="upgrade"):
        open_flash(directory)


def test_lost_chunks(directory: Path, store: FlashStore) -> None:
    """Without `chunks` the store is refused; without a directory in it, puts fail, gets miss."""
    (directory / "chunks/05").rmdir()
    with pytest.raises(StoreUnavailable, match=f"chunk {KEY}"):
        store.put(KEY, [filled(PAGE)])
    with pytest.raises(StoreUnavailable, match="chunks/05"):
        list_all(store)
    (directory / "chunks").rename(directory / "elsewhere")
    with pytest.raises(StoreMismatch, match="chunks"):
        open_flash(directory)


def test_an_open_store_holds_one_descriptor(directory: Path) -> None:
    """Hundreds of stores fit under a limit of 1024 descriptors; close gives all back."""
    before = len(os.listdir("/proc/self/fd"))
    store = open_flash(directory)
    store.put(KEY, [filled(PAGE)])
    read(store, KEY)
    list_all(store)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StoreUnavailable):
        store.head(KEY)


def test_direct_io_is_tried(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading the marker with O_DIRECT is refused, the store falls back and says so."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "planned")

    monkeypatch.setattr(os, "preadv", refuse)
    store = open_flash(directory)
    assert not store.direct_io
    store.close()


# --- listing ----------------------------------------------------------------------------------


def test_foreign_files_are_reported(
    directory: Path, store: FlashStore, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no chunk, or a chunk in the wrong place, is left out of the list and logged."""
    store.put(KEY, [filled(PAGE)])
    fan_out = chunk_path(directory, KEY).parent
    (fan_out / "notes.txt").touch()
    (fan_out / f"{KEY.block_id:x}.0001").touch()
    (directory / "chunks/00" / str(KEY)).touch()
    with caplog.at_level(logging.WARNING):
        assert list_all(store) == [ChunkInfo(KEY, PAGE)]
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"1 files in chunks/00 are not chunks of it, for example '{KEY}'",
        f"2 files in chunks/05 are not chunks of it, for example '{KEY.block_id:x}.0001'",
    ]


def test_listing_in_windows(store: FlashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the window: each chunk once, in order, and no more than a window at once."""
    keys = [
        ChunkKey(lease * IDS_PER_LEASE + block, chunk)
        for lease in (1, 2, 3, 256, 257, 258, 512, 513, 1000)
        for block in range(lease % 4 + 1)
        for chunk in (0, 1)
    ]
    for key in keys:
        store.put(key, [aligned(PAGE)])
    for window in (1, 4, 5, 7, 1000):
        monkeypatch.setattr(flash, "LIST_WINDOW_CHUNKS", window)
        assert [info.key for info in list_all(store)] == keys
        for first, end in store._windows(0, 2**64):
            inside = [key for key in keys if first <= key.block_id < end]
            leases = {key.block_id // IDS_PER_LEASE for key in inside}
            assert inside
            assert len(inside) <= window or len(leases) == 1


def test_short_listings_read_few_directories(
    store: FlashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing one lease reads one directory, however many chunks lie in the others."""
    for lease in (1, 2, 258):
        store.put(ChunkKey(lease * IDS_PER_LEASE, 0), [aligned(PAGE)])
    visited: list[str] = []
    names = flash._names

    def noting(path: str, root: int) -> list[str]:
        visited.append(path)
        return names(path, root)

    monkeypatch.setattr(flash, "_names", noting)
    found = list(store.list(2 * IDS_PER_LEASE, 3 * IDS_PER_LEASE))
    assert [info.key.block_id for info in found] == [2 * IDS_PER_LEASE]
    assert set(visited) == {"02"}
