"""Ids of leases: never the same twice, whatever fails in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from tectonic_client.errors import MetadataUnavailable, SessionLost, UnknownOutcome
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.memory import MemoryData, MemoryKV
from tectonic_client.kv.wrappers import FaultyKV
from tectonic_client.limits import IDS_PER_LEASE
from tectonic_client.metadata import keys, sessions
from tectonic_client.metadata.ids import IdAllocator


def _client(data: MemoryData) -> tuple[FaultyKV, IdAllocator]:
    kv = FaultyKV(MemoryKV(data))
    session_id = kv.transact(lambda tx: sessions.open_session(tx, "test"))
    return kv, IdAllocator(AsyncKV(kv), session_id)


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await body()

    trio.run(main)


def test_an_exhausted_lease_is_followed_by_the_next() -> None:
    """Many tasks of two clients take more ids than leases hold: all differ, none is wasted."""
    data = MemoryData()
    allocators = [_client(data)[1] for _ in range(2)]
    taken: list[int] = []

    async def take(ids: IdAllocator, count: int) -> None:
        for _ in range(count):
            taken.append(await ids.next_id())
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for ids in allocators:
                for _ in range(10):
                    nursery.start_soon(take, ids, IDS_PER_LEASE // 4)

    _run(main)
    assert len(set(taken)) == len(taken) == 20 * (IDS_PER_LEASE // 4)
    leases = [lease for ids in allocators for lease in ids.leases]
    assert [len(ids.leases) for ids in allocators] == [3, 3]
    assert {number // IDS_PER_LEASE for number in taken} == set(leases)


def test_a_lease_that_could_not_be_taken_is_taken_later() -> None:
    """An engine that fails, before or after the commit, costs an error and never an id twice."""
    kv, ids = _client(MemoryData())

    async def main() -> None:
        seen = {await ids.next_id()}
        for fail in (
            lambda: kv.fail_transaction(1, MetadataUnavailable("injected")),
            lambda: kv.fail_transaction(1, UnknownOutcome("injected")),
            lambda: kv.lose_answer(1),
        ):
            ids._ids = iter(range(0))
            fail()
            with pytest.raises((MetadataUnavailable, UnknownOutcome)):
                await ids.next_id()
            fresh = await ids.next_id()
            assert fresh not in seen
            seen.add(fresh)
        # The lease whose answer was lost is the session's still; whoever ends it finds it.
        rows = kv.read(lambda tx: tx.scan(keys.LEASE, keys.prefix_end(keys.LEASE)))
        assert len(rows) == len(ids.leases) + 1

    _run(main)


def test_a_task_that_is_cancelled_takes_no_id_from_others() -> None:
    """Cancelled while taking a lease, or waiting for a task that does: the next id is fresh."""
    _, ids = _client(MemoryData())

    async def main() -> None:
        seen = set()
        for _ in range(5):
            ids._ids = iter(range(0))
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ids.next_id)
                nursery.cancel_scope.cancel()
            fresh = await ids.next_id()
            assert fresh not in seen
            seen.add(fresh)

    _run(main)


def test_a_session_that_was_ended_gets_no_more_ids() -> None:
    """SessionLost once its lease is used up."""
    kv, ids = _client(MemoryData())

    async def main() -> None:
        await ids.next_id()
        kv.transact(lambda tx: tx.delete(keys.session(ids.session_id)))
        await ids.next_id()
        ids._ids = iter(range(0))
        with pytest.raises(SessionLost):
            await ids.next_id()

    _run(main)
