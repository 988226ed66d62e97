"""The flash store on devices that fail, fill up, vanish or are read-only, and under SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tectonic_client.chunkstore.flash import FlashStore
from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey
from tectonic_client.errors import (
    ChunkMissing,
    Exists,
    NoSpace,
    ReadOnly,
    StoreMismatch,
    StoreUnavailable,
    TectonicError,
)
from tectonic_client.limits import IDS_PER_LEASE, KiB
from tests.chunkstore.putting_process import PAGES, UUID
from tests.contracts.chunkstore import KEY, PAGE, filled, list_all, read

OTHER = ChunkKey(KEY.block_id + 1, 0)
DEADLINE_S = 30


def open_flash(directory: Path, *, read_only: bool = False) -> FlashStore:
    return FlashStore(str(directory), volume_uuid=UUID, store_id=0, read_only=read_only)


@pytest.fixture
def directory(disk_path: Path) -> Path:
    """An initialised store."""
    path = disk_path / "store"
    FlashStore.initialise(str(path), UUID, 0)
    return path


@pytest.fixture
def store(directory: Path) -> Iterator[FlashStore]:
    with contextlib.closing(open_flash(directory)) as opened:
        yield opened


class Device:
    """A small file system in memory, mounted for one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def mount(self, kind: str, options: str) -> None:
        """Skips the test where this process may not mount."""
        command = ["mount", "-t", kind, "-o", options, "none", str(self.directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            pytest.skip(f"no {kind} can be mounted here: {done.stderr.splitlines()[0]}")

    def unmount(self, *options: str) -> None:
        command = ["umount", *options, str(self.directory)]
        subprocess.run(command, check=True, timeout=DEADLINE_S)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    path = tmp_path / "device"
    path.mkdir()
    found = Device(path)
    yield found
    if path.is_mount():
        found.unmount("--lazy")


# --- full, read-only and missing devices ------------------------------------------------------


def fill_up(store: FlashStore) -> None:
    for number in range(1000):
        store.put(ChunkKey(IDS_PER_LEASE + number, 0), [filled(32 * PAGE, number)])


def test_full_device(device: Device) -> None:
    """A put that does not fit is NoSpace and leaves nothing; earlier chunks stay whole."""
    device.mount("tmpfs", "size=1m")
    FlashStore.initialise(str(device.directory), UUID, 0)
    with contextlib.closing(open_flash(device.directory)) as store:
        with pytest.raises(NoSpace, match=f"store {device.directory}, chunk "):
            fill_up(store)
        count = len(list_all(store))
        assert 0 < count < 8
        for number in range(count):
            key = ChunkKey(IDS_PER_LEASE + number, 0)
            assert read(store, key) == filled(32 * PAGE, number)
        assert store.usage().free_bytes < 32 * PAGE
        assert store.usage().total_bytes == 1024 * KiB
        store.delete([ChunkKey(IDS_PER_LEASE, 0)])
        store.put(OTHER, [filled(32 * PAGE)])


def test_initialise_on_a_full_device(device: Device) -> None:
    """A device without room for the directories is NoSpace, and no store."""
    device.mount("tmpfs", "size=1m,nr_inodes=20")
    with pytest.raises(NoSpace):
        FlashStore.initialise(str(device.directory), UUID, 0)
    with pytest.raises(StoreMismatch):
        open_flash(device.directory)


def test_device_becomes_read_only(device: Device) -> None:
    """A device that was remounted read-only refuses puts and deletes, and still reads."""
    device.mount("tmpfs", "size=4m")
    FlashStore.initialise(str(device.directory), UUID, 0)
    with contextlib.closing(open_flash(device.directory)) as store:
        store.put(KEY, [filled(PAGE)])
        device.mount("none", "remount,ro")
        with pytest.raises(ReadOnly, match=f"chunk {OTHER}"):
            store.put(OTHER, [filled(PAGE)])
        with pytest.raises(ReadOnly, match=f"chunk {KEY}"):
            store.delete([KEY])
        assert read(store, KEY) == filled(PAGE)


def test_opening_a_read_only_device(device: Device) -> None:
    """A store on a read-only device is refused, unless it is opened to read."""
    device.mount("tmpfs", "size=4m")
    FlashStore.initialise(str(device.directory), UUID, 0)
    with contextlib.closing(open_flash(device.directory)) as store:
        store.put(KEY, [filled(PAGE)])
    device.mount("none", "remount,ro")
    with pytest.raises(ReadOnly, match="read-only file system"):
        open_flash(device.directory)
    with contextlib.closing(open_flash(device.directory, read_only=True)) as store:
        assert read(store, KEY) == filled(PAGE)
    with pytest.raises(ReadOnly):
        FlashStore.initialise(str(device.directory), bytes(16), 0, force=True)


def test_device_that_is_not_mounted(device: Device) -> None:
    """The directory below a device is refused once it is unmounted, and stays empty."""
    device.mount("tmpfs", "size=4m")
    FlashStore.initialise(str(device.directory), UUID, 0)
    store = open_flash(device.directory)
    with pytest.raises(subprocess.CalledProcessError):
        device.unmount()
    device.unmount("--lazy")
    store.put(KEY, [filled(PAGE)])
    store.close()
    assert list(device.directory.iterdir()) == []
    with pytest.raises(StoreMismatch, match="is its device mounted"):
        open_flash(device.directory)


def test_without_direct_io(device: Device) -> None:
    """A file system that refuses O_DIRECT is used through the page cache."""
    device.mount("ramfs", "mode=700")
    FlashStore.initialise(str(device.directory), UUID, 0)
    with contextlib.closing(open_flash(device.directory)) as store:
        assert not store.direct_io
        store.put(KEY, [filled(PAGE, 1), filled(3 * PAGE, 2)])
        assert read(store, KEY) == bytes(filled(PAGE, 1)) + bytes(filled(3 * PAGE, 2))


# --- failing calls ----------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int, *, nth: int = 1) -> None:
    """The n-th call of a function of `os` from now, and all after it, fail."""
    real, calls = getattr(os, call), itertools.count(1)

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) >= nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EROFS, ReadOnly),
        (errno.EACCES, ReadOnly),
        (errno.EPERM, ReadOnly),
        (errno.EEXIST, Exists),
        (errno.ENOENT, StoreUnavailable),
        (errno.EIO, StoreUnavailable),
        (errno.EFBIG, StoreUnavailable),
        (errno.EMFILE, StoreUnavailable),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "fsync"])
def test_failing_put(
    store: FlashStore,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    expected: type[TectonicError],
) -> None:
    """Whichever step of a put fails: the error by the table, naming store and chunk; no trace."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        fail(patch, call, code)
        with pytest.raises(expected) as raised:
            store.put(KEY, [filled(2 * PAGE)])
    assert type(raised.value) is expected
    for part in (store.name, str(KEY), os.strerror(code)):
        assert part in str(raised.value)
    assert list_all(store) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_directory_cannot_be_opened_to_sync(
    store: FlashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put whose directory cannot be synced did not happen."""
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EMFILE, nth=2)
        with pytest.raises(StoreUnavailable):
            store.put(KEY, [filled(PAGE)])
    assert list_all(store) == []


def test_clean_up_that_fails_too(store: FlashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the torn chunk can be removed, the first error is the one that is told."""
    with monkeypatch.context() as patch:
        fail(patch, "fdatasync", errno.EIO)
        fail(patch, "unlink", errno.EROFS)
        with pytest.raises(StoreUnavailable, match=os.strerror(errno.EIO)):
            store.put(KEY, [filled(PAGE)])
    assert list_all(store) == [ChunkInfo(KEY, PAGE)]


def test_interrupted_put(store: FlashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that ends by something else than an I/O error leaves no chunk either."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put(KEY, [filled(PAGE)])
    assert list_all(store) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("get", "open"),
        ("get", "preadv"),
        ("head", "stat"),
        ("list", "listdir"),
        ("list", "stat"),
        ("usage", "fstatvfs"),
    ],
)
def test_failing_reads(
    store: FlashStore, monkeypatch: pytest.MonkeyPatch, operation: str, call: str, code: int
) -> None:
    """A device that cannot be read is unavailable: never missing chunks, never an empty list."""
    store.put(KEY, [filled(PAGE)])
    calls = {
        "get": lambda: read(store, KEY),
        "head": lambda: store.head(KEY),
        "list": lambda: list_all(store),
        "usage": store.usage,
    }
    with monkeypatch.context() as patch:
        fail(patch, call, code)
        with pytest.raises(StoreUnavailable, match=store.name):
            calls[operation]()
    assert read(store, KEY) == filled(PAGE)


@pytest.mark.parametrize("call", ["unlink", "fsync"])
def test_failing_delete(store: FlashStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A delete that is not done, or not durable, is an error; the next one completes it."""
    store.put(KEY, [filled(PAGE)])
    with monkeypatch.context() as patch:
        fail(patch, call, errno.EIO)
        with pytest.raises(StoreUnavailable):
            store.delete([KEY])
    store.delete([KEY])
    with pytest.raises(ChunkMissing):
        store.head(KEY)


# --- short reads and writes -------------------------------------------------------------------


@pytest.mark.parametrize("limit", [PAGE, PAGE + 512, 3 * PAGE - 1, 7 * PAGE])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 5), (4, 5, 6)])
def test_short_writes(
    store: FlashStore, monkeypatch: pytest.MonkeyPatch, limit: int, cuts: Sequence[int]
) -> None:
    """A device that takes less than it is given gets the rest again, from a page's start."""
    write = os.pwritev
    content = filled(10 * PAGE)
    edges = [0, *(cut * PAGE for cut in cuts), len(content)]
    parts = [content[start:end] for start, end in itertools.pairwise(edges)]

    def short(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        room, given = limit - limit % PAGE, []
        for part in parts:
            given.append(part[:room])
            room -= len(given[-1])
        # What lies behind the last page's start is written too, as far as the caller is told.
        return min(
            limit, write(descriptor, [part for part in given if part], offset) + limit % PAGE
        )

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", short)
        store.put(KEY, parts)
    assert read(store, KEY) == content


@pytest.mark.parametrize("count", [0, 100])
def test_writes_that_get_nowhere(
    store: FlashStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A device that takes less than a page is full; the put does not try forever."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: count)
        with pytest.raises(NoSpace):
            store.put(KEY, [filled(PAGE)])
    assert list_all(store) == []


@pytest.mark.parametrize("limit", [PAGE, 3 * PAGE])
def test_short_reads(store: FlashStore, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A device that gives less than it is asked for is asked again."""
    real = os.preadv
    content = filled(10 * PAGE)
    store.put(KEY, [content])
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, views, at: real(descriptor, [views[0][:limit]], at)
    )
    assert read(store, KEY) == content
    assert read(store, KEY, PAGE, 5 * PAGE) == content[PAGE : 6 * PAGE]


# --- SIGKILL ----------------------------------------------------------------------------------


def start_putting(directory: Path, *arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chunkstore.putting_process", str(directory)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip


@pytest.mark.parametrize("pages", [0, 1, PAGES - 1])
def test_torn_put(store: FlashStore, pages: int) -> None:
    """A process killed in the middle of a put leaves a short chunk; list shows, delete removes."""
    with start_putting(Path(store.name), KEY.block_id, pages * PAGE) as process:
        assert process.wait(DEADLINE_S) < 0
    torn = ChunkKey(KEY.block_id, 0)
    assert list_all(store) == [ChunkInfo(torn, pages * PAGE)]
    assert (
        read(store, torn, size_bytes=PAGES * PAGE)
        == filled(PAGES * PAGE, torn.block_id)[: pages * PAGE]
    )
    store.delete([torn])
    assert list_all(store) == []


def test_killed_at_any_time(store: FlashStore, rng: random.Random) -> None:
    """What was acknowledged before a SIGKILL is whole; at most one chunk more is there, torn."""
    for round_number in range(3):
        first = (1 + round_number) * IDS_PER_LEASE
        with start_putting(Path(store.name), first) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 20))]
            process.kill()
            told += [int(line) for line in process.stdout if line.endswith("\n")]
        assert told == list(range(first, first + len(told)))
        found = list(store.list(first, first + IDS_PER_LEASE))
        assert len(told) <= len(found) <= len(told) + 1
        for block_id in told:
            whole = read(store, ChunkKey(block_id, 0), size_bytes=PAGES * PAGE)
            assert whole == filled(PAGES * PAGE, block_id)
        store.delete([info.key for info in found])
    assert list_all(store) == []
