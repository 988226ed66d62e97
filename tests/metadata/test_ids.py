"""Ids: where they come from, and what of that survives a power loss."""

from __future__ import annotations

import trio

from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.wrappers import CountingKV
from tectonic_client.limits import IDS_PER_LEASE
from tectonic_client.metadata import sessions
from tectonic_client.metadata.ids import IdAllocator


def test_a_lease_is_durable_before_its_first_id_is_used() -> None:
    """No id is given out twice after a power loss, and that costs one sync per lease."""
    kv = CountingKV(MemoryKV())
    session_id = kv.transact(lambda tx: sessions.open_session(tx, "test"))

    async def main() -> None:
        ids = IdAllocator(AsyncKV(kv), session_id)
        taken = [await ids.next_id()]
        assert kv.durable_transactions == 1
        taken += [await ids.next_id() for _ in range(IDS_PER_LEASE - 1)]
        assert kv.durable_transactions == 1
        taken.append(await ids.next_id())
        assert kv.durable_transactions == 2
        assert len(set(taken)) == len(taken)

    trio.run(main)
