"""The port of the metadata engine: an ordered, transactional key-value map.

Keys and values are bytes; keys are ordered bytewise (unsigned). Work is passed in as a function
over a `Transaction`, because an engine may have to run it again:

* The function may run several times, on any thread, so it must not keep state between runs, wait
  for anything, or have effects beyond the transaction it was given.
* All runs but the last leave no trace. Transactions are serializable.
* An exception from the function rolls the transaction back and reaches the caller unchanged.
* A transaction sees its own writes.

Engines are safe to use from any number of threads of a process; the embedded one also from several
processes of one machine at once. An engine must not be used after a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class ReadTransaction(Protocol):
    """A consistent snapshot."""

    def get(self, key: bytes) -> bytes | None:
        """Value of `key`, or None."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of `keys`; one round trip where the engine is remote."""

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Pairs with start <= key < end in key order (descending if `reverse`), at most `limit`."""

    def now_ns(self) -> int:
        """The engine's clock, nanoseconds since the epoch.

        Leases, heartbeats and ages are compared on this clock and no other.
        """


class Transaction(ReadTransaction, Protocol):
    """A read-write transaction."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key`. Raises ValueError beyond MAX_KEY_BYTES or MAX_VALUE_BYTES."""

    def delete(self, key: bytes) -> None:
        """Remove `key` if it is there."""

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with start <= key < end."""


class Listener(Protocol):
    """Hears the calls to one topic, from any process, since it was made."""

    def fileno(self) -> int:
        """A descriptor that is readable from a call on until `drain`."""

    def drain(self) -> None:
        """Take note of the calls so far; never waits.

        Raises MetadataUnavailable where it hears nothing any more: close it and listen anew.
        """

    def close(self) -> None:
        """Release the descriptor; nobody may wait on it."""


class KV(Protocol):
    """A metadata engine."""

    reads_may_block: bool
    """True where a read can wait for a network or another process: keep it off the event loop."""

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        """Run `fn` on a snapshot and return its result.

        Raises MetadataUnavailable where the engine gives no answer by its deadline.
        """

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        """Run `fn` and commit; returns its result once committed.

        A committed transaction survives a crash of any client. With `durable` it, and every
        transaction that was acknowledged before it began, also survives power loss (and, where the
        engine is a server, the server's crash). Whoever acts outside the engine on what it read,
        for example deletes a chunk, runs a durable transaction first: what it read may otherwise
        be undone by a power loss that the act survives.

        Raises TransactionConflict (lost against others until the deadline), MetadataUnavailable
        (nothing happened), NoSpace (nothing happened), UnknownOutcome (the commit got no answer).
        """

    def listen(self, topic: str) -> Listener:
        """Hear calls to `topic` (a short word) from now on.

        Raises MetadataUnavailable, also where the engine has no such thing: then look now and then.
        """

    def call(self, topic: str) -> None:
        """Wake all who listen to `topic`; what was committed before is what they find.

        Calls are hints: several may be heard as one, some without need, and one may get lost when a
        process or a connection ends. Raises MetadataUnavailable.
        """

    def close(self) -> None:
        """Finish what is queued and release everything; later calls raise MetadataUnavailable."""
