"""Chunk stores that wrap another one: measurement, and faults for tests of what lies above.

`MeteredStore` counts and times the calls; `FaultyStore` makes chosen calls fail, tear, wait or lie.
Both keep the port's promises otherwise, so they stack in any order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, ChunkStore, StoreUsage
from tectonic_client.errors import NoSpace, TectonicError
from tectonic_client.limits import ALIGNMENT_BYTES
from tectonic_client.metrics import Measured, Meter

Operation = Literal["put", "get_into", "head", "delete", "list", "usage"]


class _WrappedStore:
    """Passes everything on."""

    def __init__(self, inner: ChunkStore) -> None:
        self.inner = inner
        self.name = inner.name

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self.inner.put(key, parts)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        return self.inner.get_into(key, offset, target)

    def head(self, key: ChunkKey) -> int:
        return self.inner.head(key)

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        self.inner.delete(keys)

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        return self.inner.list(first_block_id, end_block_id)

    def usage(self) -> StoreUsage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


# --- measurement ------------------------------------------------------------------------------


class MeteredStore(_WrappedStore):
    """Counts and times every call but `list`, whose time is its consumer's."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._meters: dict[Operation, Meter] = {}

    def measured(self) -> dict[Operation, Measured]:
        """A snapshot; operations that were never called are left out."""
        with self._lock:
            return {operation: meter.measured() for operation, meter in self._meters.items()}

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        with self._measured("put") as transfer:
            self.inner.put(key, parts)
            transfer.byte_count = sum(part.nbytes for part in parts)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        with self._measured("get_into") as transfer:
            transfer.byte_count = self.inner.get_into(key, offset, target)
            return transfer.byte_count

    def head(self, key: ChunkKey) -> int:
        with self._measured("head"):
            return self.inner.head(key)

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        with self._measured("delete"):
            self.inner.delete(keys)

    def usage(self) -> StoreUsage:
        with self._measured("usage"):
            return self.inner.usage()

    @contextmanager
    def _measured(self, operation: Operation) -> Iterator[_Transfer]:
        transfer, failed, started_ns = _Transfer(), True, time.monotonic_ns()
        try:
            yield transfer
            failed = False
        finally:
            elapsed_ns = time.monotonic_ns() - started_ns
            with self._lock:
                meter = self._meters.setdefault(operation, Meter())
                meter.add(elapsed_ns, transfer.byte_count, failed=failed)


@dataclass(slots=True)
class _Transfer:
    byte_count: int = 0


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fail:
    """The call does not happen and raises `error`."""

    error: TectonicError


@dataclass(frozen=True, slots=True)
class Tear:
    """A put stores its first `kept_bytes` (a multiple of ALIGNMENT_BYTES), then raises `error`."""

    kept_bytes: int
    error: TectonicError


@dataclass(frozen=True, slots=True)
class Hold:
    """The call sets `entered` and happens once `released` is set, or after `limit_s`."""

    entered: threading.Event
    released: threading.Event
    limit_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """The call happens after this long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Flip:
    """A get gives the byte at `offset` of the chunk, if it reads it, with `mask` changed in it."""

    offset: int
    mask: int = 1


@dataclass(frozen=True, slots=True)
class Truncate:
    """To a get the chunk ends after `kept_bytes`."""

    kept_bytes: int


Effect = Fail | Tear | Hold | Delay | Flip | Truncate

_ANYWHERE: Final = (Fail, Hold, Delay)
_ALLOWED: Final[dict[Operation, tuple[type, ...]]] = {
    "put": (*_ANYWHERE, Tear),
    "get_into": (*_ANYWHERE, Flip, Truncate),
    "head": _ANYWHERE,
    "delete": _ANYWHERE,
    "list": _ANYWHERE,
    "usage": _ANYWHERE,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """An effect on the `nth` call of an operation since it was planned (1 = the next).

    It lasts for `times` calls (None: for good). With `key` only calls that name this chunk count.
    """

    operation: Operation
    effect: Effect
    nth: int = 1
    times: int | None = 1
    key: ChunkKey | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an effect that this operation cannot have."""
        if not isinstance(self.effect, _ALLOWED[self.operation]):
            raise ValueError(f"{self.effect} cannot happen to {self.operation}")
        if isinstance(self.effect, Tear) and self.effect.kept_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"torn at {self.effect.kept_bytes}, not at a page")


@dataclass(slots=True)
class _Plan:
    fault: Fault
    calls: int = 0

    @property
    def is_over(self) -> bool:
        times = self.fault.times
        return times is not None and self.calls >= self.fault.nth + times - 1


class FaultyStore(_WrappedStore):
    """Has the planned faults, in the order of their planning.

    To try an operation with a fault at each of its steps, plan n = 1, 2, 3, ... until the operation
    ends with `pending` still true: it has fewer steps than n.
    """

    def __init__(self, inner: ChunkStore, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._plans = [_Plan(fault) for fault in faults]
        self._room_bytes: int | None = None

    def plan(self, *faults: Fault) -> None:
        """Add faults to those planned before."""
        with self._lock:
            self._plans += [_Plan(fault) for fault in faults]

    def limit_space(self, room_bytes: int | None) -> None:
        """From now on puts of this many bytes fit in all, then NoSpace; None lifts the limit."""
        with self._lock:
            self._room_bytes = room_bytes

    @property
    def pending(self) -> bool:
        """Whether a planned fault has not come yet."""
        with self._lock:
            return any(plan.calls < plan.fault.nth for plan in self._plans)

    def clear(self) -> None:
        """Forget planned faults and the limit of space."""
        with self._lock:
            self._plans.clear()
            self._room_bytes = None

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        effects = self._begin("put", key)
        self._use_space(key, parts)
        for effect in effects:
            if isinstance(effect, Tear):
                self.inner.put(key, _first_bytes(parts, effect.kept_bytes))
                raise effect.error
        self.inner.put(key, parts)

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        effects = self._begin("get_into", key)
        count = self.inner.get_into(key, offset, target)
        for effect in effects:
            if isinstance(effect, Truncate):
                count = max(0, min(count, effect.kept_bytes - offset))
            elif isinstance(effect, Flip) and offset <= effect.offset < offset + count:
                target[effect.offset - offset] ^= effect.mask
        return count

    def head(self, key: ChunkKey) -> int:
        self._begin("head", key)
        return self.inner.head(key)

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        doomed = tuple(keys)
        self._begin("delete", *doomed)
        self.inner.delete(doomed)

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        self._begin("list")
        return self.inner.list(first_block_id, end_block_id)

    def usage(self) -> StoreUsage:
        self._begin("usage")
        return self.inner.usage()

    def _begin(self, operation: Operation, *keys: ChunkKey) -> Sequence[Effect]:
        """Wait or raise as planned; returns the effects that are due during the call."""
        later = []
        for effect in self._due(operation, keys):
            if isinstance(effect, Fail):
                raise effect.error
            if isinstance(effect, Hold):
                effect.entered.set()
                effect.released.wait(effect.limit_s)
            elif isinstance(effect, Delay):
                time.sleep(effect.seconds)
            else:
                later.append(effect)
        return later

    def _due(self, operation: Operation, keys: Sequence[ChunkKey]) -> Sequence[Effect]:
        due = []
        with self._lock:
            for plan in self._plans:
                fault = plan.fault
                if fault.operation == operation and (fault.key is None or fault.key in keys):
                    plan.calls += 1
                    if plan.calls >= fault.nth:
                        due.append(fault.effect)
            self._plans = [plan for plan in self._plans if not plan.is_over]
        return due

    def _use_space(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        with self._lock:
            if self._room_bytes is None:
                return
            needed = sum(part.nbytes for part in parts)
            if needed > self._room_bytes:
                raise NoSpace(f"store {self.name}, chunk {key}: injected, the store is full")
            self._room_bytes -= needed


def _first_bytes(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    kept = []
    for part in parts:
        if count > 0:
            kept.append(part[:count])
            count -= len(part)
    return kept
