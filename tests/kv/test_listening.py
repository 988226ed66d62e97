"""AsyncListener: woken by calls, never stuck, whatever the engine does."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tectonic_client.errors import MetadataUnavailable
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.memory import MemoryData, MemoryKV, MemoryListener
from tectonic_client.limits import DEAF_PAUSE_S

LONG_S = 1000.0


class _Breaking(MemoryListener):
    def drain(self) -> None:
        raise MetadataUnavailable("injected: the connection was lost")


class _FailingKV(MemoryKV):
    """Its first listener breaks when it hears something; further ones can be refused."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.listened = 0
        self.refuse = False

    def listen(self, topic: str) -> MemoryListener:
        if self.refuse:
            raise MetadataUnavailable("injected: no such thing")
        self.listened += 1
        return (_Breaking if self.listened == 1 else MemoryListener)(self._data, topic)


def test_wait_ends_at_a_call() -> None:
    """A task that waits is woken by a call of another client, long before its timeout."""
    data = MemoryData()

    async def main() -> None:
        async with AsyncKV(MemoryKV(data)).listen("news") as listener, trio.open_nursery() as tasks:
            with trio.fail_after(10):
                tasks.start_soon(listener.wait, LONG_S)
                await wait_all_tasks_blocked()
                await AsyncKV(MemoryKV(data)).call("news")

    trio.run(main)


def test_wait_ends_without_a_call() -> None:
    """A lost call costs the timeout, no more."""

    clock = MockClock(rate=1000.0)
    started = clock.current_time()

    async def timed() -> None:
        async with AsyncKV(MemoryKV()).listen("news") as listener:
            await listener.wait(5.0)
            assert 5.0 <= clock.current_time() - started < LONG_S

    trio.run(timed, clock=clock)


def test_a_broken_listener_is_replaced() -> None:
    """After a lost connection calls are heard again through a new one."""
    kv = _FailingKV(MemoryData())

    async def main() -> None:
        async with AsyncKV(kv).listen("news") as listener:
            kv.call("news")
            assert not await listener.wait(LONG_S)  # the first one breaks
            assert await listener.wait(LONG_S)  # a pause, then there is a second one
            kv.call("news")
            with trio.fail_after(10):
                await listener.wait(LONG_S)
        assert kv.listened == 2

    trio.run(main)


def test_a_deaf_engine_means_short_pauses() -> None:
    """Where nothing can be heard each wait is a short pause."""
    kv = _FailingKV(MemoryData())
    kv.refuse = True

    async def main() -> None:
        async with AsyncKV(kv).listen("news") as listener:
            started = trio.current_time()
            for _ in range(3):
                await listener.wait(LONG_S)
            assert 3 * DEAF_PAUSE_S <= trio.current_time() - started < 10

    trio.run(main)
