"""Persisted records of the change feed: frozen dataclasses and their bytes (FORMAT.md). Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Final

from tectonic_client.limits import CHANGE_STRIPES
from tectonic_client.records import Cursor, Record, unpack_exactly, within
from tectonic_client.types import Change, ChangeKind

_U16: Final = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class ChangeHeadRecord(Record):
    """A stripe of the feed: the position of its last event, and of the last one trimmed away."""

    KIND = 24
    _LAYOUT: ClassVar = struct.Struct("<QQ")

    last: int
    trimmed: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.last, self.trimmed)

    @classmethod
    def _from_body(cls, body: memoryview) -> ChangeHeadRecord:
        last, trimmed = unpack_exactly(cls._LAYOUT, body)
        within(2**63, last=last, trimmed=trimmed)
        return cls(last, trimmed)


@dataclass(frozen=True, slots=True)
class ChangeRecord(Record):
    """An event: what one transaction of `session` changed in one stripe, in order."""

    KIND = 25
    _LAYOUT: ClassVar = struct.Struct("<QQH")
    _ITEM: ClassVar = struct.Struct("<BQH")

    changed_ns: int
    session: int
    changes: tuple[Change, ...]

    def _body(self) -> bytes:
        parts = [self._LAYOUT.pack(self.changed_ns, self.session, len(self.changes))]
        for kind, inode, name in self.changes:
            parts += self._ITEM.pack(kind, inode, len(name)), name
        return b"".join(parts)

    @classmethod
    def _from_body(cls, body: memoryview) -> ChangeRecord:
        cursor = Cursor(body)
        changed_ns, session, count = cursor.take(cls._LAYOUT)
        changes = []
        for _ in range(count):
            kind, inode, length = cursor.take(cls._ITEM)
            changes.append(Change(ChangeKind(kind), inode, cursor.raw(length)))
        cursor.done()
        return cls(changed_ns, session, tuple(changes))


@dataclass(frozen=True, slots=True)
class FollowerRecord(Record):
    """A session that follows the feed: up to which position of each stripe it dropped its caches.

    Written by that session alone; removed by whoever waited for it in vain.
    """

    KIND = 26
    _LAYOUT: ClassVar = struct.Struct(f"<{CHANGE_STRIPES}Q")

    acknowledged: tuple[int, ...]

    def _body(self) -> bytes:
        return _U16.pack(CHANGE_STRIPES) + self._LAYOUT.pack(*self.acknowledged)

    @classmethod
    def _from_body(cls, body: memoryview) -> FollowerRecord:
        (count,) = _U16.unpack_from(body)
        if count != CHANGE_STRIPES:
            raise ValueError(f"{count} stripes, expected {CHANGE_STRIPES}")
        return cls(tuple(unpack_exactly(cls._LAYOUT, body[_U16.size :])))
