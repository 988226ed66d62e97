"""A volume in setgid directories is its group's; in all others it is its owner's alone."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import FormatOptions, format_volume, open_volume
from tests.filesystem.faultrig import load_file, store_file
from tests.leaks import assert_no_leaks, clean

GROUP = 54_321
MEMBER, STRANGER = 54_322, 54_323

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that every user can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="tectonic-shared-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def _format(directory: Path, mode: int) -> str:
    for name in ("metadata", "store"):
        (directory / name).mkdir()
        os.chown(directory / name, 0, GROUP)
        os.chmod(directory / name, mode)
    url = str(directory / "metadata" / "meta.db")
    format_volume(url, FormatOptions("shared", (str(directory / "store"),)))
    return url


def _replace(url: str, old: bytes, new: bytes) -> None:
    """As some user: read one file, remove it, write another."""

    async def main() -> None:
        async with open_volume(url) as volume:
            if old:
                assert await load_file(volume.filesystem, old) == old * 1000
                await volume.filesystem.unlink(ROOT_INODE, old)
            await store_file(volume.filesystem, new, new * 1000)
            await clean(volume)
            await assert_no_leaks(volume)

    trio.run(main)


def _as_user(user_id: int, group_id: int, url: str, old: bytes, new: bytes) -> None:
    os.setgroups([])
    os.setgid(group_id)
    os.setuid(user_id)
    os.umask(0o077)
    _replace(url, old, new)


def _exit_code(user_id: int, group_id: int, url: str, old: bytes, new: bytes) -> int | None:
    process = multiprocessing.get_context("fork").Process(
        target=_as_user, args=(user_id, group_id, url, old, new)
    )
    process.start()
    process.join(60)
    return process.exitcode


def _modes(directory: Path) -> set[int]:
    return {
        stat.S_IMODE(path.stat().st_mode)
        for path in directory.rglob("*")
        if path.is_file()
    }  # fmt: skip


def test_a_setgid_directory_shares_the_volume_with_its_group(directory: Path) -> None:
    """Root and a member of the group read, write and delete each other's chunks, whatever their
    umask; everybody else is refused."""
    before = os.umask(0o077)
    try:
        url = _format(directory, 0o2770)
        _replace(url, b"", b"root")
        assert _exit_code(MEMBER, GROUP, url, b"root", b"member") == 0
        _replace(url, b"member", b"again")
    finally:
        os.umask(before)
    assert _modes(directory / "store") == {0o660}
    assert _modes(directory / "metadata") == {0o660}
    assert _exit_code(STRANGER, STRANGER, url, b"again", b"stranger") != 0


def test_in_other_directories_chunks_are_private(directory: Path) -> None:
    """Whoever may enter the directory still cannot read what the mount would refuse them."""
    url = _format(directory, 0o755)
    _replace(url, b"", b"root")
    assert _modes(directory / "store") == {0o600}
    assert _exit_code(MEMBER, GROUP, url, b"root", b"member") != 0
