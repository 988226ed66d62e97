"""Clones: files and trees copied in metadata only; the copies share the blocks.

A clone is built hidden (`metadata.hidden`) and gets its name at the end, so it appears whole or not
at all. Each file is as it was at one moment; a tree whose files change meanwhile is not. Blocks
never change, so whatever is written to either side afterwards is the other's no more.

Copied are contents, modes, times, links within the tree, symbolic links, special files and extended
attributes.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import trio

from tectonic_client.errors import StaleHandle, TectonicError, TransactionConflict
from tectonic_client.filesystem.namespace import check_new_place, forbid_inside
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import CLONE_ATTEMPTS, CLONE_BATCH_ENTRIES, RECLAIM_BATCH_ROWS
from tectonic_client.metadata import files, hidden, quotas, tails
from tectonic_client.metadata.changes import Positions
from tectonic_client.metadata.ids import IdAllocator
from tectonic_client.metadata.inodes import (
    copy_extras,
    count_subdirectory,
    read_attributes,
    read_directory,
    read_inode,
    write_inode,
)
from tectonic_client.metadata.names import Entry, list_entries, write_entry
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import DirentRecord, FileType, InodeFlag, InodeRecord
from tectonic_client.types import Owner


@dataclass(slots=True)
class CloneReport:
    """What was cloned so far. `bytes` is the sum of the files' sizes; none of them was copied."""

    files: int = 0
    directories: int = 0
    others: int = 0
    bytes: int = 0

    def add(self, record: InodeRecord) -> None:
        """Count an inode."""
        if record.is_directory:
            self.directories += 1
        elif record.file_type is FileType.REGULAR:
            self.files += 1
            self.bytes += record.size
        else:
            self.others += 1


class _Copied(NamedTuple):
    """A new inode and what it is a copy of; `complete` unless more extents are to come."""

    source: int
    target: int
    record: InodeRecord
    names: int
    """Links of the original."""
    complete: bool


@dataclass(slots=True)
class Cloner:
    """Makes one clone on behalf of a session. Not to be used twice.

    `owner` gets the copies; None leaves them to whom the originals belong, as `cp -a` of root does.
    """

    kv: AsyncKV
    ids: IdAllocator
    owner: Owner | None
    on_progress: Callable[[CloneReport], None]
    report: CloneReport = field(default_factory=CloneReport)
    positions: Positions = field(default_factory=dict)
    """Where the events of the finished clone are (`metadata.changes`)."""
    _root: int = 0
    _linked: dict[int, int] = field(default_factory=dict)
    """Copies of files that have several names, by their originals."""

    async def clone(self, source: int, parent: int, name: bytes) -> int:
        """Clone the inode `source` as a new entry; returns its inode. Durable on return.

        Raises Exists, NotFound, StaleHandle, InvalidArgument (a directory into itself),
        TransactionConflict (a file changed during each of several tries), SessionLost.
        """
        self._root = await self.ids.next_id()
        copied = await self.kv.transact(lambda tx: self._begin(tx, source, parent, name))
        try:
            await self._fill(copied)
            publish = partial(self._publish, copied=copied, parent=parent, name=name)
            self.positions = await self.kv.transact(publish, durable=True)
        except BaseException:
            with trio.CancelScope(shield=True), suppress(TectonicError):
                await self.kv.transact(lambda tx: hidden.discard(tx, self._root))
            raise
        return self._root

    @property
    def root(self) -> int:
        """Inode of the clone; after a failure an orphan."""
        return self._root

    def _begin(self, tx: Transaction, source: int, parent: int, name: bytes) -> _Copied:
        require_session(tx, self.ids.session_id)
        record = read_inode(tx, source)
        if not record.nlink:
            raise StaleHandle(f"inode {source} was removed")
        check_new_place(tx, parent, name)
        if record.is_directory:
            forbid_inside(tx, parent, source)
        new = self._copy_of(tx, source, record, parent)
        new = quotas.inherit(tx, parent, read_directory(tx, parent), self._root, new)
        self._require_room(tx, self._root, new)
        hidden.create(tx, self._root, new, self.ids.session_id)
        copy_extras(tx, source, self._root)
        regular = new.file_type is FileType.REGULAR
        return _Copied(source, self._root, new, names=1, complete=not regular)

    def _copy_of(
        self, tx: ReadTransaction, source: int, record: InodeRecord, parent: int
    ) -> InodeRecord:
        """The record of a copy; a directory's times are not in its record alone."""
        mode, uid, gid = record.mode, record.uid, record.gid
        if self.owner is not None and self.owner != (uid, gid):
            mode &= ~(stat.S_ISUID | stat.S_ISGID)  # as cp(1): they were not meant for this owner
            uid, gid = self.owner
        mtime_ns = record.mtime_ns
        if record.is_directory:
            mtime_ns = read_attributes(tx, source).mtime_ns
        return replace(
            record, mode=mode, uid=uid, gid=gid, nlink=2 if record.is_directory else 1,
            mtime_ns=mtime_ns, ctime_ns=time.time_ns(), parent=parent,
            flags=record.flags & ~InodeFlag.TAIL,
        )  # fmt: skip

    def _publish(self, tx: Transaction, copied: _Copied, parent: int, name: bytes) -> Positions:
        require_session(tx, self.ids.session_id)
        record = hidden.require(tx, self._root)
        now = time.time_ns()
        return hidden.publish(tx, self._root, record, parent, name, self.ids.session_id, now)

    # --- contents -----------------------------------------------------------------------------

    async def _fill(self, root: _Copied) -> None:
        todo = [root]
        await self._finish(root)
        while todo:
            directory = todo.pop()
            if directory.record.is_directory:
                todo += await self._fill_directory(directory)

    async def _finish(self, copied: _Copied) -> None:
        if not copied.complete:
            await self._copy_large(copied)
        self.report.add(copied.record)
        self.on_progress(self.report)

    async def _fill_directory(self, directory: _Copied) -> list[_Copied]:
        """Copy the entries page by page; returns the subdirectories, which are empty still."""
        found: list[_Copied] = []
        cookie = 0
        while page := await self.kv.read(partial(_list, directory=directory.source, cookie=cookie)):
            targets = [await self.ids.next_id() for _ in page]
            copies = await self.kv.transact(
                partial(self._copy_page, directory=directory, page=page, targets=targets)
            )
            for copied in copies:
                if copied.record.is_directory:
                    found.append(copied)
                if copied.names > 1:
                    self._linked[copied.source] = copied.target
                await self._finish(copied)
            cookie = page[-1].cookie
        return found

    def _copy_page(
        self, tx: Transaction, directory: _Copied, page: Sequence[Entry], targets: Sequence[int]
    ) -> list[_Copied]:
        """Copy some entries with their inodes, which are returned; what is gone is left out."""
        hidden.require(tx, self._root)
        copies: dict[int, _Copied] = {}
        room = RECLAIM_BATCH_ROWS
        for entry, target in zip(page, targets, strict=True):
            source = entry.record.inode
            known = self._linked.get(source) or (copies[source].target if source in copies else 0)
            if known:
                self._link_again(tx, directory.target, entry, known)
                continue
            with suppress(StaleHandle):
                copied, rows = self._copy_inode(tx, source, target, directory.target, room)
                room -= rows
                copies[source] = copied
                write_entry(tx, directory.target, entry.name, _entry_of(copied))
        subdirectories = sum(copied.record.is_directory for copied in copies.values())
        if subdirectories:
            count_subdirectory(tx, directory.target, self.ids.session_id, subdirectories)
        return list(copies.values())

    @staticmethod
    def _link_again(tx: Transaction, directory: int, entry: Entry, inode: int) -> None:
        record = read_inode(tx, inode)
        write_inode(tx, inode, replace(record, nlink=record.nlink + 1))
        write_entry(tx, directory, entry.name, replace(entry.record, inode=inode))

    def _copy_inode(
        self, tx: Transaction, source: int, target: int, parent: int, room: int
    ) -> tuple[_Copied, int]:
        """Copy an inode, a file's extents too if they are few; and how many those were.

        Raises StaleHandle where it is gone.
        """
        record = read_inode(tx, source)
        new = self._copy_of(tx, source, record, parent)
        new = quotas.inherit(tx, parent, read_directory(tx, parent), target, new)
        self._require_room(tx, target, new)
        write_inode(tx, target, new)
        copy_extras(tx, source, target)
        rows, complete = 0, True
        if new.file_type is FileType.REGULAR:
            rows = files.count_extents(tx, source, room + 1)
            complete = rows <= room
            if complete:
                dead = tails.dead_range(tx, source, record)
                files.copy_extents(tx, source, target, 0, record.size, room + 1, dead)
        names = 1 if record.is_directory else record.nlink
        return _Copied(source, target, new, names, complete), rows if complete else 0

    @staticmethod
    def _require_room(tx: ReadTransaction, target: int, record: InodeRecord) -> None:
        quota = quotas.quota_of(tx, target, record)
        if quota is not None:
            quotas.require_room(tx, quota, quotas.usage_of(record))

    async def _copy_large(self, copied: _Copied) -> None:
        """Copy a file's extents in several transactions, again if it changed meanwhile."""
        source, target = copied.source, copied.target
        for _ in range(CLONE_ATTEMPTS):
            before = await self.kv.read(partial(read_inode, inode=source))
            position: int | None = 0
            while position is not None:
                position = await self.kv.transact(
                    partial(self._copy_some, copied=copied, start=position, end=before.size)
                )
            if await self.kv.transact(partial(self._settle, copied=copied, before=before)):
                return
            while not await self.kv.transact(
                lambda tx: files.drop_extents(tx, target, RECLAIM_BATCH_ROWS)
            ):
                pass
        raise TransactionConflict(
            f"inode {source} changed during each of {CLONE_ATTEMPTS} tries to clone it"
        )

    def _copy_some(self, tx: Transaction, copied: _Copied, start: int, end: int) -> int | None:
        hidden.require(tx, self._root)
        source = copied.source
        dead = tails.dead_range(tx, source, read_inode(tx, source))
        return files.copy_extents(tx, source, copied.target, start, end, RECLAIM_BATCH_ROWS, dead)

    @staticmethod
    def _settle(tx: Transaction, copied: _Copied, before: InodeRecord) -> bool:
        """Whether what was copied is one state of the original; its size and times then count."""
        now = read_inode(tx, copied.source)
        if (now.size, now.mtime_ns, now.ctime_ns) != (
            before.size,
            before.mtime_ns,
            before.ctime_ns,
        ):
            return False
        record = read_inode(tx, copied.target)
        write_inode(tx, copied.target, replace(record, size=now.size, mtime_ns=now.mtime_ns))
        return True


def _list(tx: ReadTransaction, directory: int, cookie: int) -> list[Entry]:
    return list_entries(tx, directory, cookie, CLONE_BATCH_ENTRIES)


def _entry_of(copied: _Copied) -> DirentRecord:
    return DirentRecord(copied.target, copied.record.file_type)
