"""Removes what crashes and deletions leave: dead sessions' chunks, orphans, dead blocks.

Any client may run any of it at any time, several at once, and stop anywhere: each step finds its
work in the metadata and forgets it only after it is done.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import trio

from tectonic_client.blocks.stores import StoreSet
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.errors import CorruptionError, CorruptRecord, StaleHandle, TectonicError
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import (
    BRIEF_BATCH_ROWS,
    DEAD_BLOCK_GRACE_S,
    DELETE_BATCH_CHUNKS,
    ORPHAN_GRACE_S,
    RECLAIM_BATCH_ROWS,
    SCAN_PAGE_ROWS,
)
from tectonic_client.metadata import blocks, changes, keys, orphans, sessions, tails
from tectonic_client.metadata.inodes import read_inode
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.metadata.sessions import describe
from tectonic_client.records import DeadBlockRecord, FileType, OrphanRecord

_log = logging.getLogger(__name__)
_NS_PER_S = 1_000_000_000
_END_OF_TIME_NS = 2**63


class Cleaner:
    """Cleans up on behalf of one session."""

    def __init__(
        self, kv: AsyncKV, stores: StoreSet, session_id: int, is_open: Callable[[int], bool]
    ) -> None:
        self._kv = kv
        self._stores = stores
        self._session_id = session_id
        self._is_open = is_open
        self._first_seen: dict[int, float] = {}
        """When files that somebody left without a name were met first."""

    # --- dead sessions ------------------------------------------------------------------------

    async def clean_dead_sessions(self) -> None:
        """Fence off sessions without a sign of life, then remove what they had in flight."""
        for session_id in await self._kv.read(sessions.dead_sessions):
            end = partial(sessions.end_dead_session, session_id=session_id)
            record = await self._kv.transact(end)
            if record is not None:
                _log.info("session of %s is dead: cleaning up after it", describe(record))
        while leases := await self._kv.read(sessions.abandoned_leases):
            for lease in leases:
                await self._clean_lease(lease)

    async def _clean_lease(self, lease: int) -> None:
        ids = sessions.lease_range(lease)
        for store_id in self._stores.ids():
            found = await self._stores.run(
                store_id, lambda store: [info.key for info in store.list(ids.start, ids.stop)]
            )
            await self._delete_unnamed(store_id, found)
        await self._kv.transact(lambda tx: sessions.drop_lease(tx, lease))

    async def _delete_unnamed(self, store_id: int, found: list[ChunkKey]) -> None:
        """Delete those chunks whose block has no record; nobody can publish one any more."""
        block_ids = sorted({key.block_id for key in found})
        for start in range(0, len(block_ids), SCAN_PAGE_ROWS):
            page = block_ids[start : start + SCAN_PAGE_ROWS]
            named = await self._kv.read(partial(blocks.named_blocks, block_ids=page))
            garbage = {*page} - named
            doomed = [key for key in found if key.block_id in garbage]
            if doomed:
                await self._kv.transact(lambda tx: None, durable=True)
                _log.info("store %d: removing %d chunks of a dead session", store_id, len(doomed))
                await self._delete(store_id, doomed)

    async def _delete(self, store_id: int, doomed: Sequence[ChunkKey]) -> None:
        for start in range(0, len(doomed), DELETE_BATCH_CHUNKS):
            batch = doomed[start : start + DELETE_BATCH_CHUNKS]
            await self._stores.run(store_id, partial(_delete_from, batch))

    # --- orphans ------------------------------------------------------------------------------

    async def has_company(self) -> bool:
        """Whether other clients live."""
        look = partial(sessions.other_sessions_live, session_id=self._session_id)
        return await self._kv.read(look)

    async def release(self, inode: int) -> None:
        """Hand an orphan back that this client had open."""
        release = partial(orphans.release, inode=inode, session_id=self._session_id)
        await self._kv.transact(release, brief=True)

    async def reclaim_abandoned_orphans(self, *, wait_for_others: bool = True) -> None:
        """Reclaim inodes without a name that no live session has open.

        While other clients live files stay for ORPHAN_GRACE_S after they were met first, for those
        that have them open to take them over.
        """
        wait = wait_for_others and await self.has_company()
        met, self._first_seen = self._first_seen, {}
        now = trio.current_time()
        limit = now - ORPHAN_GRACE_S if wait else math.inf

        def is_due(tx: ReadTransaction, inode: int) -> bool:
            if not _is_file(tx, inode):
                return True
            since = self._first_seen[inode] = met.get(inode, now)
            return since <= limit

        while found := await self._kv.read(lambda tx: self._abandoned_orphans(tx, is_due)):
            corrupt: CorruptionError | None = None
            for inode in found:
                try:
                    await self.reclaim(inode)
                except CorruptionError as error:  # it stays, but nothing else has to
                    corrupt = CorruptRecord(f"orphaned inode {inode}: {error}")
            if corrupt is not None:
                raise corrupt

    def _abandoned_orphans(
        self, tx: ReadTransaction, is_due: Callable[[ReadTransaction, int], bool]
    ) -> list[int]:
        """At most a page of them."""
        found: list[int] = []
        for page in scan_layer(tx, keys.ORPHAN):
            holders = {keys.parse_id(key): OrphanRecord.decode(row).session for key, row in page}
            living = sessions.living(tx, {*holders.values()})
            for inode, holder in holders.items():
                if holder == self._session_id:
                    # With links it is no removed file but a hidden directory that is in use.
                    abandoned = not self._is_open(inode) and not read_inode(tx, inode).nlink
                else:
                    abandoned = holder not in living and not self._is_open(inode)
                if abandoned and is_due(tx, inode):
                    found.append(inode)
            if len(found) >= SCAN_PAGE_ROWS:
                break
        return found

    async def reclaim(self, inode: int) -> None:
        """Remove an orphan's extents and records, and a tree's below it, in bounded steps."""
        todo, rows = [inode], BRIEF_BATCH_ROWS
        while todo:
            step = partial(orphans.reclaim, inode=todo[-1], session_id=self._session_id, rows=rows)
            gone, found = await self._kv.transact(step, brief=rows == BRIEF_BATCH_ROWS)
            if gone:
                todo.pop()
            todo += found
            rows = BRIEF_BATCH_ROWS if gone else RECLAIM_BATCH_ROWS

    # --- tails --------------------------------------------------------------------------------

    async def reclaim_tail(self, inode: int) -> None:
        """Remove the extents behind the end of a file, in bounded steps."""
        while await self._kv.transact(partial(tails.reclaim, inode=inode)) is not None:
            pass

    async def reclaim_tails(self) -> None:
        """Do so for every file of the volume: those who cut them may be gone."""
        while found := await self._kv.read(tails.unreclaimed):
            for inode in found:
                await self.reclaim_tail(inode)

    # --- dead blocks --------------------------------------------------------------------------

    async def delete_dead_blocks(self, *, wait_for_readers: bool = True) -> int:
        """Delete the chunks of dead blocks; returns how many blocks are still to wait for.

        While other clients live, a block stays for DEAD_BLOCK_GRACE_S after its death, for those
        that still read it by extents they loaded before. Raises the first error of a store after
        the blocks of all others are gone.
        """
        failed: dict[int, TectonicError] = {}
        while True:
            due, waiting = await self._kv.read(
                lambda tx: self._due_blocks(tx, failed, wait_for_readers=wait_for_readers)
            )
            if not due:
                break
            await self._delete_blocks(due, failed)
        if failed:
            raise next(iter(failed.values()))
        return waiting

    def _due_blocks(
        self, tx: ReadTransaction, failed: Mapping[int, TectonicError], *, wait_for_readers: bool
    ) -> tuple[list[tuple[int, DeadBlockRecord]], int]:
        """At most a page of dead blocks that may go, and how many there are before its end that
        are to wait; those on stores that `failed` are neither."""
        limit_ns = None
        due: list[tuple[int, DeadBlockRecord]] = []
        waiting = 0
        for block_id, record in blocks.dead_blocks(tx):
            if limit_ns is None:
                limit_ns = self._youngest_due_ns(tx, wait_for_readers=wait_for_readers)
            if record.died_ns > limit_ns:
                waiting += 1
            elif failed.keys().isdisjoint(record.store_ids):
                due.append((block_id, record))
                if len(due) == SCAN_PAGE_ROWS:
                    break
        return due, waiting

    def _youngest_due_ns(self, tx: ReadTransaction, *, wait_for_readers: bool) -> int:
        """Blocks that died after this time are to wait."""
        if wait_for_readers and sessions.other_sessions_live(tx, self._session_id):
            return tx.now_ns() - int(DEAD_BLOCK_GRACE_S * _NS_PER_S)
        return _END_OF_TIME_NS

    async def _delete_blocks(
        self, due: list[tuple[int, DeadBlockRecord]], failed: dict[int, TectonicError]
    ) -> None:  # fmt: skip
        # Chunks must not go before it is certain that nothing can bring their blocks back.
        await self._kv.transact(lambda tx: None, durable=True)
        by_store: dict[int, list[ChunkKey]] = {}
        for block_id, record in due:
            for index, store_id in enumerate(record.store_ids):
                by_store.setdefault(store_id, []).append(ChunkKey(block_id, index))
        for store_id, doomed in by_store.items():
            try:
                await self._delete(store_id, doomed)
            except TectonicError as error:  # the other stores get their space back
                failed[store_id] = error
        done = [
            block_id
            for block_id, record in due
            if failed.keys().isdisjoint(record.store_ids)
        ]  # fmt: skip
        await self._kv.transact(lambda tx: blocks.forget_dead_blocks(tx, done))

    # --- change feed --------------------------------------------------------------------------

    async def trim_changes(self) -> None:
        """Forget events of the change feed that nobody waits for any more."""
        for stripe in await self._kv.read(changes.stripes_to_trim):
            while await self._kv.transact(partial(changes.trim, stripe=stripe)):
                pass


def _is_file(tx: ReadTransaction, inode: int) -> bool:
    """Whether it is a file that somebody can have open; not where its record is gone or broken."""
    with suppress(CorruptRecord, StaleHandle):
        return read_inode(tx, inode).file_type is FileType.REGULAR
    return False


def _delete_from(chunks: Sequence[ChunkKey], store: ChunkStore) -> None:
    store.delete(chunks)
