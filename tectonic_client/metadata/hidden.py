"""Hidden inodes: whole files and trees that get their name when they are complete.

A hidden inode has links and no name, and an orphan record of the session that builds it: while that
lives nobody touches it, and when it dies any client reclaims the inode with all that is in it.
Reclaiming begins by taking its links away; whoever adds to it or publishes it looks that they are
still there. So it appears whole or never. Functions over a transaction.
"""

from __future__ import annotations

from dataclasses import replace

from tectonic_client.errors import Exists, NotFound
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.metadata import keys
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.inodes import (
    count_subdirectory,
    read_directory,
    read_inode,
    touch_directory,
    write_inode,
)
from tectonic_client.metadata.names import read_entry, write_entry
from tectonic_client.metadata.orphans import write_orphan
from tectonic_client.records import DirentRecord, InodeRecord


def create(tx: Transaction, inode: int, record: InodeRecord, session_id: int) -> None:
    """Make a hidden inode that `session_id` is going to publish or discard."""
    write_inode(tx, inode, record)
    write_orphan(tx, inode, session_id)


def require(tx: ReadTransaction, inode: int) -> InodeRecord:
    """Its record. Raises NotFound where it was discarded, because its session was declared dead."""
    record = read_inode(tx, inode)
    if not record.nlink or tx.get(keys.orphan(inode)) is None:
        raise NotFound(f"inode {inode} was cleaned up: its client was taken for dead")
    return record


def publish(
    tx: Transaction, inode: int, record: InodeRecord, parent: int, name: bytes, session_id: int,
    now_ns: int,
) -> Positions:  # fmt: skip
    """Give a hidden inode its name, and `record` as its attributes; returns where the events are.

    Raises Exists, and NotFound where the inode or the directory was removed.
    """
    require(tx, inode)
    directory = read_directory(tx, parent)
    if not directory.nlink:
        raise NotFound(f"directory {parent} was removed")
    if read_entry(tx, parent, name) is not None:
        raise Exists(f"{name!r} exists in directory {parent}")
    write_inode(tx, inode, replace(record, parent=parent))
    write_entry(tx, parent, name, DirentRecord(inode, record.file_type))
    tx.delete(keys.orphan(inode))
    if record.is_directory:
        count_subdirectory(tx, parent, session_id, +1)
    touch_directory(tx, parent, session_id, now_ns)
    changes = Changes()
    changes.entry(parent, directory, name)
    return changes.write(tx, session_id)


def discard(tx: Transaction, inode: int) -> None:
    """Leave a hidden inode and all in it to be reclaimed by anybody; no-op where it is gone."""
    if tx.get(keys.orphan(inode)) is None:
        return
    write_inode(tx, inode, replace(read_inode(tx, inode), nlink=0))
    write_orphan(tx, inode, 0)
