"""fio writes through the mount and verifies what it reads back; installed by apt if missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

_INSTALL_TIMEOUT_S = 600


@pytest.fixture(scope="module")
def fio() -> str:
    """Path of the program."""
    found = shutil.which("fio")
    if found is None:
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "fio"],
            check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            timeout=_INSTALL_TIMEOUT_S,
        )  # fmt: skip
        found = shutil.which("fio")
    assert found is not None, "the fio package brought no program"
    return found


@pytest.mark.timeout(_INSTALL_TIMEOUT_S + 300)
@pytest.mark.parametrize(
    ("engine", "pattern", "sizes", "total"),
    [
        ("psync", "write", "1m", "32m"),
        ("psync", "randwrite", "4k", "4m"),
        ("psync", "randrw", "512-64k", "8m"),
        ("mmap", "randwrite", "4k", "4m"),
        ("mmap", "randrw", "4k-128k", "8m"),
    ],
)
def test_fio_finds_what_it_has_written(
    here: Path, fio: str, engine: str, pattern: str, sizes: str, total: str
) -> None:
    """Two jobs with a checksum in each block: every one of them is found again."""
    option = "bsrange" if "-" in sizes else "bs"
    result = subprocess.run(
        [
            fio, "--name=job", f"--directory={here}", f"--ioengine={engine}", f"--rw={pattern}",
            f"--{option}={sizes}", f"--size={total}", "--numjobs=2", "--verify=crc32c",
            "--verify_fatal=1", "--verify_dump=0", "--do_verify=1", "--randseed=1",
            "--fsync_on_close=1", "--eta=never",
        ],
        cwd=here, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "verify:" not in result.stderr
