"""What a client keeps of an inode while somebody has it open, and the handles to it.

All handles of an inode share one OpenInode, so that they see each other's unflushed bytes. Its
lock is held while bytes are appended, sealed and published; reading needs no lock, because every
step between two awaits sees a consistent state.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from tectonic_client.concurrency import Mutex
from tectonic_client.errors import BadHandle, TectonicError
from tectonic_client.extents import Extent, ExtentMap
from tectonic_client.filesystem.writelog import WriteLog
from tectonic_client.records import InodeRecord
from tectonic_client.types import Attributes


class OpenInode:
    """Shared state of the handles to one file."""

    def __init__(self, inode: int, log: WriteLog) -> None:
        self.inode = inode
        self.users = 0
        self.visitors = 0
        """Those of the users that are tasks of this client: no program waits for their close."""
        self.lock = Mutex()
        self.log = log
        self.record: InodeRecord | None = None
        self.incapable: InodeRecord | None = None
        """A `record` (itself, not its equal) whose file was found without `security.capability`."""
        self.extents = ExtentMap()
        """Published extents, as last read or written by this client."""
        self.version = 0
        """Changes with the published extents."""
        self.pending = ExtentMap()
        """Extents of the log, over the published ones."""
        self.size = 0
        self.read_in_order = -math.inf
        """When somebody last read it sequentially (trio's clock)."""
        self.quota: int | None = None
        """The quota that its growth counts against."""
        self.mtime_ns: int | None = None
        """Time of the last write that is not published; None when nothing is."""
        self.dirty_since: float | None = None
        self.stale = False
        """Another client changed the file since `record` and `extents` were read."""
        self.unseen: dict[int, int] = {}
        """Positions of events of this client's flushes that others may not have seen."""
        self.failure: TectonicError | None = None
        """Why unflushed bytes were lost the last time."""
        self.failures = 0
        """How often that happened; each handle tells of it (see `FileHandle.raise_failure`)."""

    def refresh(self, record: InodeRecord, extents: ExtentMap) -> None:
        """Take over what the metadata says; unflushed bytes lie over it."""
        self.version += self.extents != extents
        self.extents = extents
        self.record = record
        self.size = max([record.size, *(extent.end for extent in list(self.pending)[-1:])])

    def published(self, record: InodeRecord, extents: list[Extent]) -> None:
        """These pending extents are published now, and nothing is pending any more."""
        for extent in extents:
            self.extents.insert(extent)
        self.version += 1
        self.record = record
        self.settle()

    def cut(self, record: InodeRecord) -> None:
        """The file ends where this record says, and is else as it was known."""
        self.extents.cut(record.size)
        self.version += 1
        self.record = record
        self.size = record.size

    def replaced(self, extent: Extent) -> None:
        """The same bytes lie in this extent from now on."""
        self.extents.insert(extent)
        self.version += 1

    def settle(self) -> None:
        """Nothing is pending: it was published or given up."""
        self.pending = ExtentMap()
        self.mtime_ns = None
        self.dirty_since = None
        if self.record is not None:
            self.size = self.record.size

    @property
    def dirty(self) -> bool:
        """Whether something is not published."""
        return self.mtime_ns is not None

    def overlay(self, attributes: Attributes) -> Attributes:
        """Attributes as this client must see them: with its unflushed writes."""
        if self.mtime_ns is None:
            return attributes
        ctime_ns = max(self.mtime_ns, attributes.ctime_ns)
        return replace(attributes, size=self.size, mtime_ns=self.mtime_ns, ctime_ns=ctime_ns)


@dataclass(slots=True)
class FileHandle:
    """An open file. `next_offset` and `streak_bytes` recognise a sequential reader."""

    state: OpenInode
    flags: int
    failures_told: int
    next_offset: int = 0
    streak_bytes: int = 0

    def raise_failure(self, *, told: bool) -> None:
        """Raise why bytes were lost since this handle was opened, until it has been told.

        A failed write may be hidden from the program: the kernel cuts large writes, and where a
        later part fails it reports a short write. So writes fail until a flush or fsync, whose
        errors always arrive (`told`), has said why.
        """
        if self.failures_told == self.state.failures:
            return
        if told:
            self.failures_told = self.state.failures
        assert self.state.failure is not None
        raise self.state.failure

    @property
    def readable(self) -> bool:
        """Opened for reading."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        """Opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@dataclass(slots=True)
class DirectoryHandle:
    """An open directory."""

    inode: int
    pushes: bool


class HandleTable:
    """Numbers for open files and directories."""

    def __init__(self) -> None:
        self._next = 1
        self._handles: dict[int, FileHandle | DirectoryHandle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: FileHandle | DirectoryHandle) -> int:
        """Number of a new handle."""
        number, self._next = self._next, self._next + 1
        self._handles[number] = handle
        return number

    def file(self, number: int) -> FileHandle:
        """The open file. Raises BadHandle."""
        handle = self._handles.get(number)
        if not isinstance(handle, FileHandle):
            raise BadHandle(f"{number} is not an open file")
        return handle

    def directory(self, number: int) -> DirectoryHandle:
        """The open directory. Raises BadHandle."""
        handle = self._handles.get(number)
        if not isinstance(handle, DirectoryHandle):
            raise BadHandle(f"{number} is not an open directory")
        return handle

    def inode_of(self, number: int) -> int:
        """The inode behind a handle, 0 for an unknown number."""
        handle = self._handles.get(number)
        if isinstance(handle, FileHandle):
            return handle.state.inode
        return 0 if handle is None else handle.inode

    def remove(self, number: int) -> None:
        """The number is not used again."""
        self._handles.pop(number, None)
