"""Formatting, looking at and opening volumes, as functions and as commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tectonic_client.errors import (
    BadOption,
    BadURL,
    FormatTooNew,
    SessionLost,
    StoreMismatch,
    VolumeExists,
    VolumeNotFound,
)
from tectonic_client.kv.open import open_kv
from tectonic_client.limits import MiB
from tectonic_client.metadata import keys
from tectonic_client.records import Codec, VolumeRecord
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import (
    FormatOptions,
    VolumeOptions,
    format_volume,
    open_volume,
    volume_status,
)

COMMAND = [sys.executable, "-m", "tectonic_client.cli.main"]


def _options(tmp_path: Path, **changes: object) -> FormatOptions:
    options = FormatOptions(name="test", stores=(str(tmp_path / "store"),))
    return replace(options, **changes)


def _open(url: str, options: VolumeOptions | None = None) -> None:
    async def main() -> None:
        async with open_volume(url, options):
            pass

    trio.run(main)


def _tectonicfs(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_what_is_formatted_is_what_status_shows(tmp_path: Path) -> None:
    """All choices are recorded and come back, through the functions and as JSON."""
    url = str(tmp_path / "meta.db")
    made = format_volume(
        url,
        _options(
            tmp_path, chunk_bytes=1 * MiB, block_bytes=4 * MiB, codec=Codec.ZSTD, level=3,
            stores=(str(tmp_path / "a"), str(tmp_path / "b")),
        ),
    )  # fmt: skip
    found = volume_status(f"sqlite://{url}")
    assert found.volume == made
    assert [store.record.url for store in found.stores] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    assert all(store.problem is None and store.total_bytes > 0 for store in found.stores)
    shown = json.loads(_tectonicfs("status", url, "--json").stdout)
    assert shown["name"] == "test"
    assert shown["compression"] == "zstd:3"
    assert (shown["block_bytes"], shown["chunk_bytes"]) == (4 * MiB, 1 * MiB)
    assert len(shown["stores"]) == 2


def test_status_shows_whole_paths(tmp_path: Path) -> None:
    """However long the path of a store is, it can be copied from a pipe."""
    url, store = tmp_path / "meta.db", tmp_path / ("s" * 200)
    format_volume(str(url), _options(tmp_path, stores=(str(store),)))
    assert str(store) in _tectonicfs("status", url).stdout


def test_formatting_over_a_volume_needs_force(tmp_path: Path) -> None:
    """Without --force the old volume is untouched; with it the new one is empty."""
    url = str(tmp_path / "meta.db")
    first = format_volume(url, _options(tmp_path))

    async def fill() -> None:
        async with open_volume(url) as volume:
            await volume.filesystem.mkdir(ROOT_INODE, b"kept", 0o755, Owner(0, 0))

    trio.run(fill)
    with pytest.raises(VolumeExists):
        format_volume(url, _options(tmp_path))
    assert volume_status(url).volume == first
    second = format_volume(url, _options(tmp_path, force=True))
    assert volume_status(url).volume == second != first

    async def look() -> None:
        async with open_volume(url) as volume:
            assert not await volume.filesystem.exists("/kept")

    trio.run(look)


def test_a_refused_format_leaves_nothing(tmp_path: Path) -> None:
    """Where a store's device is not mounted, neither it nor the database is made; the line names
    the directory and what to do. The same for the database's."""
    store, url = tmp_path / "device" / "chunks", tmp_path / "meta.db"
    for where, missing in ((url, store.parent), (tmp_path / "data" / "meta.db", tmp_path / "data")):
        done = _tectonicfs("format", where, "--name", "v", "--store", store)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"there is no directory {missing}" in done.stderr
        assert f"mkdir -p {missing}" in done.stderr
        assert not [path for path in tmp_path.iterdir() if path != store.parent]
        store.parent.mkdir(exist_ok=True)
    assert not store.exists()


def test_a_store_that_cannot_be_taken_costs_the_others_nothing(tmp_path: Path) -> None:
    """A forced format that fails over its second store has not cleared its first one."""
    url = str(tmp_path / "meta.db")
    format_volume(url, _options(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("do not touch")
    stores = (str(tmp_path / "store"), str(precious))
    with pytest.raises(StoreMismatch, match="not empty"):
        format_volume(url, _options(tmp_path, stores=stores, force=True))
    _open(url)


def test_a_client_of_a_volume_that_was_formatted_over_is_fenced(tmp_path: Path) -> None:
    """It finds no session of its own in the new volume, however many sessions that has had."""
    url, owner = str(tmp_path / "meta.db"), Owner(0, 0)
    format_volume(url, _options(tmp_path))

    async def main() -> None:
        async with open_volume(url) as old:
            await old.filesystem.mkdir(ROOT_INODE, b"before", 0o755, owner)
            format_volume(url, _options(tmp_path, force=True))
            async with open_volume(url) as first, open_volume(url) as second:
                await first.filesystem.mkdir(ROOT_INODE, b"new", 0o755, owner)
                await second.filesystem.mkdir(ROOT_INODE, b"newer", 0o755, owner)
                with pytest.raises(SessionLost):
                    await old.filesystem.mkdir(ROOT_INODE, b"after", 0o755, owner)

    trio.run(main)


def test_a_store_of_another_volume_is_not_taken(tmp_path: Path) -> None:
    """A directory that belongs to a volume, or holds foreign files, is refused."""
    format_volume(str(tmp_path / "one.db"), _options(tmp_path))
    with pytest.raises(StoreMismatch, match="--force"):
        format_volume(str(tmp_path / "two.db"), _options(tmp_path))
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreMismatch):
        format_volume(str(tmp_path / "three.db"), _options(tmp_path, stores=(str(foreign),)))
    with pytest.raises(StoreMismatch):
        format_volume(
            str(tmp_path / "three.db"), _options(tmp_path, stores=(str(foreign),), force=True)
        )
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_a_volume_is_opened_only_with_its_own_stores(tmp_path: Path) -> None:
    """A missing, foreign or damaged store directory is refused with its name."""
    url = str(tmp_path / "meta.db")
    store = tmp_path / "store"
    format_volume(url, _options(tmp_path))
    _open(url)
    store.rename(tmp_path / "away")
    with pytest.raises(StoreMismatch, match=str(store)):
        _open(url)
    store.mkdir()  # the mount point of a device that is not mounted
    with pytest.raises(StoreMismatch, match=str(store)):
        _open(url)
    assert volume_status(url).stores[0].problem is not None
    store.rmdir()
    format_volume(str(tmp_path / "other.db"), _options(tmp_path))
    with pytest.raises(StoreMismatch, match="of volume"):
        _open(url)
    shutil.rmtree(store)
    (tmp_path / "away").rename(store)
    _open(url)


def test_what_is_not_there_or_too_new_is_named(tmp_path: Path) -> None:
    """No volume, an empty database and a newer format are one clear error each."""
    url = str(tmp_path / "meta.db")
    with pytest.raises(VolumeNotFound):
        _open(url)
    assert not Path(url).exists()
    record = format_volume(url, _options(tmp_path))
    newer = replace(record, format_version=record.format_version + 1)
    kv = open_kv(url)
    kv.transact(lambda tx: tx.put(keys.VOLUME, newer.encode()))
    kv.close()
    with pytest.raises(FormatTooNew, match="upgrade"):
        _open(url)
    raw = bytearray(record.encode())
    raw[1] = VolumeRecord.VERSION + 1
    with pytest.raises(BadURL):
        open_kv("gopher://somewhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name"),
        ({"stores": ()}, "--store"),
        ({"chunk_bytes": 100_000}, "multiple"),
        ({"chunk_bytes": 1024}, "between"),
        ({"block_bytes": 8 * MiB + 1}, "times the chunk size"),
        ({"codec": Codec.ZSTD, "level": 99}, "level"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """What cannot work is refused before anything is written."""
    with pytest.raises(BadOption, match=message):
        _options(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_commands_fail_with_one_line(tmp_path: Path) -> None:
    """Exit code 1 and one line on stderr for failures, 2 for wrong usage; never a traceback."""
    nothing = tmp_path / "nothing.db"
    for arguments, code in (
        (("status", nothing), 1),
        (("ckpt", "ls", nothing, "/runs"), 1),
        (
            (
                "format",
                tmp_path / "no" / "such" / "dir.db",
                "--name",
                "n",
                "--store",
                tmp_path / "s",
            ),
            1,
        ),
        (("status", "gopher://x"), 1),
        (("format", nothing, "--name", "n", "--store", "gopher://x"), 1),
        (("format", nothing, "--name", "n"), 2),
        (("format", nothing, "--name", "n", "--store", "s", "--chunk-size", "many"), 2),
        (("frobnicate",), 2),
    ):
        result = _tectonicfs(*arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert "Traceback" not in result.stderr
        if code == 1:
            assert result.stderr.count("\n") == 1, result.stderr


def test_every_command_has_help() -> None:
    """--help of each command exits 0 and describes it."""
    listed = _tectonicfs("--help").stdout
    for name in ("format", "status", "ckpt", "mount", "umount", "bench"):
        assert name in listed
        result = _tectonicfs(name, "--help")
        assert result.returncode == 0, result.stderr
        assert "Usage" in result.stdout


def test_a_closed_volume_leaves_no_session(tmp_path: Path) -> None:
    """A clean end removes the session and its leases; descriptors are closed."""
    url = str(tmp_path / "meta.db")
    format_volume(url, _options(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        _open(url)
    assert volume_status(url).sessions == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2
