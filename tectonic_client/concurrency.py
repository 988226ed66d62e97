"""What trio leaves to its users: exceptions of nurseries without their groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
