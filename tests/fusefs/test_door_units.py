"""Parts of the door that need no mount: errno table, options, mount table, registry, versions."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import re
import signal
import stat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pyfuse3
import pytest
import trio
from click.testing import CliRunner

from fusefs import errors as door_errors
from fusefs import registry
from fusefs.checks import may_allow_others
from fusefs.cli import mount
from fusefs.errors import errno_of, root_cause
from fusefs.mounttable import Mount, find_mount, holders, mount_point, parse_mountinfo
from fusefs.operations import FuseOperations
from fusefs.options import KNOWN_OPTIONS, MountOptions, parse_options
from fusefs.session import worker_tasks
from fusefs.versions import OpenedVersions
from tectonic_client import errors
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.limits import FUSE_TASK_BYTES, GiB, MiB
from tectonic_client.recorder import Recorder
from tectonic_client.types import Attributes


def _all_errors(root: type[BaseException]) -> list[type[BaseException]]:
    return [root, *(found for sub in root.__subclasses__() for found in _all_errors(sub))]


# --- errno ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", errors.FileSystemError.__subclasses__())
def test_posix_answers_are_those_of_their_docstring(kind: type[errors.TectonicError]) -> None:
    """Each POSIX error class maps to the errno that its docstring names."""
    named = re.search(r"\bE[A-Z0-9]+\b", str(kind.__doc__))
    assert named is not None
    assert errno_of(kind("x"), "test") == getattr(errno, named[0])


def test_every_error_of_the_tree_has_an_entry_or_an_ancestor_with_one() -> None:
    """No error of the tree is treated as unexpected, whoever adds one below a known class."""
    bases = {errors.TectonicError, errors.FileSystemError}
    for kind in _all_errors(errors.TectonicError):
        known = any(base in door_errors.ANSWERS for base in kind.__mro__)
        assert known or kind in bases, kind


def test_corruption_is_eio_and_its_message_reaches_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Corruption answers EIO, and the log names what is corrupt."""
    assert errno_of(errors.CorruptChunk("block 7 in store 0"), "read") == errno.EIO
    assert "read: CorruptChunk: block 7 in store 0" in caplog.text


def test_the_unexpected_is_eio_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """An exception that nobody foresaw answers EIO and leaves its traceback in the log."""
    with pytest.raises(KeyError) as raised:
        {}["surprise"]
    assert errno_of(raised.value, "write") == errno.EIO
    assert "Traceback" in caplog.text
    assert "surprise" in caplog.text


def test_errors_of_a_nursery_are_unwrapped() -> None:
    """An exception group answers like the error that it holds."""
    group = ExceptionGroup("a", [ExceptionGroup("b", [errors.NoSpace("full")])])
    assert errno_of(group, "write") == errno.ENOSPC
    assert isinstance(root_cause(group), errors.NoSpace)


# --- options ----------------------------------------------------------------------------------


def test_options_are_parsed_with_units_and_later_ones_win() -> None:
    """A comma list becomes typed options; a repeated option takes the last value."""
    found = parse_options(
        [
            "ro,allow_other,default_permissions,memory_limit=1GiB",
            "attr_timeout=0.5,rw,log_level=debug",
        ]
    )
    assert found == MountOptions(
        allow_other=True, memory_limit_bytes=GiB, attr_timeout_s=0.5, log_level=logging.DEBUG
    )


def test_options_for_mount8_are_passed_over_and_those_of_the_kernel_kept() -> None:
    """What fstab lines have for others means nothing here; opposites undo each other."""
    found = parse_options(
        ["defaults,noauto,user=me,_netdev,nofail,x-systemd.device-timeout=5,comment=x,X-mine"]
    )
    assert found == MountOptions()
    found = parse_options(["nosuid,exec,nodev,dirsync", "suid,noexec"])
    assert found.kernel == {"suid", "noexec", "nodev", "dirsync"}
    assert parse_options(["what=ever,ro"], sloppy=True) == MountOptions(read_only=True)


def test_access_times_are_kept_unless_told_otherwise() -> None:
    """relatime is the default; the later of relatime and noatime wins; strictatime is refused."""
    assert parse_options([]).access_times
    assert not parse_options(["relatime,noatime"]).access_times
    assert parse_options(["noatime,relatime"]).access_times
    with pytest.raises(errors.BadOption, match="relatime"):
        parse_options(["strictatime"])


def test_metrics_are_served_locally_unless_told_otherwise() -> None:
    """The address may be left out, a name, or an IPv6 address in brackets."""
    texts = ["9100", ":9100", "0.0.0.0:1", "[::1]:65535", "host:9100"]
    found = [parse_options([f"metrics={text}"]).metrics for text in texts]
    local = ("127.0.0.1", 9100)
    assert found == [local, local, ("0.0.0.0", 1), ("::1", 65535), ("host", 9100)]


def test_owners_are_numbers_or_names() -> None:
    """uid= and gid= take both; umask= is octal."""
    found = parse_options(["uid=root,gid=77,umask=027"])
    assert (found.uid, found.gid, found.umask) == (0, 77, 0o027)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uid=no-such-user", "uid: there is no user 'no-such-user'"),
        ("gid=4294967295", "gid: 4294967295 is too large"),
        ("umask=9", "umask: '9' is not an octal number"),
        ("umask=-1", "umask: '-1' is not an octal number"),
        ("metrics=nowhere", "metrics: 'nowhere' is not"),
        ("metrics=:65536", "metrics: ':65536' is not"),
        ("metrics=host:0", "metrics: 'host:0' is not"),
        ("no_such", "unknown mount option 'no_such'; known are ro, rw, allow_other"),
        ("memory_limit=lots", "memory_limit: 'lots' is not a size"),
        ("memory_limit", "memory_limit needs a value"),
        ("attr_timeout=-1", "attr_timeout: '-1' is not between 0 and 86400 seconds"),
        ("store_timeout=soon", "store_timeout: 'soon' is not a number of seconds"),
        ("push_timeout=", "push_timeout needs a value: push_timeout=SECONDS"),
        ("push_timeout=4s", "push_timeout: '4s' is not a number of seconds"),
        ("entry_timeout=nan", "entry_timeout: 'nan' is not between"),
        ("ro=yes", "ro takes no value"),
        ("log_level=loud", "log_level: 'loud' is none of debug, info, warning, error"),
    ],
)
def test_a_bad_option_is_named(text: str, said: str) -> None:
    """Each kind of bad option gives an error that says what is wrong with which."""
    with pytest.raises(errors.BadOption, match=said):
        parse_options([text])


def test_the_help_names_all_options() -> None:
    """`mount --help` shows each option of -o once, with its value's name and its meaning."""
    text = CliRunner().invoke(mount, ["--help"]).output
    for name in KNOWN_OPTIONS.replace("...", "").split(", "):
        found = re.findall(rf"^    {name}\S*  +[A-Z`d]", text, re.MULTILINE)
        assert len(found) == 1, name
    assert "default 256" in text


def test_worker_tasks_stay_inside_their_share_of_the_memory_limit() -> None:
    """Requests in flight cost an eighth of the memory limit, within fixed bounds."""
    assert worker_tasks(256 * MiB) * FUSE_TASK_BYTES == 32 * MiB
    assert worker_tasks(64 * MiB) == 8
    assert worker_tasks(64 * GiB) == 64


def test_user_allow_other_counts_only_as_a_line_of_its_own(tmp_path: Path) -> None:
    """A commented user_allow_other in fuse.conf does not allow others."""
    config = tmp_path / "fuse.conf"
    assert not may_allow_others(config)
    config.write_text("#user_allow_other\n")
    assert not may_allow_others(config)
    config.write_text("# comment\nuser_allow_other\n")
    assert may_allow_others(config)


# --- mount table ------------------------------------------------------------------------------

_MOUNTINFO = r"""
22 27 0:20 / /proc rw,relatime - proc proc rw
42 27 0:39 / /mnt/with\040space rw,nosuid shared:5 - fuse.tectonicfs vol rw,user_id=1000,group_id=0
43 27 0:40 / /mnt/with\040space rw,nosuid - tmpfs none rw
""".strip()


def test_mountinfo_lines_are_understood() -> None:
    """Octal escapes, optional fields and the mounting user are read as proc(5) has them."""
    found = parse_mountinfo(_MOUNTINFO)
    assert found[1] == Mount("/mnt/with space", "fuse.tectonicfs", "vol", "0:39", 1000)
    assert [mount.fstype for mount in found] == ["proc", "fuse.tectonicfs", "tmpfs"]


def test_a_mount_point_is_found_through_a_symbolic_link(tmp_path: Path) -> None:
    """A link to a mount point, or a relative path, leads to the path that the kernel knows."""
    (tmp_path / "link").symlink_to("/proc")
    assert mount_point(str(tmp_path / "link")) == "/proc"
    assert mount_point("/proc/../proc") == "/proc"
    mount = find_mount("/proc")
    assert mount is not None
    assert mount.fstype == "proc"
    assert find_mount(str(tmp_path)) is None


def test_holders_names_the_process_and_what_it_holds(tmp_path: Path) -> None:
    """Who has a file of the directory open is named with its pid and the file."""
    with (tmp_path / "held").open("w"):
        found = list(holders(str(tmp_path)))
    assert any(f"pid {os.getpid()} " in text and "held" in text for text in found)


# --- registry ---------------------------------------------------------------------------------


@pytest.fixture
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own for the registry's files."""
    path = tmp_path / "state"
    monkeypatch.setattr(registry, "_candidates", lambda user_id: [str(path)])
    return path


def _hold(pipe: Connection, outcome: str | None) -> None:
    claim = registry.claim("/mnt/x", "v.db", None)
    pipe.send("claimed")
    pipe.recv()
    if outcome is not None:
        claim.finish(outcome)


def test_files_of_other_users_are_not_believed(state_directory: Path) -> None:
    """A file that somebody else made in /tmp names no daemon: it could name any process."""
    claim = registry.claim("/mnt/x", "v.db", None)
    with registry.living_daemon("/mnt/x", os.getuid()) as daemon:
        assert daemon is not None
    with registry.living_daemon("/mnt/x", os.getuid() + 1) as daemon:
        assert daemon is None
    claim.finish(registry.CLEAN)


@pytest.mark.parametrize("outcome", [registry.CLEAN, "the store is full", None])
def test_waiting_for_a_daemon_tells_how_it_ended(
    state_directory: Path, outcome: str | None
) -> None:
    """The lock's end is the daemon's end, and the file tells a clean one, an error and a crash."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs, outcome))
    process.start()
    assert ours.recv() == "claimed"
    with pytest.raises(errors.MountError, match="still runs"):
        registry.claim("/mnt/x", "v.db", None)
    with registry.living_daemon("/mnt/x", os.getuid()) as daemon:
        assert daemon is not None
        assert daemon.state.pid == process.pid
        with pytest.raises(errors.MountError, match="still flushing"):
            daemon.wait(0.01, lambda waited_s: None)
        ours.send("go")
        assert daemon.wait(30.0, lambda waited_s: None) == outcome
        process.join()
    with registry.living_daemon("/mnt/x", os.getuid()) as daemon:
        assert daemon is None


@pytest.mark.parametrize("obstacle", ["directory", "link"])
def test_a_state_file_that_is_none_is_refused(
    state_directory: Path, tmp_path: Path, obstacle: str
) -> None:
    """One line names it; what a link points to is left as it is."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = Path(registry._own_directory()) / registry._file_name("/mnt/x")
    if obstacle == "link":
        place.symlink_to(precious)
    else:
        place.mkdir()
    with pytest.raises(errors.MountError, match="cannot keep the state of the mount"):
        registry.claim("/mnt/x", "v.db", None)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0\xff", b"[]", b"{}", b"null", b"[" * 60_000, b"9" * 60_000,
        b'{"pid": 1, "directory": "/", "colour": 1}',
    ],
)  # fmt: skip
def test_a_state_file_that_cannot_be_read_is_one_error(state_directory: Path, data: bytes) -> None:
    """Whoever asks for the daemon that holds it is told so, whatever it says."""
    claim = registry.claim("/mnt/x", "v.db", None)
    (Path(registry._own_directory()) / registry._file_name("/mnt/x")).write_bytes(data)
    with (
        pytest.raises(errors.MountError, match="starting or ending"),
        registry.living_daemon("/mnt/x", os.getuid()),
    ):
        raise AssertionError("it was found")
    claim.finish(registry.CLEAN)


def test_a_claim_takes_over_the_file_of_a_killed_daemon(state_directory: Path) -> None:
    """What a killed daemon left behind does not keep anybody from mounting again."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs, None))
    process.start()
    assert ours.recv() == "claimed"
    os.kill(int(process.pid or 0), signal.SIGKILL)
    process.join()
    registry.claim("/mnt/x", "v.db", None).finish(registry.CLEAN)
    assert list(state_directory.iterdir()) == []


# --- versions ---------------------------------------------------------------------------------


def _file(inode: int, *, size: int = 0, mtime_ns: int = 0, ctime_ns: int = 0) -> Attributes:
    return Attributes(inode, 0o100644, 1, 0, 0, 0, size, 0, mtime_ns, ctime_ns)


def test_only_an_identical_version_keeps_the_page_cache() -> None:
    """A first open, and one after a change of size, mtime or ctime, drop the kernel's pages."""
    versions = OpenedVersions()
    assert not versions.note_open(_file(5))
    assert versions.note_open(_file(5))
    for changed in (_file(5, size=1), _file(5, mtime_ns=1), _file(5, ctime_ns=1)):
        assert not versions.note_open(changed)
        assert versions.note_open(changed)


def test_remembered_versions_are_bounded() -> None:
    """The file that was opened longest ago is forgotten first."""
    versions = OpenedVersions(capacity=2)
    for inode in (1, 2, 1, 3):
        versions.note_open(_file(inode))
    assert versions.note_open(_file(1))
    assert not versions.note_open(_file(2))


def _hold_file(path: Path, ready: Connection) -> None:
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    ready.send("locked")
    signal.pause()


def test_who_is_told_to_end_is_who_holds_the_lock(state_directory: Path, tmp_path: Path) -> None:
    """Whatever pid a file names: its owner must not make root end other processes; and where the
    holder is somebody else's process, it is left alone."""
    path = tmp_path / "state"
    path.write_text(json.dumps({"pid": os.getpid(), "directory": "/mnt/x", "volume": "v"}))
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_hold_file, args=(path, theirs))
    process.start()
    assert ours.recv() == "locked"
    descriptor = os.open(path, os.O_RDWR)
    daemon = registry.Daemon(descriptor, str(path))
    with pytest.raises(errors.MountError, match=f"pid {process.pid}.*does not belong to user"):
        daemon.terminate(os.getuid() + 1)
    assert process.is_alive()
    daemon.terminate(os.getuid())
    process.join(30)
    assert process.exitcode == -signal.SIGTERM
    with pytest.raises(errors.MountError, match="just ended"):
        daemon.terminate(os.getuid())
    os.close(descriptor)


def test_a_daemon_that_hangs_in_the_kernel_is_not_waited_for_once_it_has_said_how_it_ended(
    state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread on a frozen device keeps the process and its lock; umount tells the outcome."""
    monkeypatch.setattr(registry, "DAEMON_EXIT_S", 0.0)
    claim = registry.claim("/mnt/x", "v.db", None)
    with registry.living_daemon("/mnt/x", os.getuid()) as daemon:
        assert daemon is not None
        claim.finish("the store does not answer")
        assert daemon.wait(30.0, lambda waited_s: None) == "the store does not answer"


class _OneFile:
    """A file system of one file."""

    def __init__(self) -> None:
        self.open_handles: set[int] = set()
        self.follower = None

    async def getattr(self, inode: int) -> Attributes:
        return Attributes(inode, stat.S_IFREG | 0o644, 1, 0, 0, 0, 0, 0, 0, 0)

    async def open(self, inode: int, flags: int) -> int:
        handle = len(self.open_handles) + 1
        self.open_handles.add(handle)
        return handle

    async def release(self, handle: int) -> None:
        self.open_handles.remove(handle)


def test_an_open_that_the_kernel_refuses_to_hear_of_leaves_no_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel's attributes cannot be dropped the open fails, its handle is closed, and the
    next one does not keep pages of which nobody knows the version."""

    def refuse(inode: int, *, attr_only: bool) -> None:
        raise OSError(errno.ENOTCONN, "not connected")

    async def main() -> None:
        files = _OneFile()
        operations = FuseOperations(cast(FileSystem, files), MountOptions(), Recorder())
        with monkeypatch.context() as patch:
            patch.setattr(pyfuse3, "invalidate_inode", refuse)
            with pytest.raises(pyfuse3.FUSEError):
                await operations.open(7, os.O_RDONLY, None)
        assert files.open_handles == set()
        monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda inode, attr_only: None)
        assert not (await operations.open(7, os.O_RDONLY, None)).keep_cache
        assert (await operations.open(7, os.O_RDONLY, None)).keep_cache

    trio.run(main)
