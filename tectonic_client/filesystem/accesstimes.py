"""Access times, as `relatime` has them (mount(8)): kept in memory, written now and then in batches.

A read only notes the time, and only where it would change anything: the access time is not newer
than the last change, or older than a day. So however often a file is read, by however many clients,
each client writes its inode once after a change and once a day. A crash loses what is noted.

What changed since it was read keeps its access time, also one that utimens has set: the next read
is noted anew. Nobody is told of new access times (coherence=push): they are not worth the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import (
    ACCESS_TIMES_PAGE,
    MAX_NOTED_ACCESS_TIMES,
    RELATIME_NS,
)
from tectonic_client.metadata import keys
from tectonic_client.metadata.inodes import read_attributes, write_inode
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import InodeRecord
from tectonic_client.types import Attributes


def is_due(atime_ns: int, changed_ns: int, now_ns: int) -> bool:
    """Whether an access now is to be recorded; `changed_ns` is the newer of mtime and ctime."""
    return atime_ns <= changed_ns or now_ns - atime_ns >= RELATIME_NS


class AccessTimes:
    """Those of one client. Used from the event loop only. `keeps` False: none are noted."""

    def __init__(
        self, kv: AsyncKV, session_id: int, on_written: Callable[[int, int], None], *, keeps: bool
    ) -> None:
        self._kv = kv
        self._session_id = session_id
        self._on_written = on_written
        self.keeps = keeps
        self.noted: dict[int, int] = {}
        """By inode; the oldest first."""

    def note(self, inode: int, record: InodeRecord | None, now_ns: int) -> None:
        """The inode was read; `record`, where it is known, tells whether that matters."""
        if not self.keeps or inode in self.noted or len(self.noted) >= MAX_NOTED_ACCESS_TIMES:
            return
        if record is not None:
            changed_ns = max(record.mtime_ns, record.ctime_ns)
            if not is_due(record.atime_ns, changed_ns, now_ns):
                return
        self.noted[inode] = now_ns

    def overlay(self, attributes: Attributes) -> Attributes:
        """Attributes with the access time that is going to be written."""
        atime_ns = self.noted.get(attributes.inode)
        if atime_ns is None or not _counts(atime_ns, attributes):
            return attributes
        return replace(attributes, atime_ns=atime_ns)

    def forget(self, inode: int) -> None:
        """The access time was set."""
        self.noted.pop(inode, None)

    async def write(self) -> None:
        """Record what is noted. Raises what the metadata engine raises; then it stays noted."""
        waiting = iter(list(self.noted.items()))
        while page := dict(islice(waiting, ACCESS_TIMES_PAGE)):
            due = await self._kv.read(partial(_find_due, noted=page))
            if due:
                # Whether they are still due is decided in the transaction: of many clients that
                # read one file most have nothing to write.
                write = partial(_write_due, session_id=self._session_id, noted=due)
                for inode, atime_ns in (await self._kv.transact(write)).items():
                    self._on_written(inode, atime_ns)
            for inode, atime_ns in page.items():
                if self.noted.get(inode) == atime_ns:
                    del self.noted[inode]


def _counts(atime_ns: int, now: InodeRecord | Attributes) -> bool:
    """Whether a time that was noted is to be recorded, by what the inode's times are now."""
    changed_ns = max(now.mtime_ns, now.ctime_ns)
    return atime_ns > now.ctime_ns and is_due(now.atime_ns, changed_ns, atime_ns)


def _find_due(tx: ReadTransaction, noted: Mapping[int, int]) -> dict[int, int]:
    return {inode: noted[inode] for inode in _due_records(tx, noted)}


def _write_due(tx: Transaction, session_id: int, noted: Mapping[int, int]) -> dict[int, int]:
    require_session(tx, session_id)
    due = _due_records(tx, noted)
    for inode, record in due.items():
        write_inode(tx, inode, replace(record, atime_ns=noted[inode]))
    return {inode: noted[inode] for inode in due}


def _due_records(tx: ReadTransaction, noted: Mapping[int, int]) -> dict[int, InodeRecord]:
    """Records of those that still exist and for which the time that is noted still counts."""
    rows = tx.get_many([keys.attributes(inode) for inode in noted])
    found = {}
    for (inode, atime_ns), row in zip(noted.items(), rows, strict=True):
        record = None if row is None else InodeRecord.decode(row)
        if record is None or not record.nlink:
            continue
        # What changed in a directory is not in its record.
        if _counts(atime_ns, read_attributes(tx, inode) if record.is_directory else record):
            found[inode] = record
    return found
