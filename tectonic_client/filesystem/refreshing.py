"""Open files as the metadata have them: what other clients published is taken over here.

Raises StaleHandle where the file was removed, IsDirectory and InvalidArgument for what is no
regular file.
"""

from __future__ import annotations

from contextlib import suppress

from tectonic_client.errors import InvalidArgument, IsDirectory, StaleHandle
from tectonic_client.extents import Extent
from tectonic_client.filesystem.openinode import OpenInode
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction
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

        def load(tx: ReadTransaction) -> tuple[InodeRecord, list[Extent], int | None]:
            record = read_inode(tx, state.inode)
            if not record.nlink and not is_whole(tx, state.inode):
                raise StaleHandle(f"inode {state.inode} was removed")
            quota = quotas.quota_of(tx, state.inode, record)
            return record, tails.live_extents(tx, state.inode, record), quota

        if state.dirty and not state.stale:
            return
        was_stale, state.stale = state.stale, False  # a change that comes meanwhile sets it again
        try:
            record, extents, state.quota = await self._kv.read(load)
        except BaseException:
            state.stale = state.stale or was_stale
            raise
        require_regular(state.inode, record)
        state.refresh(record, extents)

    async def catch_up(self, state: OpenInode) -> None:
        """Take over what another client changed below a push directory; the lock is held."""
        if state.stale:
            # Of a removed file its readers keep what they have, as long as that is there.
            with suppress(StaleHandle):
                await self.load(state)


def require_regular(inode: int, record: InodeRecord) -> None:
    """Raise IsDirectory or InvalidArgument for anything but a regular file."""
    if record.is_directory:
        raise IsDirectory(f"inode {inode} is a directory")
    if record.file_type is not FileType.REGULAR:
        raise InvalidArgument(f"inode {inode} is not a regular file")
