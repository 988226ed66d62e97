"""Hands out inode and block ids of this session's leases."""

from __future__ import annotations

from tectonic_client.concurrency import Mutex
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.metadata.sessions import lease_range, take_lease


class IdAllocator:
    """Ids for one session. Used from the event loop only.

    An id is an inode's or a block's, never used twice; what a lease has left when the session ends
    is lost, which costs nothing in 64 bits. `session_id` is 0 for a read-only client, which has no
    session.
    """

    def __init__(self, kv: AsyncKV, session_id: int) -> None:
        self._kv = kv
        self.session_id = session_id
        self._ids = iter(range(0))
        self._lock = Mutex()
        self.leases: list[int] = []

    async def next_id(self) -> int:
        """A fresh id. Raises SessionLost and what the engine raises when a lease is needed."""
        for fresh in self._ids:
            return fresh
        async with self._lock:
            for fresh in self._ids:  # whoever waited for the lock finds the other's lease
                return fresh
            # Chunks are durable before the metadata that names them. Were the lease not, a power
            # loss could take it back, and its ids would be given out again while stores hold chunks
            # under them.
            lease = await self._kv.transact(
                lambda tx: take_lease(tx, self.session_id), durable=True
            )
            self.leases.append(lease)
            self._ids = iter(lease_range(lease))
            return next(self._ids)
