"""The directory of a run in the volume, as the protocol needs it (`port.Namespace`).

An attempt's directory is a hidden one (`metadata.hidden`) of its coordinator's session.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tectonic_client.checkpoint.names import step_name
from tectonic_client.checkpoint.port import NewFile, SessionView
from tectonic_client.checkpoint.transfer import WrittenFile
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.metadata import files, hidden, quotas
from tectonic_client.metadata.changes import Positions
from tectonic_client.metadata.inodes import read_directory, write_inode
from tectonic_client.metadata.names import read_entry, write_entry
from tectonic_client.metadata.sessions import read_sessions, require_session, shows_life
from tectonic_client.records import DirentRecord, FileType, InodeRecord


@dataclass(frozen=True, slots=True)
class PendingFile:
    """A file that is durable in the stores and has no metadata yet."""

    inode: int
    written: WrittenFile

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.written.size_bytes


class RunDirectory:
    """See the module's text; `inode` is the run's directory."""

    def __init__(self, inode: int, session_id: int) -> None:
        self.inode = inode
        self._session_id = session_id
        self._positions: Positions = {}

    def step_directory(self, tx: ReadTransaction, step: int) -> int | None:
        """Inode behind the step's name; None if the name is free."""
        entry = read_entry(tx, self.inode, step_name(step).encode())
        return None if entry is None else entry.inode

    def create_hidden(self, tx: Transaction, inode: int) -> None:
        """Make an empty directory without a name."""
        record = self._new_record(stat.S_IFDIR | 0o755, 2, 0, self.inode)
        run = read_directory(tx, self.inode)
        record = quotas.inherit(tx, self.inode, run, inode, record)
        hidden.create(tx, inode, record, self._session_id)

    @staticmethod
    def _new_record(mode: int, nlink: int, size: int, parent: int) -> InodeRecord:
        now = time.time_ns()
        return InodeRecord(
            mode=mode, uid=os.getuid(), gid=os.getgid(), nlink=nlink, size=size, atime_ns=now,
            mtime_ns=now, ctime_ns=now, rdev=0, parent=parent,
        )  # fmt: skip

    def add_file(self, tx: Transaction, directory: int, name: str, file: NewFile) -> None:
        """Publish a file as an entry of a hidden directory."""
        assert isinstance(file, PendingFile)
        above = hidden.require(tx, directory)
        record = self._new_record(stat.S_IFREG | 0o644, 1, file.nbytes, directory)
        record = quotas.inherit(tx, directory, above, file.inode, record)
        write_inode(tx, file.inode, record)
        files.publish(tx, file.inode, file.written.blocks, file.written.extents)
        write_entry(tx, directory, name.encode(), DirentRecord(file.inode, FileType.REGULAR))

    def publish(self, tx: Transaction, inode: int, step: int) -> None:
        """Link a hidden directory under the step's name. Raises Exists, NotFound."""
        now = time.time_ns()
        record = replace(hidden.require(tx, inode), mtime_ns=now, ctime_ns=now)
        name = step_name(step).encode()
        self._positions = hidden.publish(tx, inode, record, self.inode, name, self._session_id, now)

    def take_positions(self) -> Positions:
        """Where the event of the last step that was published here is, for who waits until it was
        seen (coherence=push)."""
        positions, self._positions = self._positions, {}
        return positions

    def discard(self, tx: Transaction, inode: int) -> None:
        """Leave a hidden directory and all in it to be reclaimed by anybody."""
        hidden.discard(tx, inode)

    def require_session(self, tx: ReadTransaction) -> None:
        """The fence. Raises SessionLost."""
        require_session(tx, self._session_id)

    def look_up(self, tx: ReadTransaction, session_ids: Sequence[int]) -> list[SessionView | None]:
        """The sessions in this order, None for those that ended."""
        now = tx.now_ns()
        return [
            None if record is None else SessionView(shows_life(record, now), record.heartbeat_ns)
            for record in read_sessions(tx, session_ids)
        ]
