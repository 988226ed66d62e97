"""The background tasks of a client: heartbeat, flushing, memory, cleaning (see CONCURRENCY.md).

Each task outlives any TectonicError: it is logged and the work is tried again at the next turn.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from operator import itemgetter
from typing import TypeVar

import trio

from tectonic_client.blocks.buffers import BufferPool
from tectonic_client.errors import SessionLost, TectonicError
from tectonic_client.filesystem.chunkcache import ChunkCache
from tectonic_client.filesystem.compaction import Compactor
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.limits import (
    ACCESS_TIMES_INTERVAL_S,
    CLEANUP_AT_START_S,
    CLEANUP_INTERVAL_S,
    COMPACT_QUIET_S,
    DEAD_BLOCK_GRACE_S,
    DIRTY_EXPIRY_S,
    GARBAGE_LINGER_S,
    HEARTBEAT_INTERVAL_S,
    MAX_COMPACTION_CANDIDATES,
    MEMORY_RETRY_S,
    OPEN_FILES_LOOK_S,
    ORPHAN_GRACE_S,
)
from tectonic_client.metadata.sessions import claim_cleaning, heartbeat
from tectonic_client.upkeep.leftovers import Cleaner

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Signals:
    """How the parts of a client wake its background tasks. Used from the event loop only."""

    def __init__(self) -> None:
        self.garbage = trio.Event()
        self.memory = trio.Event()
        self.orphans: dict[int, float] = {}
        """Inodes to reclaim and since when, the oldest first."""
        self.released: set[int] = set()
        """Those of them that other clients have not been told of."""
        self.tails: set[int] = set()
        """Inodes whose tails are to be reclaimed."""
        self.compaction = trio.Event()
        self.candidates: dict[int, float] = {}
        """Inodes that are worth compacting, and when that was noted (trio's clock)."""

    def orphaned(self, inode: int, *, was_open: bool) -> None:
        """The inode has no name and is not open, or not any more."""
        self.orphans[inode] = trio.current_time()
        if was_open:
            self.released.add(inode)
        self.garbage.set()

    def blocks_freed(self) -> None:
        """Blocks may have died."""
        self.garbage.set()

    def tail_left(self, inode: int) -> None:
        """Extents were cut off that are still to be reclaimed."""
        self.tails.add(inode)
        self.garbage.set()

    def scattered(self, inode: int) -> None:
        """A file consists of many extents."""
        if len(self.candidates) < MAX_COMPACTION_CANDIDATES or inode in self.candidates:
            self.candidates[inode] = trio.current_time()
            self.compaction.set()

    def memory_wanted(self) -> None:
        """Somebody waits for a buffer."""
        self.memory.set()


class BackgroundTasks:
    """The tasks of one client."""

    def __init__(
        self, kv: AsyncKV, session_id: int, filesystem: FileSystem, cleaner: Cleaner,
        cache: ChunkCache, pool: BufferPool, signals: Signals, compactor: Compactor,
    ) -> None:  # fmt: skip
        self._kv = kv
        self.compactor = compactor
        self._session_id = session_id
        self._filesystem = filesystem
        self._cleaner = cleaner
        self._cache = cache
        self._pool = pool
        self._signals = signals
        self.last_heartbeat: float | None = None
        """When a heartbeat last succeeded, on trio's clock."""

    def start(self, nursery: trio.Nursery, *, read_only: bool) -> None:
        """Run the tasks until the nursery is cancelled."""
        nursery.start_soon(self._give_memory)
        if not read_only:
            nursery.start_soon(self._beat)
            nursery.start_soon(self._filesystem.follower.run)
            nursery.start_soon(self._flush_expired)
            nursery.start_soon(self._collect_garbage)
            nursery.start_soon(self._compact)
            nursery.start_soon(self._clean_up)
            nursery.start_soon(self._keep_removed_files)
        if self._filesystem.access_times.keeps:
            nursery.start_soon(self._write_access_times)

    async def _beat(self) -> None:
        while True:
            await trio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await self._kv.transact(lambda tx: heartbeat(tx, self._session_id))
                self.last_heartbeat = trio.current_time()
            except SessionLost as error:
                _log.error("%s", error)
                return
            except TectonicError as error:
                _log.warning("no heartbeat: %s", error)

    async def _flush_expired(self) -> None:
        while True:
            await trio.sleep(DIRTY_EXPIRY_S / 4)
            await self._filesystem.flush_expired(DIRTY_EXPIRY_S)

    async def _give_memory(self) -> None:
        """Evict read chunks, then flush idle writers, while somebody waits for a buffer."""
        while True:
            await self._signals.memory.wait()
            self._signals.memory = trio.Event()
            while self._pool.waiting:
                if not self._cache.evict_one():
                    await self._filesystem.flush_idle_buffers()
                    # What is busy now may be idle then; each round is cheap.
                    await trio.sleep(MEMORY_RETRY_S)

    async def _collect_garbage(self) -> None:
        """Reclaim orphans and delete dead blocks soon after they come."""
        waiting = 0
        while True:
            with trio.move_on_after(DEAD_BLOCK_GRACE_S if waiting else float("inf")):
                await self._signals.garbage.wait()
            # What else goes meanwhile shares the look, the sync and the change of threads.
            await trio.sleep(GARBAGE_LINGER_S)
            self._signals.garbage = trio.Event()
            waiting = await self._attempt(self._collect) or 0

    async def _collect(self) -> int:
        await self.reclaim_due_orphans()
        await self.reclaim_tails()
        return await self._cleaner.delete_dead_blocks() + len(self._signals.orphans)

    async def reclaim_due_orphans(self) -> None:
        """Reclaim what was orphaned by this client, as soon as others may have taken it over."""
        if not self._signals.orphans or not await self._cleaner.has_company():
            self._signals.released.clear()
            await self.reclaim_orphans()
            return
        while self._signals.released:
            inode = next(iter(self._signals.released))
            await self._cleaner.release(inode)
            self._signals.released.discard(inode)
        await self.reclaim_orphans(trio.current_time() - ORPHAN_GRACE_S)

    async def reclaim_orphans(self, until: float = math.inf) -> None:
        """Reclaim what was orphaned by this client so far, or until some time."""
        while self._signals.orphans:
            inode, since = next(iter(self._signals.orphans.items()))
            if since > until:
                return
            await self._cleaner.reclaim(inode)
            self._signals.orphans.pop(inode, None)

    async def reclaim_tails(self) -> None:
        """Reclaim what this client cut off files."""
        while self._signals.tails:
            inode = next(iter(self._signals.tails))
            await self._cleaner.reclaim_tail(inode)
            self._signals.tails.discard(inode)

    async def _keep_removed_files(self) -> None:
        while True:
            await trio.sleep(OPEN_FILES_LOOK_S)
            await self._attempt(self._filesystem.keep_removed_files)

    async def _write_access_times(self) -> None:
        while True:
            # Jitter: of many clients that begin to read a file most then find the time written.
            await trio.sleep(ACCESS_TIMES_INTERVAL_S * random.uniform(1, 2))
            await self._attempt(self._filesystem.access_times.write)

    async def _compact(self) -> None:
        """Compact files that were written in small pieces and have been left alone since."""
        candidates = self._signals.candidates
        while True:
            await self._signals.compaction.wait()
            inode, noted = min(candidates.items(), key=itemgetter(1))
            await trio.sleep_until(noted + COMPACT_QUIET_S)
            if candidates[inode] == noted:
                del candidates[inode]
                await self._attempt(partial(self.compactor.compact, inode))
            if not candidates:
                self._signals.compaction = trio.Event()

    async def _clean_up(self) -> None:
        """Look after what dead clients left: at the start, then now and then.

        Looking reads every session, so of many clients only one does it at a time.
        """
        interval_s = CLEANUP_AT_START_S
        while True:
            claim = partial(claim_cleaning, interval_s=interval_s)
            left_s = await self._attempt(partial(self._kv.transact, claim))
            if not left_s:  # also where it could not be told
                await self._attempt(self._cleaner.clean_dead_sessions)
                await self._attempt(self._cleaner.reclaim_abandoned_orphans)
                await self._attempt(self._cleaner.reclaim_tails)
                await self._attempt(self._cleaner.delete_dead_blocks)
                await self._attempt(self._cleaner.trim_changes)
            interval_s = CLEANUP_INTERVAL_S
            # Jitter keeps thousands of clients from asking at the same moment.
            await trio.sleep((left_s or interval_s) + random.uniform(0, interval_s / 2))

    async def _attempt(self, work: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await work()
        except TectonicError as error:
            _log.warning("cleaning up: %s", error)
            return None
