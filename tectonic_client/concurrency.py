"""What trio leaves to its users: exceptions of nurseries without their groups, a lock that costs
nothing where it is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import trio


@contextmanager
def unwrapped_groups() -> Iterator[None]:
    """Raise the first exception of a group instead of the group.

    Callers of this package catch errors by type; when several tasks of one operation fail, the
    first failure is the one to tell, the others were cancelled or failed alike. A cancellation
    counts only where there is nothing else.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        first = _first(group)
        raise first from first.__cause__


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo += error.exceptions
        else:
            leaves.append(error)
    return next((e for e in leaves if not isinstance(e, trio.Cancelled)), leaves[0])


class Mutex:
    """As trio.Lock, for `async with`: first come, first served. Where it is free, taking it is no
    checkpoint: trio's costs a turn of the event loop each time, as much as a whole small write."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = trio.Semaphore(1, max_value=1)

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return not self._turn.value

    async def __aenter__(self) -> None:
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turn.release()
