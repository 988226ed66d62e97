"""AsyncKV: the same results as the engine, nothing lost to cancellation, bounded waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tectonic_client.errors import MetadataUnavailable, UnknownOutcome
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.filelock import FairFileLock
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import KV, ReadTransaction, Transaction
from tectonic_client.kv.sqlite import SqliteKV
from tectonic_client.limits import INLINE_TURN_S
from tests.contracts.kv import Planned, get, increment
from tests.turns import turns_of_others


class _BlockingKV:
    """An engine without a queue, whose reads may block, as a remote one."""

    reads_may_block = True

    def __init__(self) -> None:
        self._kv = MemoryKV()
        self.read = self._kv.read
        self.transact = self._kv.transact
        self.close = self._kv.close


@pytest.fixture(params=["memory", "sqlite", "blocking"])
def kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KV]:
    kv: KV
    match request.param:
        case "memory":
            kv = MemoryKV()
        case "sqlite":
            kv = SqliteKV(tmp_path / "meta.db", create=True)
        case _:
            kv = _BlockingKV()
    yield kv
    kv.close()


def test_results_and_errors(kv: KV) -> None:
    """Results and exceptions of the function arrive, from reads and transactions."""

    def fail(_: ReadTransaction) -> None:
        raise Planned

    async def main() -> None:
        metadata = AsyncKV(kv)
        assert metadata.sync is kv
        assert await metadata.transact(increment) == 1
        assert await metadata.transact(increment, durable=True) == 2
        assert await metadata.read(lambda transaction: transaction.get(b"count")) == b"2"
        with pytest.raises(Planned):
            await metadata.read(fail)
        with pytest.raises(Planned):
            await metadata.transact(fail)

    trio.run(main)


def test_many_at_once(kv: KV) -> None:
    """Many tasks write at the same time; nothing is lost."""

    async def main() -> None:
        metadata = AsyncKV(kv)

        async def work() -> None:
            for _ in range(5):
                await metadata.transact(increment)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(work)

    trio.run(main)
    assert get(kv, b"count") == b"200"


def test_where_calls_run(kv: KV) -> None:
    """Only what cannot block runs in the thread of the event loop."""

    def thread(_: ReadTransaction) -> int:
        return threading.get_ident()

    async def main() -> tuple[bool, bool]:
        metadata = AsyncKV(kv)
        loop = threading.get_ident()
        return await metadata.read(thread) == loop, await metadata.transact(thread) == loop

    expected = {MemoryKV: (True, True), SqliteKV: (True, False), _BlockingKV: (False, False)}
    assert trio.run(main) == expected[type(kv)]


def test_cancelled_before(kv: KV) -> None:
    """A call in a cancelled scope does nothing."""

    async def main() -> None:
        metadata = AsyncKV(kv)
        with trio.CancelScope() as scope:
            scope.cancel()
            await metadata.transact(increment)
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await metadata.read(lambda transaction: transaction.get(b"count"))
        assert scope.cancelled_caught

    trio.run(main)
    assert get(kv, b"count") is None


def test_cancelled_while_running(tmp_path: Path) -> None:
    """A task cancelled while its transaction waits still gets the outcome; nothing is lost."""
    path = tmp_path / "meta.db"
    kv = SqliteKV(path, create=True)
    lock = FairFileLock(f"{path}-lock")
    results: list[int] = []

    async def main() -> None:
        metadata = AsyncKV(kv)

        async def work() -> None:
            results.append(await metadata.transact(increment))

        lock.__enter__()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            lock.__exit__(None, None, None)

    trio.run(main)
    assert results == [1]
    assert get(kv, b"count") == b"1"
    kv.close()
    lock.close()


def test_deadline_in_the_queue(tmp_path: Path) -> None:
    """A transaction that does not begin by the deadline is taken back: it never runs."""
    path = tmp_path / "meta.db"
    kv = SqliteKV(path, create=True)
    lock = FairFileLock(f"{path}-lock")

    async def main() -> None:
        with pytest.raises(MetadataUnavailable):
            await AsyncKV(kv, deadline_s=30).transact(increment)

    with lock:
        trio.run(main, clock=MockClock(autojump_threshold=0.05))
    assert kv.transact(increment) == 1
    kv.close()
    lock.close()


def test_deadline_while_running(tmp_path: Path) -> None:
    """A transaction that has begun and does not end is UnknownOutcome after twice the time."""
    kv = SqliteKV(tmp_path / "meta.db", create=True)
    began, go_on = threading.Event(), threading.Event()

    def stall(transaction: Transaction) -> int:
        began.set()
        assert go_on.wait(30)
        return increment(transaction)

    clock = MockClock(autojump_threshold=0.05)

    async def main() -> float:
        start = trio.current_time()
        with pytest.raises(UnknownOutcome):
            await AsyncKV(kv, deadline_s=30).transact(stall)
        return trio.current_time() - start

    assert trio.run(main, clock=clock) == pytest.approx(60)
    assert began.is_set()
    go_on.set()
    assert kv.transact(increment) == 2
    kv.close()


def test_reads_let_others_run(kv: KV) -> None:
    """A task that only reads does not keep the loop to itself for longer than its turn."""

    def slow(transaction: ReadTransaction) -> None:
        time.sleep(INLINE_TURN_S / 4)
        transaction.get(b"a")

    async def main() -> None:
        metadata = AsyncKV(kv)
        turns: list[str] = []

        def reader(name: str) -> Callable[[], Awaitable[None]]:
            async def read() -> None:
                for _ in range(20):
                    await metadata.read(slow)
                    turns.append(name)

            return read

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader("a"))
            nursery.start_soon(reader("b"))
        assert set(turns[:20]) == {"a", "b"}

    trio.run(main)


def test_quick_calls_share_a_turn(tmp_path: Path) -> None:
    """Reads and brief transactions of an embedded engine do not poll the loop each time."""
    calls = 200

    async def main() -> None:
        metadata = AsyncKV(kv)

        async def work() -> None:
            for _ in range(calls):
                await metadata.transact(increment, brief=True)
                await metadata.read(lambda transaction: transaction.get(b"count"))

        assert await turns_of_others(work) < calls

    kv = SqliteKV(tmp_path / "meta.db", create=True)
    try:
        trio.run(main)
    finally:
        kv.close()
