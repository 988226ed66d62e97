"""Asks whether a quota has room, for writes that become metadata only later.

Owns what this client knows of the use of quotas: the engine's sum, not older than QUOTA_REFRESH_S,
and what this client has let pass since; near a limit the engine is asked each time. So one client
keeps a limit exactly; several may exceed it by what they have not flushed yet, or write in that
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import QUOTA_NEAR_BYTES, QUOTA_REFRESH_S
from tectonic_client.metadata import quotas
from tectonic_client.metadata.inodes import read_inode
from tectonic_client.metadata.quotas import Usage
from tectonic_client.records import InodeFlag, InodeRecord, QuotaRecord


@dataclass(slots=True)
class _Known:
    limits: QuotaRecord
    used_bytes: int
    as_of: float


class QuotaGate:
    """Used from the event loop only. `unflushed` gives the bytes of a quota's members that this
    client has written and not published."""

    def __init__(self, kv: AsyncKV, unflushed: Callable[[int], int]) -> None:
        self._kv = kv
        self._unflushed = unflushed
        self._known: dict[int, _Known] = {}

    async def quota_of(self, inode: int, record: InodeRecord) -> int | None:
        """The quota that an inode counts against."""
        if not record.flags & InodeFlag.QUOTA:
            return None
        return await self._kv.read(lambda tx: quotas.quota_of(tx, inode, record))

    async def admit_below(self, directory: int, more_bytes: int) -> None:
        """Raise QuotaExceeded where no file of this size has room in a directory."""

        def look(tx: ReadTransaction) -> int | None:
            return quotas.quota_of(tx, directory, read_inode(tx, directory))

        quota = await self._kv.read(look)
        if quota is not None:
            await self.admit(quota, more_bytes)

    async def admit(self, quota: int, more_bytes: int) -> None:
        """Let `more_bytes` pass, or raise QuotaExceeded."""
        if more_bytes <= 0:
            return
        known = self._known.get(quota)
        if known is None or not self._has_room(known, more_bytes):
            known = await self._refresh(quota)
        if known is not None:
            quotas.refuse_excess(known.limits, Usage(known.used_bytes, 0), Usage(more_bytes, 0))
            known.used_bytes += more_bytes

    @staticmethod
    def _has_room(known: _Known, more_bytes: int) -> bool:
        limit = known.limits.max_bytes
        fresh = trio.current_time() - known.as_of <= QUOTA_REFRESH_S
        return fresh and (not limit or known.used_bytes + more_bytes + QUOTA_NEAR_BYTES <= limit)

    async def _refresh(self, quota: int) -> _Known | None:
        def look(tx: ReadTransaction) -> tuple[QuotaRecord | None, Usage]:
            return quotas.read_quota(tx, quota), quotas.read_usage(tx, quota)

        limits, usage = await self._kv.read(look)
        if limits is None:
            self._known.pop(quota, None)
            return None
        used = usage.bytes + self._unflushed(quota)
        known = self._known[quota] = _Known(limits, used, trio.current_time())
        return known
