"""The reader's side of `coherence=push`: drops what other clients have changed, and says what may
be cached.

A client begins to follow the change feed when it first meets something below a push directory.
Until then, and whenever contact is lost, nothing of that kind may be cached (`trusted_s` is 0).

Why a cast-out follower serves nothing stale, though its kernel cannot be reached: what the door
lets its kernel cache is trusted for at most PUSH_TIMEOUT_S from the moment the request *began*,
which is before its data was read. A writer waits for COHERENCE_DEADLINE_S, which is longer, from a
moment after its commit. So what was read before the commit is not trusted any more when the writer
gives up; what is read later is new. And a follower counts itself as one only for
COHERENCE_DEADLINE_S after it last found itself up to date: nobody can have cast it out before that.

Caches without such a time, pages and extents of open files, are dropped when contact is found
again; a file is checked when it is opened in any case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import trio

from tectonic_client.errors import SessionLost, TectonicError
from tectonic_client.filesystem.audience import CHANGED, SEEN
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.listening import AsyncListener
from tectonic_client.limits import (
    COHERENCE_DEADLINE_S,
    FOLLOW_INTERVAL_S,
    FOLLOW_RETRY_S,
    PUSH_TIMEOUT_S,
)
from tectonic_client.metadata import changes
from tectonic_client.types import Change

_log = logging.getLogger(__name__)


class Cache(Protocol):
    """Something that keeps what others may change."""

    async def forget(self, found: Sequence[Change]) -> None:
        """Drop what these changes made stale; raises nothing."""

    async def forget_open_files(self) -> None:
        """Drop the data of all open files, whatever changed; raises nothing."""


class Moment(NamedTuple):
    """When a request began, and what was known then."""

    time_s: float
    generation: int
    following: bool


class Follower:
    """Follows the feed for a client's caches. Used from the event loop only.

    `caches` are dropped in their order: those that others are filled from come first.
    """

    def __init__(self, kv: AsyncKV, session_id: int) -> None:
        self._kv = kv
        self._session_id = session_id
        self.caches: list[Cache] = []
        self._wanted = trio.Event()
        self._up_to_date = trio.Event()
        self._up_to_date_at = -math.inf
        self._generation = 0
        self._scope = trio.CancelScope()

    # --- what may be cached -------------------------------------------------------------------

    def moment(self) -> Moment:
        """Now, as a request begins: before it reads anything."""
        now = trio.current_time()
        following = now < self._up_to_date_at + COHERENCE_DEADLINE_S
        return Moment(now, self._generation, following)

    def trusted_s(self, begun: Moment, timeout_s: float = PUSH_TIMEOUT_S) -> float:
        """How long the answer to a request that began then may be cached below push directories.

        At most `timeout_s`, counted from its beginning; not at all where an event arrived since.
        """
        if not begun.following or begun.generation != self._generation:
            self._wanted.set()
            return 0.0
        return max(0.0, timeout_s - (trio.current_time() - begun.time_s))

    async def ready(self) -> None:
        """Begin to follow, and wait until that works, for at most FOLLOW_RETRY_S.

        For what has no timeout: data of files that stay open.
        """
        self._wanted.set()
        with trio.move_on_after(FOLLOW_RETRY_S if self._session_id else 0):
            while not self.moment().following:
                await self._up_to_date.wait()

    # --- following ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow from when it is first wanted until `stop`."""
        with self._scope:
            await self._wanted.wait()
            async with self._kv.listen(CHANGED) as listener:
                while True:
                    try:
                        await self._follow(listener)
                        _log.warning("lost touch with the changes of others: caches are dropped")
                    except SessionLost as error:
                        _log.error("changes of others are not followed any more: %s", error)
                        return
                    except TectonicError as error:
                        _log.warning("changes of others cannot be followed: %s", error)
                        await trio.sleep(FOLLOW_RETRY_S)
                    finally:
                        self._lose_touch()

    def _lose_touch(self) -> None:
        self._up_to_date_at = -math.inf
        self._generation += 1

    async def stop(self) -> None:
        """Follow no longer, so that nobody waits for a client that is closing."""
        self._scope.cancel()
        if self._wanted.is_set() and self._session_id:
            unfollow = partial(changes.unfollow, session_id=self._session_id)
            await self._kv.transact(unfollow, brief=True)
            await self._kv.call(SEEN)

    async def _follow(self, listener: AsyncListener) -> None:
        """Become a follower, then keep up with the events; returns when it is one no longer."""
        asked_at = trio.current_time()
        positions = await self._kv.transact(
            lambda tx: changes.follow(tx, self._session_id), brief=True
        )
        for cache in self.caches:
            await cache.forget_open_files()
        while True:
            self._up_to_date_at = asked_at
            self._up_to_date.set()
            self._up_to_date = trio.Event()
            if not await listener.wait(FOLLOW_INTERVAL_S):
                return
            complete = False
            while not complete:
                asked_at = trio.current_time()
                read = partial(changes.read_news, session_id=self._session_id, positions=positions)
                news = await self._kv.read(read)
                if news is None or not await self._take(news):
                    return
                positions, complete = news.positions, news.complete

    async def _take(self, news: changes.News) -> bool:
        """Drop what the events name, then say so; False where nobody waits for that any more."""
        if not news.events:
            return True
        self._generation += 1
        found = [change for event in news.events for change in event.changes]
        for cache in self.caches:
            await cache.forget(found)
        acknowledge = partial(
            changes.acknowledge, session_id=self._session_id, positions=news.positions
        )
        if not await self._kv.transact(acknowledge, brief=True):
            return False
        await self._kv.call(SEEN)
        return True
