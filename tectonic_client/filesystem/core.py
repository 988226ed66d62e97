"""The file system that the doors translate: operations on inodes, names and open handles.

All methods are coroutines of one trio event loop; names and link targets are bytes. What they mean
is in `namespace` (names) and `files` (bytes); this class joins the two with the handles of this
client. Errors are those of `tectonic_client.errors`; FileSystemError and its kin are POSIX answers.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

import trio

from tectonic_client.errors import (
    CorruptionError,
    MetadataUnavailable,
    NoSuchAttribute,
    NotFound,
    ReadOnly,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.filesystem import namespace, policies
from tectonic_client.filesystem.accesstimes import AccessTimes
from tectonic_client.filesystem.cloning import Cloner, CloneReport
from tectonic_client.filesystem.files import Files
from tectonic_client.filesystem.follower import Follower
from tectonic_client.filesystem.namespace import Actor, Found, Place
from tectonic_client.filesystem.openinode import (
    DirectoryHandle,
    FileHandle,
    HandleTable,
    OpenInode,
)
from tectonic_client.filesystem.paths import path_of, resolve
from tectonic_client.filesystem.quotagate import QuotaGate
from tectonic_client.filesystem.services import Bytes, FileServices
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import OPEN_FILES_PAGE, SCAN_PAGE_ROWS
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.ids import IdAllocator
from tectonic_client.metadata.inodes import (
    attributes_of,
    read_attributes,
    read_directory,
    read_inode,
    read_symlink,
)
from tectonic_client.metadata.orphans import find_removed, take_over
from tectonic_client.metadata.sessions import is_alone
from tectonic_client.metadata.xattrs import CAPABILITY
from tectonic_client.records import InodeFlag, InodeRecord
from tectonic_client.types import (
    AttributeChanges,
    Attributes,
    DirectoryEntry,
    FileSystemUsage,
    Owner,
    RenameFlag,
)

T = TypeVar("T")


class OnOrphan(Protocol):
    """Is told of inodes to reclaim."""

    def __call__(self, inode: int, *, was_open: bool) -> None:
        """The inode has no name and is not open here; `was_open` until now."""


_log = logging.getLogger(__name__)


def has_privileges(mode: int) -> bool:
    """Whether executing such a file lends the rights of its owner or group (inode(7))."""
    group = mode & stat.S_ISGID and mode & stat.S_IXGRP
    return stat.S_ISREG(mode) and bool(mode & stat.S_ISUID or group)


class FileSystem:
    """See the module's text. Made by `volume.open_volume`."""

    def __init__(
        self,
        services: FileServices,
        ids: IdAllocator,
        follower: Follower,
        *,
        read_only: bool,
        keeps_access_times: bool,
        on_orphan: OnOrphan,
    ) -> None:
        self._kv = services.kv
        self._session_id = services.session_id
        self._chunk_bytes = services.chunk_bytes
        self._on_blocks_freed = services.on_blocks_freed
        self._thread = threading.get_ident()
        self.audience = services.audience
        """Those who must see this client's changes."""
        self._files = Files(services, self._closed)
        self._handles = HandleTable()
        self.follower = follower
        """What a door that caches needs: it adds its cache, and asks how long to trust."""
        follower.caches.append(self._files)
        self._ids = ids
        self._stores = services.stores
        self._read_only = read_only
        self._on_orphan = on_orphan
        self._orphans: set[int] = set()
        self.quotas = QuotaGate(services.kv, self._files.unflushed)
        self.access_times = AccessTimes(
            services.kv, services.session_id,
            lambda inode, atime_ns: self._files.note(inode, atime_ns=atime_ns),
            keeps=keeps_access_times and not read_only,
        )  # fmt: skip

    @property
    def files(self) -> Files:
        """The open files, for the volume's background tasks."""
        return self._files

    def inode_of(self, handle: int) -> int:
        """The inode behind a handle, 0 where there is no such handle."""
        return self._handles.inode_of(handle)

    def _require_writable(self) -> None:
        if self._read_only:
            raise ReadOnly("the volume was opened read-only")

    async def _change(
        self, change: Callable[[Transaction, Actor], T], *, held: Collection[int]
    ) -> T:
        """Run a change of names or attributes; return when all who follow changes have seen it.

        While it is made the kernel of a mount may hold its locks on the inodes `held`.
        """
        result, positions = await self._commit(change)
        await self.audience.has_seen(positions, held)
        return result

    async def _remove(
        self, change: Callable[[Transaction, Actor], int | None], *, held: Collection[int]
    ) -> None:
        """As `_change`, for what may take an inode's last name away, and returns it then."""
        inode, positions = await self._commit(change)
        self._orphaned(inode)
        self._on_blocks_freed()
        await self.audience.has_seen(positions, held)

    def _is_nobodys(self, tx: ReadTransaction, inode: int) -> bool:
        """Whether surely nobody has an inode open: it may be reclaimed with its last name.

        Where the engine runs the transaction in the event loop's thread, no task can open it
        between this look and the commit.
        """
        here = threading.get_ident() == self._thread
        return here and not self._files.is_open(inode) and is_alone(tx, self._session_id)

    async def _commit(self, change: Callable[[Transaction, Actor], T]) -> tuple[T, Positions]:
        """Run a change; returns the positions of its events, which others may not have seen."""
        self._require_writable()
        now_ns = time.time_ns()

        def run(tx: Transaction) -> tuple[T, Positions]:
            actor = Actor(self._session_id, now_ns, Changes(), self._is_nobodys)
            result = change(tx, actor)
            return result, actor.changes.write(tx, self._session_id)

        return await self._kv.transact(run, brief=True)

    def _overlay(self, attributes: Attributes) -> Attributes:
        attributes = self.access_times.overlay(attributes)
        state = self._files.state_of(attributes.inode)
        return attributes if state is None else state.overlay(attributes)

    # --- names --------------------------------------------------------------------------------

    async def resolve(self, path: str | bytes, *, follow: bool = True) -> int:
        """The inode that an absolute path names."""
        return await self._kv.read(lambda tx: resolve(tx, path, follow=follow))

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        """The inode behind a name. Raises NotFound, NotDirectory, StaleHandle."""
        return self._overlay(await self._kv.read(lambda tx: namespace.lookup(tx, parent, name)))

    async def find(self, parent: int, name: bytes) -> Found:
        """As `lookup`, for a caller that remembers also absence. Raises NotDirectory, ..."""
        found = await self._kv.read(lambda tx: namespace.find(tx, parent, name))
        if found.attributes is None:
            return found
        return found._replace(attributes=self._overlay(found.attributes))

    async def mknod(
        self, parent: int, name: bytes, mode: int, owner: Owner, rdev: int = 0
    ) -> Attributes:
        """A new inode of the type in `mode` (S_IFREG where it has none)."""
        mode = mode if stat.S_IFMT(mode) else mode | stat.S_IFREG
        inode, record, positions = await self._create(parent, name, mode, owner, rdev)
        await self.audience.has_seen(positions, [parent])
        return attributes_of(inode, record)

    async def _create(
        self, parent: int, name: bytes, mode: int, owner: Owner, rdev: int = 0
    ) -> tuple[int, InodeRecord, Positions]:
        self._require_writable()
        inode = await self._ids.next_id()
        record, positions = await self._commit(
            lambda tx, actor: namespace.create(tx, parent, name, inode, mode, owner, actor, rdev)
        )
        return inode, record, positions

    async def mkdir(self, parent: int, name: bytes, mode: int, owner: Owner) -> Attributes:
        """A new directory."""
        return await self.mknod(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), owner)

    async def symlink(self, parent: int, name: bytes, target: bytes, owner: Owner) -> Attributes:
        """A new symbolic link."""
        self._require_writable()
        inode = await self._ids.next_id()
        record = await self._change(
            lambda tx, actor: namespace.symlink(tx, parent, name, inode, target, owner, actor),
            held=[parent],
        )
        return attributes_of(inode, record)

    async def readlink(self, inode: int) -> bytes:
        """Target of a symbolic link."""
        target = await self._kv.read(lambda tx: read_symlink(tx, inode))
        self.access_times.note(inode, None, time.time_ns())
        return target

    async def link(self, inode: int, parent: int, name: bytes) -> Attributes:
        """One more name of a file."""
        attributes = await self._change(
            lambda tx, actor: namespace.link(tx, inode, parent, name, actor), held=[parent, inode]
        )
        return self._overlay(attributes)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name; the file lives on while somebody has it open."""
        await self._remove(
            lambda tx, actor: namespace.unlink(tx, parent, name, actor), held=[parent]
        )

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        await self._remove(
            lambda tx, actor: namespace.rmdir(tx, parent, name, actor), held=[parent]
        )

    async def rename(
        self, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes,
        flags: RenameFlag = RenameFlag.NONE,
    ) -> None:  # fmt: skip
        """rename(2), atomic, across directories; flags as renameat2(2)."""
        old, new = Place(old_parent, old_name), Place(new_parent, new_name)
        await self._remove(
            lambda tx, actor: namespace.rename(tx, old, new, flags, actor),
            held=[old_parent, new_parent],
        )

    async def clone(
        self, source: int, parent: int, name: bytes, owner: Owner | None = None,
        on_progress: Callable[[CloneReport], None] = lambda report: None,
    ) -> CloneReport:  # fmt: skip
        """Copy a file or tree in metadata only, what this client has not flushed yet included.

        See `cloning` for what is copied, and `Cloner.clone` for errors.
        """
        self._require_writable()
        await self.sync(durable=False)
        cloner = Cloner(self._kv, self._ids, owner, on_progress)
        try:
            await cloner.clone(source, parent, name)
        except BaseException:
            if cloner.root:
                self._on_orphan(cloner.root, was_open=False)
            raise
        await self.audience.has_seen(cloner.positions)
        return cloner.report

    def _orphaned(self, inode: int | None) -> None:
        """An inode lost its last name: reclaim it now, or when its last handle is closed."""
        if inode is None:
            return
        if self._files.is_open(inode):
            self._orphans.add(inode)
        else:
            self._on_orphan(inode, was_open=False)

    def _closed(self, inode: int) -> None:
        if inode in self._orphans:
            self._orphans.discard(inode)
            self._on_orphan(inode, was_open=True)

    async def keep_removed_files(self) -> None:
        """Take over open files that other clients have removed, so that they stay until closed.

        Done often enough (see ORPHAN_GRACE_S), no open has to tell other clients of itself.
        """
        inodes = self._files.inodes()
        for start in range(0, len(inodes), OPEN_FILES_PAGE):
            page, known = inodes[start : start + OPEN_FILES_PAGE], frozenset(self._orphans)
            for inode in await self._kv.read(partial(find_removed, inodes=page, known=known)):
                await self._take_over(inode)

    async def _take_over(self, inode: int) -> None:
        keep = partial(take_over, inode=inode, session_id=self._session_id)
        if not await self._kv.transact(keep, brief=True):
            _log.error("inode %d is open, but another client removed it: its data is gone", inode)
        if self._files.is_open(inode):
            self._orphans.add(inode)
        else:
            self._on_orphan(inode, was_open=True)

    # --- attributes ---------------------------------------------------------------------------

    async def getattr(self, inode: int) -> Attributes:
        """What stat tells, unflushed writes of this client included. Raises StaleHandle."""
        return self._overlay(await self._kv.read(lambda tx: read_attributes(tx, inode)))

    async def setattr(self, inode: int, changes: AttributeChanges) -> Attributes:
        """chmod, chown, utimens and truncate; returns the attributes after it."""
        self._require_writable()
        if changes.size is not None:
            await self._admit_size(inode, changes.size)
            await self._files.truncate(inode, changes.size, time.time_ns())
            if changes == AttributeChanges(size=changes.size):
                return await self.getattr(inode)
        state = self._files.state_of(inode)
        if changes.mtime_ns is not None and state is not None and state.dirty:
            # The time that is set must not be overwritten by a later flush of earlier writes.
            await self._files.writer.flush(state)
        attributes = await self._change(
            lambda tx, actor: namespace.change_attributes(tx, inode, changes, actor), held=[inode]
        )
        if changes.atime_ns is not None:
            self.access_times.forget(inode)
        self._files.note(
            inode, mode=attributes.mode, atime_ns=attributes.atime_ns,
            mtime_ns=attributes.mtime_ns, ctime_ns=attributes.ctime_ns,
        )  # fmt: skip
        return self._overlay(attributes)

    async def clear_privileges(self, handle: int) -> int | None:
        """Before a write: take set-user-ID, set-group-ID and capabilities off the file (write(2)).

        For doors whose kernel does not do it. Returns the inode if it had any of them.
        """
        state = self._handles.file(handle).state
        if state.record is None:
            return None
        lost = await self._clear_capability(state)
        if has_privileges(state.record.mode):
            mode = state.record.mode & ~(stat.S_ISUID | stat.S_ISGID)
            await self.setattr(state.inode, AttributeChanges(mode=stat.S_IMODE(mode)))
            lost = True
        return state.inode if lost else None

    async def _clear_capability(self, state: OpenInode) -> bool:
        """A file with other attributes is asked once for each change of its record."""
        record = state.record
        if record is None or not record.flags & InodeFlag.XATTRS or state.incapable is record:
            return False
        try:
            await self.getxattr(state.inode, CAPABILITY)
            await self.removexattr(state.inode, CAPABILITY)
        except NoSuchAttribute:
            state.incapable = record
            return False
        return True

    async def _admit_size(self, inode: int, size: int) -> None:
        record = await self._kv.read(lambda tx: read_inode(tx, inode))
        quota = await self.quotas.quota_of(inode, record)
        if quota is not None:
            await self.quotas.admit(quota, size - record.size)

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Value of an extended attribute. Raises NoSuchAttribute, NotSupported, StaleHandle.

        Of an open file without attributes the kernel asks for those of `security.` at each write:
        that costs no look at the metadata.
        """
        if name.startswith(b"security.") and self._files.has_no_xattrs(inode):
            raise NoSuchAttribute(f"inode {inode} has no attribute {name!r}")
        return await self._kv.read(lambda tx: policies.get(tx, inode, name))

    async def listxattr(self, inode: int) -> list[bytes]:
        """Names of the extended attributes."""
        return await self._kv.read(lambda tx: policies.names(tx, inode))

    async def setxattr(self, inode: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute. Raises as `policies.put`."""
        record = await self._change(
            lambda tx, actor: policies.put(tx, inode, name, value, actor), held=[inode]
        )
        self._files.note(inode, flags=record.flags)

    async def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute. Raises as `policies.remove`."""
        record = await self._change(
            lambda tx, actor: policies.remove(tx, inode, name, actor), held=[inode]
        )
        self._files.note(inode, flags=record.flags)

    async def statfs(self) -> FileSystemUsage:
        """Space of the stores that take new chunks."""
        usage = await self._stores.usage()
        return FileSystemUsage(usage.total_bytes, usage.free_bytes, self._chunk_bytes)

    # --- files --------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, owner: Owner, flags: int
    ) -> tuple[Attributes, int]:
        """A new regular file, open. Raises Exists whether or not O_EXCL is among the flags."""
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        inode, record, positions = await self._create(parent, name, mode, owner)
        quota = await self.quotas.quota_of(inode, record)
        handle = self._files.open_new(inode, record, flags, quota)
        try:
            await self.audience.has_seen(positions, [parent])
        except BaseException:
            await self._files.close(handle)
            raise
        return attributes_of(inode, record), self._handles.add(handle)

    async def open(self, inode: int, flags: int) -> int:
        """Handle of a regular file."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._require_writable()
        handle = await self._files.open(inode, flags)
        if flags & os.O_TRUNC:
            try:
                await self._files.truncate(inode, 0, time.time_ns())
            except BaseException:
                await self._files.close(handle)
                raise
        return self._handles.add(handle)

    async def read(self, handle: int, offset: int, size: int) -> Bytes:
        """Bytes from `offset`; fewer only at the end. Valid until the caller's next await.

        Raises CorruptChunk, ChunkMissing (naming path, block and store), StoreUnavailable.
        """
        opened = self._handles.file(handle)
        try:
            data = await self._files.reader.read(opened, offset, size)
        except CorruptionError as error:
            path = await self._path_of(opened.state.inode)
            raise type(error)(f"{path}: {error}") from error
        if data and not opened.flags & os.O_NOATIME:
            self.access_times.note(opened.state.inode, opened.state.record, time.time_ns())
        return data

    async def _path_of(self, inode: int) -> str:
        try:
            return await self._kv.read(lambda tx: path_of(tx, inode))
        except TectonicError:  # what is told of the inode matters more than its path
            return f"<inode {inode}>"

    async def write(self, handle: int, offset: int, data: Bytes) -> int:
        """Write all of `data`.

        Raises NoSpace and other store errors, maybe of earlier writes; QuotaExceeded.
        """
        opened = self._handles.file(handle)
        if opened.state.quota is not None:
            start = opened.state.size if opened.flags & os.O_APPEND else offset
            await self.quotas.admit(opened.state.quota, start + len(data) - opened.state.size)
        return await self._files.writer.write(opened, offset, data)

    async def flush(self, handle: int) -> None:
        """As close(2): everything written survives a crash of this process."""
        opened = self._handles.file(handle)
        if opened.writable and not self._is_orphan(opened):
            await self._files.writer.flush_handle(opened)

    async def fsync(self, handle: int, *, data_only: bool = False) -> None:
        """As fsync(2): everything written, and the file's name, survives power loss.

        `data_only` is accepted; the data cannot be durable without the metadata that names it.
        """
        opened = self._handles.file(handle)
        await self._files.writer.flush_handle(opened, durable=True)

    async def release(self, handle: int) -> None:
        """Close a handle. Errors of the last flush are raised; the handle is gone in any case."""
        opened = self._handles.file(handle)
        self._handles.remove(handle)
        await self._files.close(opened, discard=self._is_orphan(opened))

    def _is_orphan(self, handle: FileHandle) -> bool:
        return handle.state.inode in self._orphans

    # --- directories --------------------------------------------------------------------------

    async def opendir(self, inode: int) -> int:
        """Handle of a directory."""
        record = await self._kv.read(lambda tx: read_directory(tx, inode))
        return self._handles.add(DirectoryHandle(inode, bool(record.flags & InodeFlag.PUSH)))

    def directory_pushes(self, handle: int) -> bool:
        """Whether the open directory tells of changes of its entries (coherence=push)."""
        return self._handles.directory(handle).pushes

    async def readdir(
        self, handle: int, cookie: int, limit: int = SCAN_PAGE_ROWS
    ) -> list[DirectoryEntry]:
        """A page of entries behind `cookie` (0: the first ones), without "." and "..".

        Entries that exist throughout a listing appear exactly once, whatever happens to others.
        """
        inode = self._handles.directory(handle).inode
        page = await self._kv.read(lambda tx: namespace.list_directory(tx, inode, cookie, limit))
        self.access_times.note(inode, None, time.time_ns())
        return [entry._replace(attributes=self._overlay(entry.attributes)) for entry in page]

    async def releasedir(self, handle: int) -> None:
        """Close a directory's handle."""
        self._handles.remove(handle)

    async def fsyncdir(self, handle: int) -> None:
        """Every acknowledged change of names survives power loss."""
        await self._files.writer.sync_metadata()

    # --- the whole ----------------------------------------------------------------------------

    async def sync(self, *, durable: bool = True) -> None:
        """Flush every open file. Raises the first error after all were tried.

        Where the metadata do not answer, the others are not tried: each would wait as long.
        """
        first: TectonicError | None = None
        for state in self._files.dirty():
            try:
                await self._files.writer.flush(state)
            except (MetadataUnavailable, UnknownOutcome):
                raise
            except TectonicError as error:
                path = await self._path_of(state.inode)
                _log.error("%s could not be flushed: %s", path, error)
                first = first or error
        if durable:
            await self._files.writer.sync_metadata()
        if first is not None:
            raise first
        try:
            await self.access_times.write()
        except TectonicError as error:  # nobody was promised them
            _log.warning("access times could not be written: %s", error)

    def unflushed(self) -> list[int]:
        """Inodes with written bytes that no flush has published."""
        return [state.inode for state in self._files.dirty()]

    async def flush_idle_buffers(self) -> None:
        """Publish open files that hold memory, the longest dirty first, so that others get it."""
        for state in self._files.dirty():
            if state.log.holds_buffer and not state.lock.locked():
                await self._flush_in_background(state.inode)

    async def flush_expired(self, older_than_s: float) -> None:
        """Publish what was written longer ago than this."""
        limit = trio.current_time() - older_than_s
        for state in self._files.dirty():
            expired = state.dirty_since is not None and state.dirty_since <= limit
            if expired and state.inode not in self._orphans:
                await self._flush_in_background(state.inode)

    async def _flush_in_background(self, inode: int) -> None:
        state = self._files.state_of(inode)
        if state is None:
            return
        try:
            await self._files.writer.flush(state)
            await self.audience.announce(state.unseen)
        except TectonicError as error:
            # Nobody waits for this flush. Bytes that it lost are told to the file's handles; where
            # the metadata engine failed they are kept, and tried again.
            _log.warning("inode %d: %s", inode, error)

    async def exists(self, path: str | bytes) -> bool:
        """Whether an absolute path names something."""
        try:
            await self.resolve(path)
        except NotFound:
            return False
        return True
