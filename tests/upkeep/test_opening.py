"""Opening a volume that fails at each of its steps: nothing stays open, no session stays behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from tectonic_client.errors import (
    BadOption,
    MetadataUnavailable,
    StoreMismatch,
    UnknownOutcome,
)
from tectonic_client.kv.port import KV
from tectonic_client.kv.wrappers import FaultyKV
from tectonic_client.limits import MiB
from tectonic_client.volume import VolumeOptions, open_volume, volume_status
from tests.filesystem.faultrig import end_sessions_left_by_this_process, new_volume
from tests.leaks import assert_no_leaks, clean


@pytest.fixture
def url(tmp_path: Path) -> str:
    return new_volume(str(tmp_path / "meta.db"), str(tmp_path / "store"), stores=2)


async def _open(url: str, options: VolumeOptions) -> None:
    async with open_volume(url, options):
        await trio.testing.wait_all_tasks_blocked()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _failing(plan: Callable[[FaultyKV], None]) -> VolumeOptions:
    def wrap(kv: KV) -> KV:
        faulty = FaultyKV(kv)
        plan(faulty)
        return faulty

    return VolumeOptions(wrap_kv=wrap)


_DOWN = MetadataUnavailable("injected")
_UNKNOWN = UnknownOutcome("injected")


@pytest.mark.parametrize(
    "plan",
    [
        lambda n, kv: kv.fail_read(n, _DOWN),
        lambda n, kv: kv.fail_transaction(n, _DOWN),
        lambda n, kv: kv.fail_transaction(n, _UNKNOWN),
    ],
    ids=["read", "transaction", "unknown outcome"],
)
def test_opening_fails_at_a_metadata_step(url: str, plan: Callable[[int, FaultyKV], None]) -> None:
    """The error is told; descriptors, threads and the session are gone."""
    trio.run(_open, url, VolumeOptions())
    files, threads = _open_files(), threading.active_count()
    errors = []
    for n in range(1, 4):
        try:
            trio.run(_open, url, _failing(partial(plan, n)))
        except (MetadataUnavailable, UnknownOutcome) as error:
            errors.append(error)
        trio.run(_clean, url)
        assert volume_status(url).sessions == []
        assert _open_files() <= files
        assert threading.active_count() <= threads + 2  # trio keeps a few for the next one
    assert errors in ([_DOWN], [_UNKNOWN])


async def _clean(url: str) -> None:
    async with open_volume(url) as volume:
        await end_sessions_left_by_this_process(volume)
        await clean(volume)
        await assert_no_leaks(volume)


def test_opening_fails_at_the_last_store(url: str, tmp_path: Path) -> None:
    """The stores that were opened before are closed again, and no session was begun."""
    trio.run(_open, url, VolumeOptions())
    files = _open_files()
    (tmp_path / "store-1").rename(tmp_path / "away")
    for _ in range(3):
        with pytest.raises(StoreMismatch):
            trio.run(_open, url, VolumeOptions())
    assert _open_files() <= files
    assert volume_status(url).sessions == []


def test_opening_with_too_little_memory(tmp_path: Path) -> None:
    """A pool that could not make progress is refused; the session that was begun is ended."""
    url = new_volume(str(tmp_path / "meta.db"), str(tmp_path / "store"), chunk_bytes=32 * MiB)
    files = _open_files()
    with pytest.raises(BadOption, match="memory limit"):
        trio.run(_open, url, VolumeOptions(memory_limit_bytes=64 * MiB))
    assert _open_files() <= files
    assert volume_status(url).sessions == []


def test_opening_can_be_cancelled(url: str) -> None:
    """Cancelled on the way in or as soon as it is open, it leaves nothing."""

    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await _open(url, VolumeOptions())
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_open, url, VolumeOptions())
                await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()

    files = _open_files()
    trio.run(main)
    assert volume_status(url).sessions == []
    assert _open_files() <= files + 2
