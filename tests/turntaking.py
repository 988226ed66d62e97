"""Which tests may run at the same time, where the suite runs in several processes.

Those marked `alone` measure time or memory, or use something that a machine has only once; while
one of them runs, no other test of this checkout does. Locks of files that every process finds:
whoever comes passes the gate, so that those who wait for the whole room are not overtaken for ever.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_ROOM = Path(__file__)
_GATE = Path(__file__).parent


@contextmanager
def turn(*, alone: bool, room: Path = _ROOM, gate: Path = _GATE) -> Iterator[None]:
    """Wait for a place in the room, or for the whole room."""
    with ExitStack() as place:
        with _locked(gate, fcntl.LOCK_EX):
            place.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
        # A process that a test forked may have the descriptor still.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
