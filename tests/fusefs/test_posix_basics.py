"""What programs do with files, on a mounted volume: one directed test per behaviour."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fusefs.posixcalls import pattern

pytestmark = pytest.mark.fuse

_BLOCK = 256 * 1024


def _fails_with(number: int, call: Callable[[], object]) -> bool:
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the errno is checked
        call()
    return raised.value.errno == number


# --- bytes ------------------------------------------------------------------------------------


def test_a_large_file_reads_back_as_written(here: Path) -> None:
    """40 MiB in writes of 3 MiB (several requests each) come back identical after reopening."""
    data = pattern(1, 40 * 1024 * 1024)
    with (here / "f").open("wb", buffering=0) as file:
        for start in range(0, len(data), 3 * 1024 * 1024):
            file.write(data[start : start + 3 * 1024 * 1024])
    assert (here / "f").stat().st_size == len(data)
    assert hashlib.sha256((here / "f").read_bytes()).digest() == hashlib.sha256(data).digest()


def test_appends_of_two_writers_never_overwrite_each_other(here: Path) -> None:
    """O_APPEND writes through two descriptors all land at the end, whole."""
    path = here / "log"
    descriptors = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)]
    for number in range(100):
        os.write(descriptors[number % 2], b"%05d\n" % number)
    for descriptor in descriptors:
        os.close(descriptor)
    assert path.read_bytes() == b"".join(b"%05d\n" % number for number in range(100))


def test_holes_read_as_zeros(here: Path) -> None:
    """What was never written, or was cut off and grown again, reads as zeros."""
    with (here / "f").open("w+b", buffering=0) as file:
        file.write(b"x" * 1000)
        file.seek(3 * _BLOCK)
        file.write(b"end")
        file.truncate(10)
        file.truncate(2000)
    assert (here / "f").read_bytes() == b"x" * 10 + bytes(1990)


def test_a_mapped_file_shows_its_bytes(here: Path) -> None:
    """mmap for reading gives the file's content across blocks."""
    data = pattern(2, 3 * _BLOCK + 77)
    (here / "f").write_bytes(data)
    with (here / "f").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == data


def test_writes_through_a_shared_map_arrive(here: Path) -> None:
    """A file opened for reading and writing can be mapped writable; msync stores it."""
    (here / "f").write_bytes(bytes(2 * _BLOCK))
    with (here / "f").open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[_BLOCK - 3 : _BLOCK + 3] = b"across"
        view.flush()
    assert (here / "f").read_bytes().strip(b"\x00") == b"across"
    assert (here / "f").stat().st_size == 2 * _BLOCK


def test_a_map_is_never_written_back_through_an_appending_handle(here: Path) -> None:
    """Pages of a map land where they belong although the file is also open for appending."""
    (here / "f").write_bytes(bytes(8192))
    with (here / "f").open("a+b", buffering=0) as log, (here / "f").open("r+b") as file:
        with pytest.raises(OSError, match="No such device"):
            mmap.mmap(log.fileno(), 0)
        with mmap.mmap(file.fileno(), 0) as view:
            view[5000:5003] = b"map"
            view.flush()
        log.write(b"tail")
    assert (here / "f").read_bytes() == bytes(5000) + b"map" + bytes(8192 - 5003) + b"tail"


def test_a_reader_sees_what_another_descriptor_writes(here: Path) -> None:
    """Write-only descriptors bypass the page cache; cached pages of readers must not get stale."""
    (here / "f").write_bytes(b"old" * 10_000)
    with (here / "f").open("rb", buffering=0) as reader:
        assert reader.read(6) == b"oldold"
        descriptor = os.open(here / "f", os.O_WRONLY)
        os.pwrite(descriptor, b"NEW", 3)
        assert os.pread(reader.fileno(), 6, 0) == b"oldNEW"
        os.close(descriptor)


def test_eight_writers_at_once(here: Path) -> None:
    """Eight files written at the same time each come back as written."""

    def write(number: int) -> bytes:
        data = pattern(number, 4 * 1024 * 1024 + number)
        with (here / f"f{number}").open("wb", buffering=0) as file:
            for start in range(0, len(data), 500_000):
                file.write(data[start : start + 500_000])
            os.fsync(file.fileno())
        return hashlib.sha256(data).digest()

    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(write, range(8)))
    found = [hashlib.sha256((here / f"f{n}").read_bytes()).digest() for n in range(8)]
    assert found == expected


def test_eight_writers_of_one_file(here: Path) -> None:
    """Eight threads that write interleaved pieces of one file lose none."""
    piece = 100_000
    descriptor = os.open(here / "f", os.O_WRONLY | os.O_CREAT)

    def write(number: int) -> None:
        for index in range(number, 80, 8):
            os.pwrite(descriptor, pattern(index, piece), index * piece)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    assert (here / "f").read_bytes() == b"".join(pattern(index, piece) for index in range(80))


# --- names ------------------------------------------------------------------------------------


def test_an_unlinked_open_file_lives_on(here: Path) -> None:
    """Reading, writing, stat and truncate work on a file without a name until it is closed."""
    with (here / "f").open("w+b", buffering=0) as file:
        file.write(b"before")
        (here / "f").unlink()
        assert list(here.iterdir()) == []
        file.write(b" after")
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), 100, 0) == b"before after"
        assert os.fstat(file.fileno()).st_nlink == 0
        file.truncate(3)
        assert os.pread(file.fileno(), 100, 0) == b"bef"


def test_a_replaced_open_file_lives_on(here: Path) -> None:
    """Who has a file open keeps it although another is renamed over its name."""
    (here / "old").write_bytes(b"old")
    (here / "new").write_bytes(b"new")
    with (here / "old").open("rb", buffering=0) as file:
        (here / "new").rename(here / "old")
        assert file.read() == b"old"
    assert (here / "old").read_bytes() == b"new"


def test_a_listing_of_5000_names_is_complete(here: Path) -> None:
    """Every entry of a big directory is listed exactly once, with its attributes."""
    names = {f"file-{number:05d}" for number in range(5000)}
    for name in names:
        os.close(os.open(here / name, os.O_CREAT | os.O_WRONLY))
    with os.scandir(here) as entries:
        found = [entry.name for entry in entries]
    assert len(found) == 5000
    assert set(found) == names
    for name in names:
        (here / name).unlink()
    here.rmdir()


def test_entries_removed_while_listing_do_not_hide_others(here: Path) -> None:
    """Removing each entry as it is listed (rm -r) empties the directory in one pass."""
    for number in range(500):
        (here / f"{number}").touch()
    with os.scandir(here) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(here) == []


def test_names_are_bytes(here: Path) -> None:
    """Any byte but / and NUL is allowed, up to 255 of them."""
    folder = os.fsencode(here)
    name = b"\xff\x01 \n" + "ü".encode() * 100
    os.close(os.open(folder + b"/" + name, os.O_CREAT))
    os.close(os.open(folder + b"/" + b"n" * 255, os.O_CREAT))
    assert set(os.listdir(folder)) == {name, b"n" * 255}


def test_a_name_of_256_bytes_cannot_be_made(here: Path) -> None:
    """ENAMETOOLONG for creating files and directories."""
    name = here / ("n" * 256)
    assert _fails_with(errno.ENAMETOOLONG, name.mkdir)
    assert _fails_with(errno.ENAMETOOLONG, lambda: os.open(name, os.O_CREAT))


def test_a_name_of_256_bytes_cannot_be_looked_up(here: Path) -> None:
    """ENAMETOOLONG, not ENOENT."""
    assert _fails_with(errno.ENAMETOOLONG, (here / ("n" * 256)).stat)


def test_the_umask_applies_once(here: Path) -> None:
    """Files, directories and fifos get the mode asked for without the bits of the umask."""
    umask = os.umask(0o027)
    try:
        os.close(os.open(here / "f", os.O_CREAT, 0o666))
        (here / "d").mkdir(0o777)
        os.mkfifo(here / "p", 0o666)
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in here.iterdir()}
    assert modes == {"f": 0o640, "d": 0o750, "p": 0o640}


def test_a_setgid_directory_passes_its_group_on(here: Path) -> None:
    """New files take the directory's group, new directories also its setgid bit."""
    os.chown(here, 0, 1234)
    here.chmod(0o2775)
    (here / "f").touch()
    (here / "d").mkdir()
    assert (here / "f").stat().st_gid == 1234
    assert (here / "d").stat().st_gid == 1234
    assert (here / "d").stat().st_mode & stat.S_ISGID


# --- attributes -------------------------------------------------------------------------------


def test_times_keep_their_nanoseconds_and_now_is_now(here: Path) -> None:
    """utimensat stores nanoseconds; UTIME_NOW takes the clock; a write moves mtime on."""
    path = here / "f"
    path.touch()
    os.utime(path, ns=(1_000_000_001, 2_000_000_002))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (1_000_000_001, 2_000_000_002)
    path.write_bytes(b"x")
    written = path.stat().st_mtime_ns
    assert written > 2_000_000_002
    os.utime(path)
    # "Now" is the kernel's coarse clock: up to a tick of 10 ms behind the one that writes take.
    assert path.stat().st_mtime_ns >= written - 10_000_000


def test_reading_changes_the_access_time_once(here: Path) -> None:
    """As relatime: a read after a change shows in stat, by read and mmap; later ones do not."""
    for name in ("read", "mapped"):
        path = here / name
        path.write_bytes(b"x")
        written = path.stat()
        assert written.st_atime_ns <= written.st_mtime_ns
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert (view[:] if name == "mapped" else file.read()) == b"x"
            accessed = path.stat()
            assert accessed.st_atime_ns > written.st_mtime_ns
            assert accessed.st_ctime_ns == written.st_ctime_ns
        assert path.read_bytes() == b"x"
        assert path.stat().st_atime_ns == accessed.st_atime_ns


def test_a_set_mtime_survives_closing(here: Path) -> None:
    """cp -p and tar set the time before they close: flushing the data must not move it."""
    with (here / "f").open("wb") as file:
        file.write(b"data")
        file.flush()
        os.utime(file.fileno(), ns=(5, 6))
    assert (here / "f").stat().st_mtime_ns == 6


def test_a_directory_counts_its_subdirectories(here: Path) -> None:
    """nlink of a directory is 2 and one per subdirectory; find(1) relies on it."""
    for name in "abc":
        (here / name).mkdir()
    assert here.stat().st_nlink == 5
    (here / "a").rmdir()
    assert here.stat().st_nlink == 4


def test_statfs_tells_the_space_of_the_store(here: Path) -> None:
    """df shows the size and free space of the store's device and the longest name."""
    usage, host = os.statvfs(here), os.statvfs("/tmp")
    assert usage.f_namemax == 255
    assert 0 < usage.f_bavail <= usage.f_blocks
    assert usage.f_blocks * usage.f_frsize == pytest.approx(host.f_blocks * host.f_frsize, rel=0.01)


def test_fsync_of_files_and_directories(here: Path) -> None:
    """fsync, fdatasync and fsync of a directory succeed, on clean files and read-only ones too.

    That they keep what they promise is shown in test_sudden_death.py.
    """
    with (here / "f").open("wb", buffering=0) as file:
        os.fsync(file.fileno())
        file.write(b"x")
        os.fdatasync(file.fileno())
        os.fsync(file.fileno())
    for path, flags in ((here / "f", os.O_RDONLY), (here, os.O_DIRECTORY)):
        descriptor = os.open(path, flags)
        os.fsync(descriptor)
        os.close(descriptor)


def test_extended_attributes(here: Path) -> None:
    """Values of any bytes up to Linux's limits, flags and errors as on a local file system."""
    path, link = here / "f", here / "link"
    path.touch()
    link.symlink_to("f")
    values = {"user.empty": b"", "user.large": bytes(range(256)) * 256, "trusted.x": b"\0y"}
    if os.getuid():
        del values["trusted.x"]
    for name, value in values.items():
        os.setxattr(path, name, value)
    assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == values
    os.setxattr(here, "user.directory", b"1")
    assert os.getxattr(here, "user.directory") == b"1"
    calls: list[tuple[int, Callable[[], object]]] = [
        (errno.EEXIST, lambda: os.setxattr(path, "user.empty", b"1", os.XATTR_CREATE)),
        (errno.ENODATA, lambda: os.setxattr(path, "user.other", b"1", os.XATTR_REPLACE)),
        (errno.ENODATA, lambda: os.getxattr(path, "user.other")),
        (errno.ENODATA, lambda: os.removexattr(path, "user.other")),
        (errno.E2BIG, lambda: os.setxattr(path, "user.huge", bytes(65_537))),
        (errno.ERANGE, lambda: os.setxattr(path, "user." + 251 * "x", b"")),
        (errno.EINVAL, lambda: os.setxattr(path, "user.tectonicfs.unknown", b"1")),
        (errno.EINVAL, lambda: os.setxattr(path, "user.tectonicfs.coherence", b"never")),
        (errno.EOPNOTSUPP, lambda: os.setxattr(path, "nothing.x", b"1")),
        (errno.EPERM, lambda: os.setxattr(link, "user.x", b"1", follow_symlinks=False)),
    ]
    for number, call in calls:
        assert _fails_with(number, call)
    os.rename(path, here / "g")
    os.removexattr(here / "g", "user.large")
    assert sorted(os.listxattr(here / "g")) == sorted(values.keys() - {"user.large"})


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_APPEND])
def test_writing_takes_set_user_id_away(here: Path, flags: int) -> None:
    """A program that somebody without privileges has written to lends nobody's rights, also where
    it got the bits while it was open. (What goes through the page cache the kernel sees to.)"""
    path = here / "f"
    for mode in (0o4777, 0o2777, 0o6777):
        path.write_bytes(b"")
        path.chmod(0o777)
        descriptor = os.open(path, flags)
        try:
            path.chmod(mode)
            assert _as_nobody(lambda d=descriptor: os.write(d, b"x")) == 0
            assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o777
        finally:
            os.close(descriptor)
        assert stat.S_IMODE(path.stat().st_mode) == 0o777
    path.chmod(0o2767)  # without execution for the group the bit means something else
    path.write_bytes(b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o2767


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file capabilities")
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_APPEND, os.O_RDWR])
def test_writing_takes_capabilities_away(here: Path, flags: int) -> None:
    """A program that was written to or cut lends no capabilities, whoever did it, as on a local
    file system; other attributes stay."""
    path = here / "f"
    path.write_bytes(b"xy")
    path.chmod(0o777)
    os.setxattr(path, "user.kept", b"1")
    descriptor = os.open(path, flags)
    changes: list[Callable[[], object]] = [
        lambda: os.write(descriptor, b"x"),
        lambda: os.ftruncate(descriptor, 1),
        lambda: os.truncate(f"/proc/self/fd/{descriptor}", 0),
        lambda: os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_TRUNC)),
    ]
    try:
        for change in changes:
            for who in (_as_nobody, _as_root):
                os.setxattr(path, _CAPABILITY, _MAY_CHOWN)
                assert who(change) == 0
                assert os.listxattr(path) == ["user.kept"]
    finally:
        os.close(descriptor)


_CAPABILITY = "security.capability"
_MAY_CHOWN = bytes.fromhex("0100000201000000000000000000000000000000")
"""VFS_CAP_REVISION_2, effective, with CAP_CHOWN permitted."""


def _as_root(work: Callable[[], object]) -> int:
    work()
    return 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may set trusted attributes")
def test_trusted_attributes_are_listed_to_root_only(here: Path) -> None:
    """Others see neither names nor values, as on a local file system."""
    path = here / "f"
    path.touch()
    path.chmod(0o777)
    os.setxattr(path, "trusted.x", b"1")
    os.setxattr(path, "user.x", b"1")
    assert sorted(os.listxattr(path)) == ["trusted.x", "user.x"]

    with path.open() as file:

        def look() -> None:
            assert os.listxattr(file.fileno()) == ["user.x"]
            assert _fails_with(errno.ENODATA, lambda: os.getxattr(file.fileno(), "trusted.x"))

        assert _as_nobody(look) == 0


def _as_nobody(work: Callable[[], object]) -> int:
    """Exit status of a child without privileges that does `work`."""
    child = os.fork()
    if not child:
        try:
            if not os.getuid():
                os.setgid(65534)
                os.setuid(65534)
            work()
        except BaseException:  # noqa: BLE001 - it must not run the tests that follow
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_rename_flags_that_are_not_supported_are_refused(here: Path) -> None:
    """RENAME_WHITEOUT is EINVAL, not a plain rename."""
    from tests.fusefs.posixcalls import Call, Runner

    (here / "a").touch()
    assert Runner(str(here)).run(Call("rename", ("a", "b", 4))) == ("error", "EINVAL")
    assert os.listdir(here) == ["a"]


def test_a_tree_copied_by_real_programs_is_identical(here: Path) -> None:
    """cp -a, tar and diff agree about a tree of Python's library on the mount and on the host."""
    source = Path(os.__file__).parent / "json"
    subprocess.run(["cp", "-a", source, here / "copy"], check=True, timeout=60)
    subprocess.run(["diff", "-r", source, here / "copy"], check=True, timeout=60)
    (here / "untarred").mkdir()
    archive = subprocess.run(
        ["tar", "-C", here / "copy", "-cf", "-", "."], check=True, timeout=60, capture_output=True
    ).stdout
    subprocess.run(
        ["tar", "-C", here / "untarred", "-xf", "-"], check=True, timeout=60, input=archive
    )
    subprocess.run(["diff", "-r", source, here / "untarred"], check=True, timeout=60)
