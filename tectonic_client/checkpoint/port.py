"""What the checkpoint protocol needs of the volume, as calls inside its transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tectonic_client.kv.port import ReadTransaction, Transaction


class SessionView(NamedTuple):
    """A session that has a record: whether it lives, and its last heartbeat."""

    alive: bool
    heartbeat_ns: int


class NewFile(Protocol):
    """A file whose chunks are durable and whose metadata is not written yet."""

    @property
    def inode(self) -> int:
        """The inode id that it will have."""

    @property
    def nbytes(self) -> int:
        """Its length."""


class Namespace(Protocol):
    """The directory of a run in the volume's namespace, on behalf of one session.

    Functions may run several times before their transaction commits (see `kv.port`).
    """

    def step_directory(self, tx: ReadTransaction, step: int) -> int | None:
        """Inode behind the step's name, whatever it is; None if the name is free."""

    def create_hidden(self, tx: Transaction, inode: int) -> None:
        """Make an empty directory without a name, not reclaimed until it is discarded."""

    def add_file(self, tx: Transaction, directory: int, name: str, file: NewFile) -> None:
        """Write inode, extents and block records of a file, and its entry in a hidden directory.

        Touches keys of the file and of the entry only: every rank does it at the same time.
        """

    def publish(self, tx: Transaction, inode: int, step: int) -> None:
        """Link a hidden directory under the step's name. Raises Exists, NotFound."""

    def discard(self, tx: Transaction, inode: int) -> None:
        """Leave a hidden directory and all in it to be reclaimed. Constant work."""

    def require_session(self, tx: ReadTransaction) -> None:
        """The fence: raises SessionLost when this client's session was declared dead."""

    def look_up(self, tx: ReadTransaction, session_ids: Sequence[int]) -> list[SessionView | None]:
        """The sessions in this order, None for those that ended; one round trip."""
