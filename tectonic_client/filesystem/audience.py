"""The writer's side of `coherence=push`: a change returns when every follower has seen it.

After its transaction a writer waits until each follower of the feed has acknowledged the event,
that is, has dropped what it cached. Whoever is dead, or silent for COHERENCE_DEADLINE_S, is cast
out: its record goes, and it serves nothing from its caches by then (see `follower`).

All who wait share one look at the followers per call that is heard. A request that waits may hold
locks of the kernel on inodes of this mount (`held`); a follower of this client must not wait for
those, or two writers in one directory would wait for each other (see CONCURRENCY.md).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from tectonic_client.activity import FOLLOWERS, Waiting, detach
from tectonic_client.errors import TectonicError
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import ACKNOWLEDGEMENT_LOOK_S, COHERENCE_DEADLINE_S
from tectonic_client.metadata import changes, sessions
from tectonic_client.metadata.changerecords import FollowerRecord
from tectonic_client.metadata.changes import Positions

_log = logging.getLogger(__name__)

SEEN: Final = "seen"
"""Topic of calls: a follower has acknowledged."""

CHANGED: Final = "changed"
"""Topic of calls: there are events."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A change that has been made and waits to be seen."""

    positions: Positions
    deadline: float
    seen: trio.Event = field(default_factory=trio.Event)


class Audience:
    """The followers as a client sees that makes changes. Used from the event loop only."""

    def __init__(self, kv: AsyncKV, session_id: int, nursery: trio.Nursery) -> None:
        self._kv = kv
        self._session_id = session_id
        self._nursery = nursery
        self._waiters: list[_Waiter] = []
        self._wanted: trio.Event | None = None
        self._held: Counter[int] = Counter()
        self._held_changed = trio.Event()

    async def has_seen(self, positions: Positions, held: Collection[int] = ()) -> None:
        """Return when no follower serves anything older than these events of this client.

        The caller may hold the kernel's locks on the inodes `held`. Raises nothing of the engine:
        the change is made; a follower that cannot be asked about by the deadline is given up.
        """
        if not positions:
            return
        waiter = _Waiter(positions, trio.current_time() + COHERENCE_DEADLINE_S)
        self._waiters.append(waiter)
        try:
            # Nobody to wait for costs one read and no call.
            await self._look()
            if not waiter.seen.is_set():
                with self._holding(held):
                    await self._call_and_wait(waiter)
        finally:
            self._waiters.remove(waiter)

    async def _call_and_wait(self, waiter: _Waiter) -> None:
        if self._wanted is None:
            self._wanted = trio.Event()
            self._nursery.start_soon(self._watch)
        self._wanted.set()
        try:
            await self._kv.call(CHANGED)
        except TectonicError as error:
            _log.warning("followers look by themselves: %s", error)
        with Waiting(FOLLOWERS):
            await waiter.seen.wait()

    async def announce(self, positions: Positions) -> None:
        """Wake the followers without waiting for them."""
        if positions:
            try:
                await self._kv.call(CHANGED)
            except TectonicError as error:
                _log.warning("followers look by themselves: %s", error)

    # --- what is held -------------------------------------------------------------------------

    @contextmanager
    def _holding(self, inodes: Collection[int]) -> Iterator[None]:
        self._held.update(inodes)
        self._held_changed.set()
        self._held_changed = trio.Event()
        try:
            yield
        finally:
            self._held.subtract(inodes)
            self._held += Counter()  # drops what is at zero

    async def wait_unless_held(self, inode: int, done: trio.Event) -> None:
        """Wait for `done`, or until a request that may hold the lock on `inode` waits here.

        For whoever needs that lock of the kernel: such a request ends soon, but may wait for others
        that wait for us.
        """

        async def until_held() -> None:
            while not self._held[inode]:
                await self._held_changed.wait()

        async def first(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first, done.wait)
            nursery.start_soon(first, until_held)

    # --- looking ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look whenever a follower calls, as long as somebody waits."""
        detach()
        assert self._wanted is not None
        async with self._kv.listen(SEEN) as listener:
            while True:
                if not self._waiters:
                    self._wanted = trio.Event()
                    await self._wanted.wait()
                await self._look()
                if self._waiters:
                    await listener.wait(ACKNOWLEDGEMENT_LOOK_S)

    async def _look(self) -> None:
        """Let go all whose changes have been seen; cast out whoever kept others too long."""
        waiters = list(self._waiters)
        try:
            followers, living = await self._kv.read(self._read)
            for waiter in waiters:
                await self._look_for(waiter, followers, living)
        except TectonicError as error:
            _log.warning("cannot tell who has seen a change: %s", error)
            now = trio.current_time()
            for waiter in waiters:
                if now > waiter.deadline:
                    waiter.seen.set()

    def _read(self, tx: ReadTransaction) -> tuple[dict[int, FollowerRecord], set[int]]:
        followers = changes.read_followers(tx)
        followers.pop(self._session_id, None)
        return followers, sessions.living(tx, followers) if followers else set()

    async def _look_for(
        self, waiter: _Waiter, followers: dict[int, FollowerRecord], living: set[int]
    ) -> None:
        overdue = trio.current_time() >= waiter.deadline
        seen = True
        for session_id, follower in followers.items():
            if changes.is_behind(follower, waiter.positions):
                if session_id in living and not overdue:
                    seen = False
                else:
                    await self._cast_out(
                        session_id, waiter.positions, dead=session_id not in living
                    )
        if seen:
            waiter.seen.set()

    async def _cast_out(self, session_id: int, positions: Positions, *, dead: bool) -> None:
        cast_out = partial(changes.cast_out, session_id=session_id, positions=positions)
        if await self._kv.transact(cast_out, brief=True):
            why = "is dead" if dead else f"did not answer for {COHERENCE_DEADLINE_S:.0f} s"
            _log.warning("session %d follows changes no longer: it %s", session_id, why)
