"""Open files as the metadata have them: what other clients published is taken over here.

Raises StaleHandle where the file was removed, IsDirectory and InvalidArgument for what is no
regular file.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tectonic_client.errors import InvalidArgument, IsDirectory, StaleHandle
from tectonic_client.extents import Extent, ExtentMap
from tectonic_client.filesystem.openinode import OpenInode
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import EXTENTS_PAGE_ROWS, LOAD_ATTEMPTS
from tectonic_client.metadata import quotas, tails
from tectonic_client.metadata.inodes import read_inode
from tectonic_client.metadata.orphans import is_whole
from tectonic_client.records import FileType, InodeRecord


class Refresher:
    """Loads open inodes again. Used from the event loop only."""

    def __init__(self, kv: AsyncKV) -> None:
        self._kv = kv

    async def reload(self, state: OpenInode) -> None:
        """Take over published changes of other clients; unflushed bytes of this one stay."""
        async with state.lock:
            await self.load(state)

    async def load(self, state: OpenInode) -> None:
        """As `reload`, with the lock held."""
        if state.dirty and not state.stale:
            return
        was_stale, state.stale = state.stale, False  # a change that comes meanwhile sets it again
        try:
            loaded = await self._read(state.inode)
        except BaseException:
            state.stale = state.stale or was_stale
            raise
        require_regular(state.inode, loaded.record)
        state.quota = loaded.quota
        state.refresh(loaded.record, loaded.extents)

    async def _read(self, inode: int) -> _Loaded:
        """The file as it was at one moment, page by page: other tasks run between the pages.

        A file that others change during each of several tries is read in one go.
        """
        for limit in (*[EXTENTS_PAGE_ROWS] * LOAD_ATTEMPTS, None):
            loaded = await self._kv.read(partial(_begin, inode=inode, limit=limit))
            while loaded.position is not None:
                page = await self._kv.read(partial(_go_on, inode=inode, loaded=loaded))
                if page is None:
                    break
                loaded.add(*page)
            else:
                return loaded
        raise AssertionError("what was read in one go has no second page")

    async def catch_up(self, state: OpenInode) -> None:
        """Take over what another client changed below a push directory; the lock is held."""
        if state.stale:
            # Of a removed file its readers keep what they have, as long as that is there.
            with suppress(StaleHandle):
                await self.load(state)


@dataclass(slots=True)
class _Loaded:
    """A file as far as it was read; `position` is where to go on."""

    record: InodeRecord
    quota: int | None
    extents: ExtentMap = field(default_factory=ExtentMap)
    position: int | None = 0

    def add(self, found: list[Extent], position: int | None) -> None:
        """Take a page. What overlaps the one before was compacted meanwhile: the same bytes."""
        for extent in found:
            self.extents.insert(extent)
        self.position = position


def _begin(tx: ReadTransaction, inode: int, limit: int | None) -> _Loaded:
    """The first page, all of it without a limit. Raises StaleHandle."""
    record = _read_whole(tx, inode)
    loaded = _Loaded(record, quotas.quota_of(tx, inode, record))
    loaded.add(*tails.live_page(tx, inode, record, 0, limit))
    return loaded


def _go_on(
    tx: ReadTransaction, inode: int, loaded: _Loaded
) -> tuple[list[Extent], int | None] | None:
    """The next page; None where somebody changed the file meanwhile. Raises StaleHandle."""
    assert loaded.position is not None
    record = _read_whole(tx, inode)
    if not is_same_version(record, loaded.record):
        return None
    return tails.live_page(tx, inode, record, loaded.position, EXTENTS_PAGE_ROWS)


def _read_whole(tx: ReadTransaction, inode: int) -> InodeRecord:
    """The record of an inode whose extents are all there. Raises StaleHandle."""
    record = read_inode(tx, inode)
    if not record.nlink and not is_whole(tx, inode):
        raise StaleHandle(f"inode {inode} was removed")
    return record


def is_same_version(one: InodeRecord, other: InodeRecord | None) -> bool:
    """Whether nobody wrote to the file between two looks at its record."""
    if other is None:
        return False
    return (one.size, one.mtime_ns, one.ctime_ns) == (other.size, other.mtime_ns, other.ctime_ns)


def require_regular(inode: int, record: InodeRecord) -> None:
    """Raise IsDirectory or InvalidArgument for anything but a regular file."""
    if record.is_directory:
        raise IsDirectory(f"inode {inode} is a directory")
    if record.file_type is not FileType.REGULAR:
        raise InvalidArgument(f"inode {inode} is not a regular file")
