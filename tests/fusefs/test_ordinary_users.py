"""Lines of /etc/fstab with `user`, as an ordinary user, by the system's own mount and umount.

In a mount namespace of its own: there /etc/fstab and /dev/fuse are this test's, and the interpreter
is within reach of everybody wherever it lies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fusefs.mounts import COMMAND, TIMEOUT_S
from tests.fusefs.test_fstab import HELPER

# Alone: there is one /sbin.
pytestmark = [pytest.mark.fuse, pytest.mark.alone, pytest.mark.usefixtures("fuse")]

_PROLOGUE = """
set -eu
as_user() { runuser -u nobody -- env HOME="$BASE/home" PYTHONPATH="$PYTHONPATH" "$@"; }
tectonicfs() { as_user "$PYTHON" -c "$COMMAND" "$@"; }
if ! as_user test -x "$PYTHON"; then  # show it through a parent that is closed to others
    closed=$(dirname "$PREFIX")
    while as_user test -x "$closed"; do closed=$(dirname "$closed"); done
    while ! as_user test -x "$(dirname "$closed")"; do closed=$(dirname "$closed"); done
    mount --bind "$PREFIX" "$BASE/aside"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    mkdir -p "$PREFIX"
    mount --move "$BASE/aside" "$PREFIX"
fi
mknod "$BASE/fuse" c 10 229
chmod 666 "$BASE/fuse"
mount --bind "$BASE/fuse" /dev/fuse
mount --bind "$BASE/fstab" /etc/fstab
tectonicfs format "$BASE/home/meta.db" --name theirs --store "$BASE/home/store"
"""
"""`PREFIX` is the interpreter's installation; of its parents only the closed one is covered."""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that everybody reaches: a home, a table of mounts, the helper of /sbin."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    if HELPER.is_symlink() or HELPER.exists():
        pytest.skip(f"{HELPER} is somebody's own")
    with tempfile.TemporaryDirectory(prefix="tectonicfs-user-") as name:
        path = Path(name)
        path.chmod(0o755)
        for directory in ("home", "mnt", "aside"):
            (path / directory).mkdir()
        for theirs in (path / "home", path / "mnt"):
            os.chown(theirs, 65_534, 65_534)
        script = path / "helper"
        search = [*filter(None, sys.path), str(Path(__file__).parents[2])]
        script.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path[:0] = {search!r}\n"
            "from fusefs.fstab import main\nmain()\n"
        )
        script.chmod(0o755)
        options = f"noauto,user,log_file={path}/home/log"
        (path / "fstab").write_text(f"{path}/home/meta.db {path}/mnt tectonicfs {options} 0 0\n")
        HELPER.symlink_to(script)
        try:
            yield path
        finally:
            HELPER.unlink()


def _run(base: Path, script: str) -> str:
    """What a script says that runs as root in a mount namespace of its own."""
    variables = {
        "BASE": str(base), "PYTHON": sys.executable, "PREFIX": sys.base_prefix,
        "COMMAND": COMMAND, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _PROLOGUE + script], env=os.environ | variables,
        cwd=base, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_user_mounts_and_unmounts_a_line_of_fstab(base: Path) -> None:
    """`mount DIR`, again, `umount DIR` and `tectonicfs umount DIR` work for who may; others are
    told whose it is; root unmounts it too, and the user's data is there each time."""
    said = _run(
        base,
        """
        as_user mount "$BASE/mnt"
        as_user mount "$BASE/mnt"
        as_user sh -c 'echo mine > "$0"' "$BASE/mnt/f"
        grep -c " $BASE/mnt .*nosuid,nodev.*user_id=65534" /proc/self/mountinfo
        tectonicfs umount "$BASE/mnt"
        as_user mount "$BASE/mnt"
        as_user cat "$BASE/mnt/f"
        runuser -u daemon -- env PYTHONPATH="$PYTHONPATH" "$PYTHON" -c "$COMMAND" \\
            umount "$BASE/mnt" 2>&1 || echo refused
        "$PYTHON" -c "$COMMAND" umount "$BASE/mnt"
        as_user mount "$BASE/mnt"
        as_user cat "$BASE/mnt/f"
        as_user umount "$BASE/mnt"
        ! grep " $BASE/mnt " /proc/self/mountinfo
        tectonicfs umount "$BASE/mnt" > "$BASE/last" 2>&1 || true  # its daemon may flush still
        """,
    )
    lines = said.splitlines()[1:]
    assert lines[0] == "1"
    assert lines[2] == lines[-1] == "mine"
    assert lines[1].endswith("everything is flushed")
    assert "was mounted by user 65534: only they or root may unmount it" in lines[3]
    assert lines[4] == "refused"
    assert lines[5].endswith("everything is flushed")
