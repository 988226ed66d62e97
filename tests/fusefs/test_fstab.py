"""`mount -t tectonicfs`, lines of /etc/fstab, and the service: by the system's own programs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs import fstab, registry
from fusefs.mounttable import find_mount
from tests.fusefs.mounts import COMMAND, TIMEOUT_S, tectonicfs

DOCS = Path(__file__).parents[2] / "docs" / "mounting.md"

HELPER = Path("/sbin/mount.tectonicfs")
"""There is one, so those who put it there run alone."""


@pytest.fixture
def helper(fuse: None, tmp_path: Path) -> Iterator[Path]:
    """`mount.tectonicfs` of this checkout in /sbin, where mount(8) looks."""
    if os.getuid() != 0:
        pytest.skip("only root may put a mount helper into /sbin")
    if HELPER.is_symlink() or HELPER.exists():
        pytest.skip(f"{HELPER} is somebody's own")
    script = tmp_path / "mount.tectonicfs"
    script.write_text(f"#!{sys.executable}\nfrom fusefs.fstab import main\nmain()\n")
    script.chmod(0o755)
    HELPER.symlink_to(script)
    try:
        yield script
    finally:
        HELPER.unlink()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory to mount on; at the end nothing is mounted there."""
    directory = tmp_path / "mnt"
    directory.mkdir()
    yield directory
    if find_mount(str(directory)):
        tectonicfs("umount", "--force", directory)


def mount8(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the system's mount with what makes the helper import this checkout."""
    return subprocess.run(
        ["mount", *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def _unmount_and_wait(place: Path) -> str | None:
    """Plain umount(8); returns how the daemon ended."""
    with registry.living_daemon(str(place), os.getuid()) as daemon:
        assert daemon is not None
        subprocess.run(["umount", place], check=True, timeout=TIMEOUT_S)
        return daemon.wait(TIMEOUT_S, lambda waited_s: None)


# --- mount(8) ---------------------------------------------------------------------------------


@pytest.mark.fuse
@pytest.mark.alone
@pytest.mark.usefixtures("helper")
def test_mount8_mounts_and_plain_umount_flushes(volume: str, place: Path, tmp_path: Path) -> None:
    """`mount -t tectonicfs` with options works, the kernel's among them; plain `umount` ends the
    daemon, which flushes first."""
    options = f"log_file={tmp_path / 'log'},nodev,noexec,uid=12,umask=027"
    said = mount8("-v", "-t", "tectonicfs", volume, place, "-o", options)
    assert said.returncode == 0, said.stderr
    assert f"mounted at {place} (pid " in said.stdout
    (place / "f").write_bytes(b"x")
    found = (place / "f").stat()
    assert (found.st_uid, found.st_mode) == (12, 0o100750)
    info = Path("/proc/self/mountinfo").read_text()
    assert re.search(rf" {place} rw,nosuid,nodev,noexec\b.* - fuse.tectonicfs tests ", info)
    assert _unmount_and_wait(place) == registry.CLEAN


@pytest.mark.fuse
@pytest.mark.alone
@pytest.mark.usefixtures("helper")
def test_a_line_of_fstab_is_mounted_once(volume: str, place: Path, tmp_path: Path) -> None:
    """`mount -a` mounts what its line names, with options for others; again, it does nothing."""
    table = tmp_path / "fstab"
    options = (
        f"defaults,_netdev,nofail,user,exec,x-systemd.automount,comment=a,log_file={tmp_path}/log"
    )
    table.write_text(f"{volume} {place} tectonicfs {options} 0 0\n")
    for _ in range(2):
        said = mount8("-a", "-T", table)
        assert (said.returncode, said.stderr) == (0, "")
        assert find_mount(str(place)) is not None
    assert _unmount_and_wait(place) == registry.CLEAN


@pytest.mark.fuse
@pytest.mark.alone
@pytest.mark.usefixtures("helper")
def test_exit_codes_are_those_of_mount8(volume: str, place: Path, tmp_path: Path) -> None:
    """A bad option is 1, a failed mount 32, each with its line; -f only checks; -s passes over."""
    unknown = mount8("-t", "tectonicfs", volume, place, "-o", "big_writes")
    assert unknown.returncode == fstab.WRONG_USAGE
    assert "unknown mount option 'big_writes'" in unknown.stderr
    missing = mount8(
        "-t", "tectonicfs", tmp_path / "none.db", place, "-o", f"log_file={tmp_path}/log"
    )
    assert missing.returncode == fstab.MOUNT_FAILED
    assert "no volume at" in missing.stderr
    assert fstab.run([str(tmp_path / "none.db"), str(place), "-f", "-s", "-o", "big_writes"]) == 0
    assert fstab.run([volume]) == fstab.WRONG_USAGE
    assert find_mount(str(place)) is None


@pytest.mark.fuse
@pytest.mark.alone
@pytest.mark.usefixtures("helper")
def test_remount_says_what_to_do_instead(volume: str, place: Path, tmp_path: Path) -> None:
    """`-o remount` is refused in one line and changes nothing; a bind remount is the kernel's."""
    assert (
        mount8("-t", "tectonicfs", volume, place, "-o", f"log_file={tmp_path}/log").returncode == 0
    )
    said = mount8("-t", "tectonicfs", volume, place, "-o", "remount,ro")
    assert said.returncode == fstab.WRONG_USAGE
    assert "unmount it, then mount it with the others" in said.stderr
    assert said.stderr.count("\n") == 1
    (place / "f").write_bytes(b"x")
    assert mount8("-o", "remount,bind,ro", place).returncode == 0
    with pytest.raises(OSError, match="Read-only"):
        (place / "f").write_bytes(b"y")
    assert _unmount_and_wait(place) == registry.CLEAN


# --- systemd ----------------------------------------------------------------------------------


def test_the_unit_in_the_documentation_is_right(tmp_path: Path) -> None:
    """systemd accepts the example unit without a word."""
    (text,) = re.findall(r"```ini\n(.*?)```", DOCS.read_text(), re.DOTALL)
    program = shutil.which("true")
    assert program is not None
    unit = tmp_path / "tectonicfs@mnt-training.service"
    unit.write_text(text.replace("/usr/local/bin/tectonicfs", program))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.fuse
@pytest.mark.usefixtures("fuse")
def test_the_service_manager_hears_when_the_mount_answers(
    volume: str, place: Path, tmp_path: Path
) -> None:
    """In the foreground READY=1 comes when the mount answers, STOPPING=1 before the last flush."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(TIMEOUT_S)
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, "mount", "-f", volume, str(place)],
            env=os.environ | {"NOTIFY_SOCKET": str(address)}, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert manager.recv(100) == b"READY=1"
            assert (place / "x").exists() is False
            process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(TIMEOUT_S) == 0
