"""What this project adds to trio (tectonic_client/concurrency.py)."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tectonic_client.concurrency import Mutex


def test_a_mutex_is_handed_over_in_the_order_of_coming() -> None:
    """Those who wait come in one after the other, in their order, also before one who comes when it
    is being given up."""
    seen: list[int] = []

    async def enter(mutex: Mutex, number: int) -> None:
        async with mutex:
            seen.append(number)
            await trio.lowlevel.checkpoint()
            seen.append(number)

    async def run() -> None:
        mutex = Mutex()
        async with trio.open_nursery() as nursery:
            async with mutex:
                for number in range(3):
                    nursery.start_soon(enter, mutex, number)
                    await trio.testing.wait_all_tasks_blocked()
            assert mutex.locked()
            await enter(mutex, 3)
        assert not mutex.locked()

    trio.run(run)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mutex_is_free_after_an_error_and_after_one_who_stopped_waiting() -> None:
    """Neither an exception inside nor a cancelled wait leaves it locked for ever."""

    async def give_up_and_fail(mutex: Mutex) -> None:
        async with mutex:
            with trio.move_on_after(0) as waiting:
                async with mutex:
                    pytest.fail("two at once")
            assert waiting.cancelled_caught
            raise RuntimeError

    async def run() -> None:
        mutex = Mutex()
        with pytest.raises(RuntimeError):
            await give_up_and_fail(mutex)
        assert not mutex.locked()
        with trio.fail_after(5):
            async with mutex:
                assert mutex.locked()

    trio.run(run)


def test_taking_a_free_mutex_does_not_wait() -> None:
    """No other task runs in between: the event loop is not asked."""

    async def run() -> None:
        async def other() -> None:
            ran.append(True)

        ran: list[bool] = []
        mutex = Mutex()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            async with mutex:
                pass
            assert not ran

    trio.run(run)
