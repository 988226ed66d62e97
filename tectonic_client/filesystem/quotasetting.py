"""Setting and removing quotas of directories, also of ones that hold much already.

A quota begins with its record; the directory joins it first, then all that is below, page by page.
What is made meanwhile inherits it, and no name crosses its border, so the walk meets everything.
A walk that was cut short is taken up by setting the quota again. Removing forgets the record first:
from then on nothing counts, and the walk only tidies up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tectonic_client.errors import InvalidArgument, NotFound, StaleHandle
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import QUOTA_BATCH_ENTRIES
from tectonic_client.metadata import keys, quotas
from tectonic_client.metadata.ids import IdAllocator
from tectonic_client.metadata.inodes import read_directory, read_inode
from tectonic_client.metadata.names import Entry, list_entries
from tectonic_client.metadata.quotas import Usage
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.records import FileType, QuotaRecord

Progress = Callable[[int], None]
"""Is told how many inodes the walk has seen."""


@dataclass(frozen=True, slots=True)
class QuotaReport:
    """A directory's quota and what is used of it. Limits of 0 are none."""

    directory: int
    max_bytes: int
    max_inodes: int
    used_bytes: int
    used_inodes: int


class QuotaSetting:
    """Changes quotas on behalf of a client."""

    def __init__(self, kv: AsyncKV, ids: IdAllocator, on_progress: Progress) -> None:
        self._kv = kv
        self._ids = ids
        self._on_progress = on_progress
        self._seen = 0

    async def set(self, directory: int, max_bytes: int | None, max_inodes: int | None) -> None:
        """Give a directory a quota, or change its limits (None: as it was; 0: no limit).

        What is there may be more than the limits: then nothing more may come. Raises NotDirectory,
        StaleHandle, InvalidArgument (it would lie in another quota, or one in it).
        """
        number = await self._ids.next_id()
        begin = partial(self._begin, directory, number, max_bytes, max_inodes)
        quota = await self._kv.transact(begin, durable=True)
        try:
            await self._walk(directory, partial(self._join, quota=quota))
        except InvalidArgument:
            if quota == number:
                await self.remove(directory)
            raise

    @staticmethod
    def _begin(
        directory: int, number: int, max_bytes: int | None, max_inodes: int | None, tx: Transaction
    ) -> int:
        record = read_directory(tx, directory)
        quota = quotas.quota_of(tx, directory, record)
        if quota is None:
            limits = QuotaRecord(directory, max_bytes or 0, max_inodes or 0)
            quotas.write_quota(tx, number, limits)
            quotas.join(tx, directory, record, number)
            return number
        standing = quotas.read_quota(tx, quota)
        assert standing is not None
        if standing.directory != directory:
            raise InvalidArgument(
                f"directory {directory} lies below directory {standing.directory}, which has a"
                " quota: quotas do not lie within each other"
            )
        quotas.write_quota(
            tx,
            quota,
            replace(
                standing,
                max_bytes=standing.max_bytes if max_bytes is None else max_bytes,
                max_inodes=standing.max_inodes if max_inodes is None else max_inodes,
            ),
        )
        return quota

    async def remove(self, directory: int) -> None:
        """Take a directory's quota away. Raises NotFound where it has none of its own."""

        def forget(tx: Transaction) -> None:
            record = read_directory(tx, directory)
            quota = quotas.quota_of(tx, directory, record)
            limits = None if quota is None else quotas.read_quota(tx, quota)
            if quota is None or limits is None or limits.directory != directory:
                raise NotFound(f"directory {directory} has no quota of its own")
            quotas.delete_quota(tx, quota)
            quotas.leave(tx, directory, record)

        await self._kv.transact(forget, durable=True)
        await self._walk(directory, self._leave)

    # --- walking ------------------------------------------------------------------------------

    async def _walk(self, top: int, visit: Callable[[Transaction, int], None]) -> None:
        todo = [top]
        while todo:
            directory = todo.pop()
            cookie = 0
            while page := await self._kv.read(partial(_list, directory=directory, cookie=cookie)):
                await self._kv.transact(partial(_visit_all, visit=visit, page=page))
                todo += [
                    entry.record.inode
                    for entry in page
                    if entry.record.file_type is FileType.DIRECTORY
                ]
                cookie = page[-1].cookie
                self._seen += len(page)
                self._on_progress(self._seen)

    @staticmethod
    def _join(tx: Transaction, inode: int, quota: int) -> None:
        record = read_inode(tx, inode)
        own = quotas.quota_of(tx, inode, record)
        if own is None:
            quotas.join(tx, inode, record, quota)
        elif own != quota:
            raise InvalidArgument(
                f"inode {inode} counts against another quota already:"
                " quotas do not lie within each other"
            )

    @staticmethod
    def _leave(tx: Transaction, inode: int) -> None:
        record = read_inode(tx, inode)
        if quotas.quota_of(tx, inode, record) is None:
            quotas.leave(tx, inode, record)


def _list(tx: ReadTransaction, directory: int, cookie: int) -> list[Entry]:
    return list_entries(tx, directory, cookie, QUOTA_BATCH_ENTRIES)


def _visit_all(
    tx: Transaction, visit: Callable[[Transaction, int], None], page: list[Entry]
) -> None:
    for entry in page:
        try:
            visit(tx, entry.record.inode)
        except StaleHandle:  # removed since it was listed
            continue


def report(tx: ReadTransaction, directory: int) -> QuotaReport:
    """The quota that a directory counts against, its own or one above. Raises NotFound."""
    quota = quotas.quota_of(tx, directory, read_directory(tx, directory))
    found = None if quota is None else _report(tx, quota)
    if found is None:
        raise NotFound(f"directory {directory} has no quota")
    return found


def _report(tx: ReadTransaction, quota: int) -> QuotaReport | None:
    limits = quotas.read_quota(tx, quota)
    if limits is None:
        return None
    used: Usage = quotas.read_usage(tx, quota)
    return QuotaReport(limits.directory, limits.max_bytes, limits.max_inodes, *used)


def list_quotas(tx: ReadTransaction) -> list[QuotaReport]:
    """All quotas of the volume."""
    found: dict[int, QuotaReport] = {}
    for page in scan_layer(tx, keys.QUOTA):
        for number in {keys.parse_group(key) for key, _ in page} - found.keys():
            if (one := _report(tx, number)) is not None:
                found[number] = one
    return list(found.values())
