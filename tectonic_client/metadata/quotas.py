"""Quotas of directories: who counts against which, and how much that is.

Every inode below a directory with a quota has a member record that names the quota, and a flag that
says so: inodes without one cost nothing. New ones inherit it from their directory. An inode counts
as long as it has a name: 1, and a regular file its size. What is used is spread over lanes, chosen
by inode, because ids are leased in ranges: clients rarely write the same lane.

Quotas do not lie within each other, and no name crosses a quota's border (`check_border`), as with
the project quotas of XFS. Functions over a transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tectonic_client.errors import CrossQuota, QuotaExceeded
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import IDS_PER_LEASE, QUOTA_LANES
from tectonic_client.metadata import keys
from tectonic_client.records import (
    CounterRecord,
    FileType,
    InodeFlag,
    InodeRecord,
    QuotaRecord,
    QuotaUsageRecord,
)


class Usage(NamedTuple):
    """What counts against a quota."""

    bytes: int
    inodes: int


def usage_of(record: InodeRecord) -> Usage:
    """What an inode counts."""
    if not record.nlink:
        return Usage(0, 0)
    return Usage(record.size if record.file_type is FileType.REGULAR else 0, 1)


# --- reading ----------------------------------------------------------------------------------


def quota_of(tx: ReadTransaction, inode: int, record: InodeRecord) -> int | None:
    """The quota that an inode counts against; None also where that was removed meanwhile."""
    if not record.flags & InodeFlag.QUOTA:
        return None
    data = tx.get(keys.quota_member(inode))
    quota = None if data is None else CounterRecord.decode(data).value
    return None if quota is None or tx.get(keys.quota(quota)) is None else quota


def read_quota(tx: ReadTransaction, quota: int) -> QuotaRecord | None:
    """The quota's limits; None when it was removed."""
    data = tx.get(keys.quota(quota))
    return None if data is None else QuotaRecord.decode(data)


def read_usage(tx: ReadTransaction, quota: int) -> Usage:
    """What all members count together."""
    rows = [QuotaUsageRecord.decode(value) for _, value in tx.scan(*keys.quota_usages(quota))]
    return Usage(sum(row.used_bytes for row in rows), sum(row.used_inodes for row in rows))


def require_room(tx: ReadTransaction, quota: int, more: Usage) -> None:
    """Raise QuotaExceeded where the quota has no room for this much more.

    Reading all lanes conflicts with every client that writes one; where that matters `QuotaGate`
    asks outside of the transaction.
    """
    limits = read_quota(tx, quota)
    if limits is None or not ((limits.max_bytes and more.bytes) or limits.max_inodes):
        return
    refuse_excess(limits, read_usage(tx, quota), more)


def refuse_excess(limits: QuotaRecord, used: Usage, more: Usage) -> None:
    """Raise QuotaExceeded where `more` on top of `used` is beyond the limits (0: none)."""
    if limits.max_bytes and more.bytes > 0 and used.bytes + more.bytes > limits.max_bytes:
        raise QuotaExceeded(
            f"the quota of directory {limits.directory} is {limits.max_bytes} bytes,"
            f" {used.bytes} are used, {more.bytes} more are asked for"
        )
    if limits.max_inodes and more.inodes > 0 and used.inodes + more.inodes > limits.max_inodes:
        raise QuotaExceeded(
            f"the quota of directory {limits.directory} is {limits.max_inodes} inodes,"
            f" {used.inodes} are used"
        )


# --- members ----------------------------------------------------------------------------------


def inherit(
    tx: Transaction, parent: int, directory: InodeRecord, inode: int, record: InodeRecord
) -> InodeRecord:
    """The record of a new inode in `parent`, a member of its quota. Raises QuotaExceeded."""
    quota = quota_of(tx, parent, directory)
    if quota is None:
        return _without(record)
    require_room(tx, quota, Usage(0, 1))
    tx.put(keys.quota_member(inode), CounterRecord(quota).encode())
    return replace(record, flags=record.flags | InodeFlag.QUOTA)


def _without(record: InodeRecord) -> InodeRecord:
    if not record.flags & InodeFlag.QUOTA:
        return record
    return replace(record, flags=record.flags & ~InodeFlag.QUOTA)


def join(tx: Transaction, inode: int, record: InodeRecord, quota: int) -> None:
    """Make an inode that exists a member."""
    tx.put(keys.quota_member(inode), CounterRecord(quota).encode())
    flagged = replace(record, flags=record.flags | InodeFlag.QUOTA)
    tx.put(keys.attributes(inode), flagged.encode())
    _add(tx, quota, inode, usage_of(record))


def leave(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """Make an inode no member of any quota; what it counted is forgotten with the quota."""
    tx.delete(keys.quota_member(inode))
    tx.put(keys.attributes(inode), _without(record).encode())


def account(tx: Transaction, inode: int, record: InodeRecord) -> None:
    """A member's record is about to be replaced by `record`: count the difference."""
    data = tx.get(keys.attributes(inode))
    before = Usage(0, 0) if data is None else usage_of(InodeRecord.decode(data))
    after = usage_of(record)
    if before != after and (quota := quota_of(tx, inode, record)) is not None:
        _add(tx, quota, inode, Usage(after.bytes - before.bytes, after.inodes - before.inodes))


def _add(tx: Transaction, quota: int, inode: int, change: Usage) -> None:
    key = keys.quota_usage(quota, inode // IDS_PER_LEASE % QUOTA_LANES)
    data = tx.get(key)
    row = QuotaUsageRecord(0, 0) if data is None else QuotaUsageRecord.decode(data)
    row = QuotaUsageRecord(row.used_bytes + change.bytes, row.used_inodes + change.inodes)
    tx.put(key, row.encode())


# --- quotas -----------------------------------------------------------------------------------


def write_quota(tx: Transaction, quota: int, record: QuotaRecord) -> None:
    """Set a quota's limits."""
    tx.put(keys.quota(quota), record.encode())


def delete_quota(tx: Transaction, quota: int) -> None:
    """Forget a quota and what is used of it; its members' records name nothing any more."""
    prefix = keys.group(keys.QUOTA, quota)
    tx.delete_range(prefix, keys.prefix_end(prefix))


def check_border(
    tx: ReadTransaction, inode: int, record: InodeRecord, parent: int, directory: InodeRecord
) -> None:
    """Raise CrossQuota where an inode must not get a name in `parent`.

    Only a directory with a quota of its own may move, to where there is none.
    """
    if not (record.flags | directory.flags) & InodeFlag.QUOTA:
        return
    own, there = quota_of(tx, inode, record), quota_of(tx, parent, directory)
    if own == there:
        return
    limits = None if own is None else read_quota(tx, own)
    if there is None and limits is not None and limits.directory == inode:
        return
    raise CrossQuota("the name would be in another quota than the file: copy it instead")
