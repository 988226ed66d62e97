"""The background tasks of a client, in simulated time."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from tectonic_client import background
from tectonic_client.errors import MetadataUnavailable, SessionLost
from tectonic_client.limits import (
    CLEANUP_INTERVAL_S,
    DEAD_BLOCK_GRACE_S,
    DIRTY_EXPIRY_S,
    GARBAGE_LINGER_S,
    HEARTBEAT_INTERVAL_S,
)
from tectonic_client.metadata import keys, sessions
from tectonic_client.types import ROOT_INODE
from tectonic_client.upkeep import leftovers
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.faultrig import (
    OWNER,
    Faults,
    failing_client,
    load_file,
    new_volume,
    store_file,
)
from tests.leaks import find_leaks

DATA = bytes(range(256)) * 600


@pytest.fixture(autouse=True)
def _always_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose turn it is to clean is told by the engine's clock, which is not the simulated one."""
    monkeypatch.setattr(background, "claim_cleaning", lambda tx, interval_s: 0.0)


def _run(body: Callable[[str, Faults, Volume], Awaitable[None]]) -> None:
    async def main() -> None:
        url, faults = new_volume(), Faults()
        async with failing_client(url, faults) as volume:
            await body(url, faults, volume)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _until(condition: Callable[[], bool]) -> None:
    """Let time pass until something has happened. How much of it passes while a thread works is
    anybody's guess, so nothing that needs a thread can be expected after a given time."""
    for _ in range(100_000):
        if condition():
            return
        await trio.sleep(1)
    raise AssertionError("it does not happen")


async def _until_clean(volume: Volume) -> None:
    for _ in range(10_000):
        problems = await find_leaks(volume)
        if not problems:
            return
        await trio.sleep(1)
    raise AssertionError(problems)


async def _heartbeat_ns(volume: Volume) -> int:
    record = await volume.kv.read(lambda tx: sessions.read_session(tx, volume.session_id))
    return 0 if record is None else record.heartbeat_ns


def test_written_bytes_are_published_without_being_asked() -> None:
    """After DIRTY_EXPIRY_S at most a little more, also when the first tries fail."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        # Opened first: whatever waits for a thread lets the simulated clock run.
        async with open_volume(url) as other:
            _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            await fs.write(handle, 0, b"small")
            await trio.sleep(0.9 * DIRTY_EXPIRY_S)
            assert await load_file(other.filesystem, b"f") == b""
            faults.kv.fail_transaction(1, MetadataUnavailable("injected"))
            await _until(lambda: not faults.pending)
            state = fs.files.state_of(await fs.resolve(b"/f"))
            assert state is not None
            await _until(lambda: not state.dirty)
            assert await load_file(other.filesystem, b"f") == b"small"
        await fs.flush(handle)
        await fs.release(handle)

    _run(body)


def test_the_heart_beats_on_after_failures_and_stops_when_the_session_is_lost() -> None:
    """One failed heartbeat is followed by the next; without its session the client says so once."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        before = await _heartbeat_ns(volume)
        faults.kv.fail_transaction(1, MetadataUnavailable("injected"))
        await trio.sleep(1.5 * HEARTBEAT_INTERVAL_S)
        assert await _heartbeat_ns(volume) == before
        assert not faults.pending
        await trio.sleep(HEARTBEAT_INTERVAL_S)
        assert await _heartbeat_ns(volume) > before
        await volume.kv.transact(lambda tx: tx.delete(keys.session(volume.session_id)))
        await trio.sleep(3 * HEARTBEAT_INTERVAL_S)
        assert await _heartbeat_ns(volume) == 0
        with pytest.raises(SessionLost):
            await volume.filesystem.fsyncdir(await volume.filesystem.opendir(ROOT_INODE))

    _run(body)


def test_removed_files_leave_the_stores_by_themselves() -> None:
    """Soon where nobody else uses the volume, and after a failure with the next cleaning."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        store = faults.stores[0]
        for fails in (False, True):
            await store_file(volume.filesystem, b"f", DATA)
            if fails:
                faults.kv.fail_transaction(2, MetadataUnavailable("injected"))
            await volume.filesystem.unlink(ROOT_INODE, b"f")
            await _until(lambda: not list(store.list(0, 2**63)))
            assert not faults.pending
        await _until_clean(volume)

    _run(body)


def test_removals_in_a_row_share_one_round_of_collecting() -> None:
    """Removing many files costs one round per GARBAGE_LINGER_S, and the last of them gets one."""
    rounds = []

    class CountingCleaner:
        async def delete_dead_blocks(self) -> int:
            rounds.append(trio.current_time())
            return 0

    async def main() -> None:
        signals = background.Signals()
        unused: Any = None
        cleaner: Any = CountingCleaner()
        tasks = background.BackgroundTasks(
            unused, 1, unused, cleaner, unused, unused, signals, unused
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tasks._collect_garbage)
            for _ in range(100):
                signals.blocks_freed()
                await trio.sleep(GARBAGE_LINGER_S / 40)
            last_removal = trio.current_time()
            await trio.sleep(CLEANUP_INTERVAL_S)
            nursery.cancel_scope.cancel()
        assert len(rounds) == 3
        assert rounds[-1] >= last_removal

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_while_others_live_removed_bytes_stay_readable_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks wait for DEAD_BLOCK_GRACE_S on the engine's clock, then go."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        store = faults.stores[0]
        async with open_volume(url):
            await store_file(volume.filesystem, b"f", DATA)
            await volume.filesystem.unlink(ROOT_INODE, b"f")
            await trio.sleep(DEAD_BLOCK_GRACE_S / 2)
            assert len(list(store.list(0, 2**63))) == 3
            # The simulated clock moves, the engine's does not: as if its time had come.
            monkeypatch.setattr(leftovers, "DEAD_BLOCK_GRACE_S", 0)
            await _until(lambda: not list(store.list(0, 2**63)))
        await _until_clean(volume)

    _run(body)


def test_every_task_outlives_every_fault() -> None:
    """Whatever fails for a long time, afterwards the client works as before."""

    async def body(url: str, faults: Faults, volume: Volume) -> None:
        fs = volume.filesystem
        _, handle = await fs.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
        await store_file(fs, b"gone", DATA)
        await fs.unlink(ROOT_INODE, b"gone")
        await fs.write(handle, 0, DATA)
        for n in range(1, 30):
            faults.kv.fail_transaction(1 + n % 3, MetadataUnavailable("injected"))
            faults.kv.fail_read(1 + n % 2, MetadataUnavailable("injected"))
            await trio.sleep(CLEANUP_INTERVAL_S / 2)
        faults.clear()
        before = await _heartbeat_ns(volume)
        await fs.write(handle, 0, b"later")
        await trio.sleep(2 * HEARTBEAT_INTERVAL_S)
        assert await _heartbeat_ns(volume) > before
        await _until(lambda: not fs.files.dirty())
        async with open_volume(url) as other:
            assert await load_file(other.filesystem, b"f") == b"later" + DATA[5:]
        await _until_clean(volume)
        await fs.release(handle)

    _run(body)
