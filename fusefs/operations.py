"""The request handlers: each translates one kernel request into one call of the file system.

Nothing about the meaning of files and names is decided here, only what the kernel may cache and
which path the bytes take:

* Files opened write-only or for appending bypass the page cache (`direct_io`), which is ten times
  faster. Write-only files cannot be mapped, so nothing is lost. Appending must: pages of a mapped
  file that the kernel writes back through an appending handle would land at the end of the file.
* A file that is unchanged since this mount last opened it keeps its pages (`keep_cache`).
* Opening a changed file drops the kernel's attributes first: close-to-open.
* No lookup counts are kept: inode numbers are never reused, and open files hold their inodes.

`_guarded` wraps every handler: it records the request, and lets only FUSEError out.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyfuse3

from fusefs.errors import errno_of
from fusefs.options import MountOptions
from fusefs.removedopens import OpensOfRemoved
from fusefs.versions import OpenedVersions
from tectonic_client.errors import Exists, InvalidArgument, StaleHandle
from tectonic_client.limits import (
    ALIGNMENT_BYTES,
    FUSE_REQUEST_BYTES,
    MAX_NAME_BYTES,
    READDIR_FIRST_PAGE,
    SCAN_PAGE_ROWS,
)
from tectonic_client.recorder import Recorder
from tectonic_client.types import AttributeChanges, Attributes, Owner, RenameFlag

if TYPE_CHECKING:
    from tectonic_client.filesystem.core import FileSystem
    from tectonic_client.filesystem.follower import Moment

_STAT_BLOCK_BYTES: Final = 512
"""Unit of st_blocks (stat(2))."""

_CANCELLED: Final = errno.EINTR
"""What the recorder notes of a request that got no answer because the mount ended."""

_PERMISSIONS: Final = 0o777
"""What umask= decides on."""

_TRUSTED: Final = b"trusted."

_DOTS: Final = ((1, b"."), (2, b".."))
"""Cookies and names of the two entries that a file system does not list itself; the cookies of
its own entries are greater."""

_Class = TypeVar("_Class", bound=type)


def _guarded(cls: _Class) -> _Class:
    """Wrap all handlers of a class, so that none can be forgotten."""
    for name, member in list(vars(cls).items()):
        if inspect.iscoroutinefunction(member) and not name.startswith("_"):
            setattr(cls, name, _guard(member))
    return cls


def _guard(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    name = handler.__name__
    describe, transferred = _describer(handler), _TRANSFERRED.get(name)

    @functools.wraps(handler)
    async def guarded(self: FuseOperations, *arguments: Any) -> Any:
        recorder = self.recorder
        activity = recorder.begin(name, *describe(self, *arguments))
        outcome, count = _CANCELLED, 0
        try:
            answer = await handler(self, *arguments)
            outcome = 0
            if transferred is not None:
                count = transferred(answer)
            return answer
        except pyfuse3.FUSEError as error:
            outcome = error.errno
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the mount must live on
            outcome = errno_of(error, name)
            raise pyfuse3.FUSEError(outcome) from None
        finally:
            recorder.end(activity, outcome, count)

    return guarded


_TRANSFERRED: Final[dict[str, Callable[[Any], int]]] = {"read": len, "write": int}
"""How many bytes a handler's answer says that it has moved."""


def _describer(handler: Callable[..., object]) -> Callable[..., tuple[int, ...]]:
    """What tells inode and, of reads and writes, offset and size from a handler's arguments."""
    _, first, *others = inspect.signature(handler).parameters
    if others[:2] == ["off", "size"]:
        return lambda operations, fh, off, size: (operations.inode_of(fh), off, size)
    if others[:2] == ["off", "buf"]:
        return lambda operations, fh, off, buf: (operations.inode_of(fh), off, len(buf))
    if first == "fh":
        return lambda operations, fh, *rest: (operations.inode_of(fh),)
    if "inode" in first:
        return lambda operations, inode, *rest: (inode,)
    return lambda operations, *rest: (0,)


@_guarded
class FuseOperations(pyfuse3.Operations):  # type: ignore[misc]  # pyfuse3 publishes no types
    """Handlers of one mount. Called by pyfuse3 on the trio loop."""

    def __init__(self, filesystem: FileSystem, options: MountOptions, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._fs = filesystem
        self._options = options
        self.versions = OpenedVersions()
        self._removed = OpensOfRemoved()
        self._direct: set[int] = set()
        """Handles whose writes bypass the page cache."""
        self._directories: dict[int, int] = {}
        """Inode of each open directory, for its entries "." and ".."."""
        self._follower = filesystem.follower

    @property
    def filesystem(self) -> FileSystem:
        """What the requests are translated for."""
        return self._fs

    def inode_of(self, handle: int) -> int:
        """The inode behind a handle, for the recorder."""
        return self._fs.inode_of(handle)

    def _trusted_s(self, begun: Moment, timeout_s: float, *, pushes: bool) -> float:
        """How long the kernel may trust something that was read since `begun`."""
        if not pushes:
            return timeout_s
        return self._follower.trusted_s(begun, self._options.push_timeout_s)

    def _absence(self, begun: Moment, *, pushes: bool) -> pyfuse3.EntryAttributes:
        """That there is no such name, for the kernel to remember. Raises where it may not."""
        entry = pyfuse3.EntryAttributes()
        timeout_s = self._options.negative_timeout_s
        entry.entry_timeout = self._trusted_s(begun, timeout_s, pushes=pushes)
        if not entry.entry_timeout:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return entry

    def _entry(
        self, attributes: Attributes, begun: Moment, *, in_pushing: bool | None = None
    ) -> pyfuse3.EntryAttributes:
        """Attributes for the kernel, which were read since `begun`.

        `in_pushing` says whether the directory of the name tells of changes; by default that is as
        with the inode, which has it from there.
        """
        options, pushes = self._options, attributes.pushes
        name_pushes = pushes if in_pushing is None else in_pushing
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = attributes.inode
        entry.entry_timeout = self._trusted_s(begun, options.entry_timeout_s, pushes=name_pushes)
        entry.attr_timeout = self._trusted_s(begun, options.attr_timeout_s, pushes=pushes)
        entry.st_mode = self._mode_shown(attributes.mode)
        entry.st_nlink = attributes.nlink
        uid, gid = self._options.uid, self._options.gid
        entry.st_uid = attributes.uid if uid is None else uid
        entry.st_gid = attributes.gid if gid is None else gid
        entry.st_rdev = attributes.rdev
        entry.st_size = attributes.size
        # Buffered I/O of libc and Python sizes its buffers by this.
        entry.st_blksize = FUSE_REQUEST_BYTES if stat.S_ISREG(attributes.mode) else ALIGNMENT_BYTES
        entry.st_blocks = -(-attributes.size // _STAT_BLOCK_BYTES)
        entry.st_atime_ns = attributes.atime_ns
        entry.st_mtime_ns = attributes.mtime_ns
        entry.st_ctime_ns = attributes.ctime_ns
        return entry

    def _mode_shown(self, mode: int) -> int:
        umask = self._options.umask
        return mode if umask is None else mode & ~_PERMISSIONS | _PERMISSIONS & ~umask

    # --- names --------------------------------------------------------------------------------

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """The entry; one without inode number tells the kernel to remember the absence."""
        begun = self._follower.moment()
        attributes, in_pushing = await self._fs.find(parent_inode, name)
        if attributes is None:
            return self._absence(begun, pushes=in_pushing)
        return self._entry(attributes, begun, in_pushing=in_pushing)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """A new file that is not opened, fifo, socket or device node."""
        begun = self._follower.moment()
        return self._entry(
            await self._fs.mknod(parent_inode, name, mode & ~ctx.umask, _owner(ctx), rdev), begun
        )

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """A new directory."""
        begun = self._follower.moment()
        attributes = await self._fs.mkdir(parent_inode, name, mode & ~ctx.umask, _owner(ctx))
        return self._entry(attributes, begun)

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """A new symbolic link."""
        begun = self._follower.moment()
        attributes = await self._fs.symlink(parent_inode, name, target, _owner(ctx))
        return self._entry(attributes, begun)

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """Target of a symbolic link."""
        return await self._fs.readlink(inode)

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """One more name of a file."""
        begun = self._follower.moment()
        entry = self._entry(await self._fs.link(inode, new_parent_inode, new_name), begun)
        entry.entry_timeout = 0  # whether the directory tells of changes is not known here
        return entry

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a name."""
        await self._fs.unlink(parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        await self._fs.rmdir(parent_inode, name)

    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes,
        flags: int, ctx: pyfuse3.RequestContext,
    ) -> None:  # fmt: skip
        """As renameat2(2)."""
        await self._fs.rename(
            parent_inode_old, name_old, parent_inode_new, name_new, _rename_flag(flags)
        )

    # --- attributes ---------------------------------------------------------------------------

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """As stat(2)."""
        begun = self._follower.moment()
        return self._entry(await self._fs.getattr(inode), begun)

    async def setattr(
        self, inode: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields,
        fh: int | None, ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:  # fmt: skip
        """chmod, chown, truncate, utimens. pyfuse3 has put the time in for UTIME_NOW."""
        changes = AttributeChanges(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        begun = self._follower.moment()
        return self._entry(await self._fs.setattr(inode, changes), begun)

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """As getxattr(2); pyfuse3 compares the length with the caller's buffer."""
        return await self._fs.getxattr(inode, name)

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        """As listxattr(2). The kernel lets root alone do anything else with a `trusted.` one."""
        names = await self._fs.listxattr(inode)
        return [name for name in names if not ctx.uid or not name.startswith(_TRUSTED)]

    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """As setxattr(2); XATTR_CREATE and XATTR_REPLACE are pyfuse3's, which looks first."""
        await self._fs.setxattr(inode, name, value)

    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """As removexattr(2)."""
        await self._fs.removexattr(inode, name)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Space of the stores. Inodes are not limited: 0, as file systems without a table say."""
        usage = await self._fs.statfs()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = ALIGNMENT_BYTES
        data.f_blocks = usage.total_bytes // ALIGNMENT_BYTES
        data.f_bfree = data.f_bavail = usage.free_bytes // ALIGNMENT_BYTES
        data.f_namemax = MAX_NAME_BYTES
        return data

    # --- files --------------------------------------------------------------------------------

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """A new file, open."""
        begun = self._follower.moment()
        try:
            attributes, handle = await self._fs.create(
                parent_inode, name, mode & ~ctx.umask, _owner(ctx), flags
            )
        except Exists as error:
            if flags & os.O_EXCL:
                raise
            # Another client was faster. ESTALE makes the kernel look again and open what is there.
            raise StaleHandle(str(error)) from error
        info = self._opened(handle, flags, keep_cache=False)
        return info, self._entry(attributes, begun)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """A handle to an existing file."""
        attributes = await self._fs.getattr(inode)
        if not attributes.nlink:
            self._removed.require_second_look(ctx.pid, inode)
        if attributes.pushes:
            await self._follower.ready()  # pages of an open file have no time-out
        handle = await self._fs.open(inode, flags)
        unchanged = self.versions.note_open(attributes)
        if not unchanged:
            try:
                # ENOENT: the kernel has nothing of this inode to forget.
                with suppress(FileNotFoundError):
                    pyfuse3.invalidate_inode(inode, attr_only=True)
            except BaseException:
                self.versions.forget(inode)
                await self._fs.release(handle)
                raise
        return self._opened(handle, flags, keep_cache=unchanged)

    def _opened(self, handle: int, flags: int, *, keep_cache: bool) -> pyfuse3.FileInfo:
        direct = _bypasses_page_cache(flags)
        if direct:
            self._direct.add(handle)
        return pyfuse3.FileInfo(fh=handle, direct_io=direct, keep_cache=keep_cache)

    async def read(self, fh: int, off: int, size: int) -> bytes | bytearray | memoryview:
        """Bytes of the file. pyfuse3 copies them out before anything else runs."""
        return await self._fs.read(fh, off, size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write all of `buf`.

        What goes around the page cache may have to clear set-user-ID bits and capabilities, which
        is left to us, whoever writes: the request does not tell. The kernel must not show them a
        moment longer.
        """
        if fh in self._direct and (inode := await self._fs.clear_privileges(fh)) is not None:
            with suppress(FileNotFoundError):
                pyfuse3.invalidate_inode(inode, attr_only=True)
        return await self._fs.write(fh, off, buf)

    async def flush(self, fh: int) -> None:
        """A descriptor was closed; its close(2) gets the answer."""
        await self._fs.flush(fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """As fsync(2) and fdatasync(2)."""
        await self._fs.fsync(fh, data_only=datasync)

    async def release(self, fh: int) -> None:
        """The last descriptor is gone. Nobody gets the answer; the log has it."""
        self._direct.discard(fh)
        await self._fs.release(fh)

    # --- directories --------------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """A handle to a directory."""
        handle = await self._fs.opendir(inode)
        self._directories[handle] = inode
        return handle

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Entries with attributes until the reply is full.

        Pages are fetched per request and never kept: the kernel takes over the attributes, and
        older ones than its own would hide what was written in the meantime.
        """
        begun, in_pushing = self._follower.moment(), self._fs.directory_pushes(fh)
        for cookie, name in _DOTS:
            if start_id < cookie:
                attributes = await self._fs.lookup(self._directories[fh], name)
                entry = self._entry(attributes, begun, in_pushing=in_pushing)
                if not pyfuse3.readdir_reply(token, name, entry, cookie):
                    return
        position, limit = max(start_id, _DOTS[-1][0]), READDIR_FIRST_PAGE
        while page := await self._fs.readdir(fh, position, limit):
            for cookie, name, attributes in page:
                entry = self._entry(attributes, begun, in_pushing=in_pushing)
                if not pyfuse3.readdir_reply(token, name, entry, cookie):
                    return
            position, limit = page[-1].cookie, min(2 * limit, SCAN_PAGE_ROWS)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Every acknowledged change of names survives power loss."""
        await self._fs.fsyncdir(fh)

    async def releasedir(self, fh: int) -> None:
        """The directory was closed."""
        self._directories.pop(fh, None)
        await self._fs.releasedir(fh)


def _owner(ctx: pyfuse3.RequestContext) -> Owner:
    return Owner(ctx.uid, ctx.gid)


def _rename_flag(flags: int) -> RenameFlag:
    if flags not in (RenameFlag.NONE, RenameFlag.NOREPLACE, RenameFlag.EXCHANGE):
        raise InvalidArgument(f"rename flags {flags:#x} are not supported")
    return RenameFlag(flags)


def _bypasses_page_cache(flags: int) -> bool:
    return flags & os.O_ACCMODE == os.O_WRONLY or bool(flags & os.O_APPEND)
