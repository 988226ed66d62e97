"""The files that a client has open: opening, closing, and what others changed of them.

What is read and written of them is in `reading` and `writing`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from tectonic_client.errors import StaleHandle
from tectonic_client.extents import ExtentMap
from tectonic_client.filesystem.openinode import FileHandle, OpenInode
from tectonic_client.filesystem.reading import FileReader
from tectonic_client.filesystem.refreshing import Refresher
from tectonic_client.filesystem.services import FileServices
from tectonic_client.filesystem.writelog import WriteLog
from tectonic_client.filesystem.writing import FileWriter
from tectonic_client.records import InodeFlag, InodeRecord
from tectonic_client.types import Change, ChangeKind


class Files:
    """All inodes that this client has open. Used from the event loop only.

    `on_last_close` is told of each inode that is not open any more.
    """

    def __init__(self, services: FileServices, on_last_close: Callable[[int], None]) -> None:
        self._services = services
        self._on_last_close = on_last_close
        self._open: dict[int, OpenInode] = {}
        self._refresher = Refresher(services.kv)
        self.writer = FileWriter(services, self._refresher)
        self.reader = FileReader(services, self._refresher, self.writer.flush, self._open.values())

    # --- opening ------------------------------------------------------------------------------

    def is_open(self, inode: int) -> bool:
        """Whether some handle of this client refers to the inode."""
        return inode in self._open

    def inodes(self) -> list[int]:
        """All inodes that some handle of this client refers to."""
        return list(self._open)

    def state_of(self, inode: int) -> OpenInode | None:
        """The shared state of an open inode."""
        return self._open.get(inode)

    @property
    def open_inodes(self) -> int:
        """How many files are open."""
        return len(self._open)

    async def forget(self, found: Sequence[Change]) -> None:
        """Other clients changed these (see `follower.Cache`)."""
        for change in found:
            state = self._open.get(change.inode)
            if state is not None and change.kind is ChangeKind.INODE:
                state.stale = True

    async def forget_open_files(self) -> None:
        """Other clients may have changed anything below push directories."""
        for state in self._open.values():
            state.stale = True

    def following(self) -> list[int]:
        """Open inodes whose changes by others are told (coherence=push)."""
        return [
            state.inode
            for state in self._open.values()
            if state.record is not None and state.record.flags & InodeFlag.PUSH
        ]

    def dirty(self) -> list[OpenInode]:
        """Inodes with unflushed bytes, the longest dirty first."""
        found = [state for state in self._open.values() if state.dirty]
        return sorted(found, key=lambda state: state.dirty_since or 0.0)

    def note(self, inode: int, **fields: int) -> None:
        """This client has changed these fields of an inode's record."""
        state = self._open.get(inode)
        if state is not None and state.record is not None:
            state.record = replace(state.record, **fields)

    def has_no_xattrs(self, inode: int) -> bool:
        """Whether the inode is open and, as far as this client knows, has none."""
        state = self._open.get(inode)
        record = None if state is None else state.record
        return record is not None and not record.flags & InodeFlag.XATTRS

    def unflushed(self, quota: int) -> int:
        """Bytes by which unflushed writes let files of a quota grow."""
        states = [state for state in self._open.values() if state.quota == quota]
        return sum(state.size - (state.record.size if state.record else 0) for state in states)

    async def open(self, inode: int, flags: int) -> FileHandle:
        """A handle to a regular file, with metadata as of now (close-to-open).

        Raises StaleHandle, IsDirectory, InvalidArgument for what is no regular file.
        """
        state = self._enter(inode)
        try:
            await self._refresher.reload(state)
            if state.record is not None and not state.record.nlink and state.users == 1:
                # Only what a handle of this client keeps alive may be opened without a name:
                # the caller found the inode by a name that is gone, and looks again.
                raise StaleHandle(f"inode {inode} was removed")
        except BaseException:
            await self._leave(state)
            raise
        return FileHandle(state, flags, state.failures)

    def open_new(
        self, inode: int, record: InodeRecord, flags: int, quota: int | None
    ) -> FileHandle:
        """A handle to a regular file that was just created; never waits or fails."""
        state = self._enter(inode)
        state.quota = quota
        if state.record is None:  # else somebody has already found and opened it
            state.refresh(record, ExtentMap())
        return FileHandle(state, flags, state.failures)

    async def close(self, handle: FileHandle, *, discard: bool = False) -> None:
        """Drop a handle; the last one flushes what is left, or discards it (a removed file).

        Not cut short by cancellation. What cannot be flushed is lost with the error.
        """
        await self._leave(handle.state, discard=discard)
        await self.writer.until_seen(handle.state)
        if not discard:
            handle.raise_failure(told=True)

    @asynccontextmanager
    async def visited(self, inode: int) -> AsyncIterator[OpenInode]:
        """The inode's shared state, up to date, for a task of this client. Raises StaleHandle."""
        state = self._enter(inode)
        state.visitors += 1
        try:
            await self._refresher.reload(state)
            yield state
        finally:
            state.visitors -= 1
            await self._leave(state)

    async def truncate(self, inode: int, size: int, now_ns: int) -> None:
        """As `FileWriter.truncate`, also of a file that is not open."""
        # Entered, so that whoever opens the file meanwhile waits and sees the new size.
        state = self._enter(inode)
        try:
            await self.writer.truncate(state, size, now_ns)
        finally:
            await self._leave(state)

    def _enter(self, inode: int) -> OpenInode:
        state = self._open.get(inode)
        if state is None:
            state = self._open[inode] = OpenInode(inode, WriteLog(self._services.write))
        state.users += 1
        return state

    async def _leave(self, state: OpenInode, *, discard: bool = False) -> None:
        """One user less. Between the look whether it is the last one and its going lies no await
        but those under the lock, which whoever comes meanwhile waits for."""
        try:
            if state.users - state.visitors == 1 and not state.log.empty:
                with trio.CancelScope(shield=True):
                    await self._finish(state, discard=discard)
        finally:
            state.users -= 1
            if not state.users:
                self._open.pop(state.inode, None)
                self._on_last_close(state.inode)

    async def _finish(self, state: OpenInode, *, discard: bool) -> None:
        async with state.lock:
            try:
                if state.dirty and not discard:
                    await self.writer.publish(state, durable=False)
            finally:
                if state.users - state.visitors == 1:
                    await self.writer.drop_log(state)
