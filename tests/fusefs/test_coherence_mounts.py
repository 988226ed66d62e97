"""Two mounts of one volume: close-to-open everywhere, at once below push directories."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tectonic_client.limits import COHERENCE_DEADLINE_S
from tests.fusefs.mounts import MountedVolume, mounted, tectonicfs
from tests.fusefs.pairs import PLAIN, POLICY, PUSH, Pair, mounted_pair

pytestmark = pytest.mark.fuse


@pytest.fixture
def pair(fuse: None, volume: str, tmp_path: Path) -> Iterator[Pair]:
    """Two mounts over the embedded engine, this test's own."""
    with mounted_pair(volume, tmp_path) as pair:
        yield pair


@pytest.fixture
def ours(shared_pair: Pair, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A directory of this test's own that pushes, as both mounts see it."""
    return _directories(shared_pair, PUSH, request.node.name)


@pytest.fixture
def plain(shared_pair: Pair, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The same without the policy."""
    return _directories(shared_pair, PLAIN, request.node.name)


def _directories(pair: Pair, policy: str, name: str) -> tuple[Path, Path]:
    (pair[0].path / policy / name).mkdir()
    return pair[0].path / policy / name, pair[1].path / policy / name


def _wait_until(check: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """For what happens by itself, at a moment that nobody tells."""
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


# --- below push directories -------------------------------------------------------------------


def test_data_and_size_are_seen_at_once(ours: tuple[Path, Path]) -> None:
    """After close: stat, a descriptor that stayed open, and a mapping show the new content."""
    here, there = ours
    (here / "f").write_bytes(b"a" * 5000)
    with (there / "f").open("rb", buffering=0) as file:
        with mmap.mmap(file.fileno(), 5000, access=mmap.ACCESS_READ) as mapping:
            for number in range(20):
                content = bytes([number + 1]) * 5000
                with (here / "f").open("r+b", buffering=0) as writer:
                    writer.write(content)
                assert os.pread(file.fileno(), 6000, 0) == content
                assert mapping[:] == content
        for size in (0, 10_000, 1):
            with (here / "f").open("wb") as writer:
                writer.write(b"x" * size)
            assert (there / "f").stat().st_size == size
            assert os.fstat(file.fileno()).st_size == size
            assert os.pread(file.fileno(), 20_000, 0) == b"x" * size
            os.truncate(here / "f", 7)
            assert os.pread(file.fileno(), 100, 0) == (b"x" * size).ljust(7, b"\0")[:7]


def test_names_are_seen_at_once(ours: tuple[Path, Path]) -> None:
    """After create, rename, unlink, mkdir, rmdir: look-ups, failed ones too, and listings."""
    here, there = ours
    for number in range(20):
        name = f"f{number}"
        assert not (there / name).exists()
        (here / name).write_text(name)
        assert (there / name).read_text() == name
        assert not (there / "moved").exists()
        (here / name).rename(here / "moved")
        assert not (there / name).exists()
        assert (there / "moved").read_text() == name
        assert os.listdir(there) == ["moved"]
        (here / "moved").unlink()
        assert not (there / "moved").exists()
        (here / name).mkdir()
        assert (there / name).is_dir()
        (here / name).rmdir()
        assert os.listdir(there) == []


def test_a_replaced_file_is_seen_at_once(ours: tuple[Path, Path]) -> None:
    """The way editors save: write beside it, rename over it; each version is seen."""
    here, there = ours
    for number in range(30):
        (here / "new").write_text(f"version {number}")
        (here / "new").replace(here / "code.py")
        assert (there / "code.py").read_text() == f"version {number}"


def test_attributes_are_seen_at_once(ours: tuple[Path, Path]) -> None:
    """After chmod, utimens, link: stat shows mode, times and link count."""
    here, there = ours
    (here / "f").touch()
    for number in range(10):
        assert (there / "f").stat().st_nlink == 1
        (here / "f").chmod(0o600 + number)
        assert (there / "f").stat().st_mode & 0o777 == 0o600 + number
        os.utime(here / "f", ns=(number, number))
        assert (there / "f").stat().st_mtime_ns == number
        os.link(here / "f", here / "g")
        assert (there / "f").stat().st_nlink == 2
        (here / "g").unlink()


def test_a_tree_that_is_there_gets_the_policy_entry_by_entry(plain: tuple[Path, Path]) -> None:
    """Set on each file and directory of a tree, the policy holds for what was there before."""
    here, there = plain
    (here / "sub").mkdir()
    (here / "sub" / "f").write_text("old")
    assert (there / "sub" / "f").read_text() == "old"
    for path in (here, here / "sub", here / "sub" / "f"):
        os.setxattr(path, POLICY, b"push")
    (here / "sub" / "f").write_text("longer than any version")
    # The kernel of the other mount may trust what it got before for its ordinary time-out.
    _wait_until(lambda: (there / "sub" / "f").stat().st_size == 23)
    with (there / "sub" / "f").open("rb", buffering=0) as file:
        for number in range(5):
            (here / "sub" / "f").write_text(f"version {number}")
            assert os.pread(file.fileno(), 100, 0) == b"version %d" % number
            assert (there / "sub" / "f").stat().st_size == 9
    assert os.getxattr(there / "sub" / "f", POLICY) == b"push"


def test_what_is_unchanged_is_served_from_the_cache(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    """Stat and failed look-ups ask the daemon once: they go on while it is stopped."""
    here, there = _directories(pair, PUSH, request.node.name)
    (here / "f").write_text("x")
    _wait_until(lambda: _served_while_stopped(pair[1], there))


def _served_while_stopped(mount: MountedVolume, directory: Path) -> bool:
    """Whether names that were just asked for are known to the kernel."""
    (directory / "f").stat()
    (directory / "none").exists()
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: ((directory / "f").stat(), (directory / "none").exists()))
            try:
                asked.result(timeout=0.5)
            except TimeoutError:
                return False
            finally:
                os.kill(mount.pid, signal.SIGCONT)
            return True
    finally:
        os.kill(mount.pid, signal.SIGCONT)


@pytest.mark.alone  # measures time
def test_two_mounts_that_change_one_directory_do_not_wait_for_each_other(
    ours: tuple[Path, Path],
) -> None:
    """Concurrent creates, renames and unlinks in one directory end soon and agree."""

    def change(directory: Path, tag: str) -> None:
        for number in range(50):
            (directory / f"{tag}{number}").touch()
            (directory / f"{tag}{number}").rename(directory / f"{tag}-{number}")
            if number % 2:
                (directory / f"{tag}-{number}").unlink()

    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(change, ours * 2, "abcd"))
    assert time.monotonic() - started < 4 * COHERENCE_DEADLINE_S
    expected = sorted(f"{tag}-{number}" for tag in "abcd" for number in range(0, 50, 2))
    for directory in ours:
        assert sorted(os.listdir(directory)) == expected
        assert all((directory / name).exists() for name in expected)


# --- followers that do not answer -------------------------------------------------------------


@pytest.mark.alone  # measures time
def test_a_frozen_mount_delays_one_change_and_serves_nothing_stale(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    """A stopped daemon holds a writer up once, by the deadline; woken, it shows what is now."""
    here, there = _directories(pair, PUSH, request.node.name)
    (here / "f").write_text("old")
    with (there / "f").open() as file:
        assert file.read() == "old"
        assert not (there / "g").exists()
        os.kill(pair[1].pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            (here / "f").write_text("newer")
            waited = time.monotonic() - started
            (here / "g").touch()
        finally:
            os.kill(pair[1].pid, signal.SIGCONT)
        assert COHERENCE_DEADLINE_S * 0.9 < waited < 3 * COHERENCE_DEADLINE_S
        assert time.monotonic() - started < waited + COHERENCE_DEADLINE_S / 2
        assert (there / "g").exists()
        assert (there / "f").stat().st_size == 5
        assert (there / "f").read_text() == "newer"
        _wait_until(lambda: os.pread(file.fileno(), 100, 0) == b"newer")
    (here / "f").write_text("newest")
    assert (there / "f").read_text() == "newest"


@pytest.mark.alone  # measures time
def test_a_killed_mount_delays_nobody(pair: Pair, request: pytest.FixtureRequest) -> None:
    """A daemon that is gone is not waited for."""
    here, there = _directories(pair, PUSH, request.node.name)
    (here / "f").write_text("old")
    assert (there / "f").read_text() == "old"
    os.kill(pair[1].pid, signal.SIGKILL)
    pair[1].wait_gone()
    started = time.monotonic()
    (here / "f").write_text("new")
    assert time.monotonic() - started < COHERENCE_DEADLINE_S / 2


def test_a_mount_ends_while_others_change_what_it_follows(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    """Unmounting under a stream of changes is clean and delays nobody."""
    here, there = _directories(pair, PUSH, request.node.name)
    (here / "f").write_text("old")
    assert (there / "f").read_text() == "old"
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool:
        unmounting = pool.submit(tectonicfs, "umount", pair[1].path)
        while not unmounting.done():
            started = time.monotonic()
            (here / "f").write_text("new")
            slowest = max(slowest, time.monotonic() - started)
        unmounting.result()
    assert slowest < COHERENCE_DEADLINE_S


# --- plain directories ------------------------------------------------------------------------


def test_close_to_open(plain: tuple[Path, Path]) -> None:
    """Who opens after a close sees data and size, by read, mmap and fstat."""
    here, there = plain
    for number, size in enumerate([5000, 1, 20_000, 0, 7]):
        content = bytes([number + 1]) * size
        (here / "f").write_bytes(content)
        with (there / "f").open("rb") as file:
            assert os.fstat(file.fileno()).st_size == size
            assert file.read() == content
            if size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                    assert mapping[:] == content
        assert "f" in os.listdir(there)


def test_a_name_opens_the_new_file_while_the_old_one_is_open(plain: tuple[Path, Path]) -> None:
    """Replaced or removed elsewhere, a name that the kernel still trusts does not lead to the old
    file, although that lives on; its descriptor does, also by way of /proc."""
    here, there = plain
    (here / "f").write_text("old")
    with (there / "f").open() as old:
        (here / "new").write_text("new")
        (here / "new").rename(here / "f")
        assert (there / "f").read_text() == "new"
        for _ in range(3):
            assert Path(f"/proc/self/fd/{old.fileno()}").read_text() == "old"
    with (there / "f").open() as old:
        (here / "f").unlink()
        with pytest.raises(FileNotFoundError):
            (there / "f").open()
        assert old.read() == "new"


def test_new_names_are_found_at_once(plain: tuple[Path, Path]) -> None:
    """Absence is not remembered: a file made elsewhere is found by name and in listings."""
    here, there = plain
    for number in range(10):
        assert not (there / f"{number}").exists()
        (here / f"{number}").touch()
        assert (there / f"{number}").exists()
        assert len(os.listdir(there)) == number + 1


@pytest.mark.usefixtures("fuse")
def test_a_read_only_mount_sees_changes_at_once(volume: str, tmp_path: Path) -> None:
    """It has no session that a writer could wait for, so its kernel trusts nothing below push
    directories, whatever its time-outs say."""
    patient = "ro,entry_timeout=60,attr_timeout=60,negative_timeout=60"
    with mounted(volume, tmp_path / "here") as one:
        os.setxattr(one.path, POLICY, b"push")
        (one.path / "d").mkdir()
        with mounted(volume, tmp_path / "there", patient) as two:
            here, there = one.path / "d", two.path / "d"
            for number in range(5):
                text = b"v%d" % number * (number + 1)
                (here / "f").write_bytes(text)
                assert (there / "f").stat().st_size == len(text)
                assert (there / "f").read_bytes() == text
                assert not (there / "new").exists()
                (here / "new").touch()
                assert (there / "new").exists()
                (here / "new").rename(here / "moved")
                assert sorted(os.listdir(there)) == ["f", "moved"]
                (here / "moved").unlink()
                assert not (there / "moved").exists()
            tectonicfs("umount", two.path)
        tectonicfs("umount", one.path)
