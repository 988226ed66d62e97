"""The change feed: who changed what below directories with `coherence=push`, and who has seen it.

A transaction that changes an inode or an entry below such a directory (InodeFlag.PUSH) writes an
event of it, so none is lost and none invented. Events lie in CHANGE_STRIPES stripes, chosen by the
directory: within a stripe they are numbered in the order of their commits, so order holds per
directory, and writers of different directories rarely meet on one stripe's head. An event about a
file lies in the stripe of the directory that the file was last linked into.

A *follower* is a session that keeps caches and drops from them what events name. Its record says
up to which positions it has done so. Invariants:

* Everything a follower cached before its record was made is dropped at that time.
* A follower without a record must not trust its caches: writers do not wait for it.
* What was trimmed away is older than any writer waits; whoever needs it drops everything.

Functions over a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import CHANGE_STRIPES, CHANGES_KEPT_S, SCAN_PAGE_ROWS
from tectonic_client.metadata import keys
from tectonic_client.metadata.changerecords import ChangeHeadRecord, ChangeRecord, FollowerRecord
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import InodeFlag, InodeRecord
from tectonic_client.types import Change, ChangeKind

_NS_PER_S = 1_000_000_000
_NEVER = ChangeHeadRecord(0, 0)

Positions = Mapping[int, int]
"""Of events, by stripe."""


class Changes:
    """What one run of a transaction has changed below push directories; made anew for each run."""

    def __init__(self) -> None:
        self._found: dict[int, list[Change]] = {}

    def entry(self, directory: int, record: InodeRecord, name: bytes) -> None:
        """A name of `directory`, whose record this is, was made, removed or given away."""
        if record.flags & InodeFlag.PUSH:
            self._add(directory, Change(ChangeKind.ENTRY, directory, name))

    def inode(self, inode: int, record: InodeRecord) -> None:
        """The attributes or the data of `inode` changed; its record is now (or was) this."""
        if record.flags & InodeFlag.PUSH:
            self._add(record.parent, Change(ChangeKind.INODE, inode, b""))

    def _add(self, directory: int, change: Change) -> None:
        self._found.setdefault(stripe_of(directory), []).append(change)

    def write(self, tx: Transaction, session_id: int) -> Positions:
        """Write the events, at the end of the transaction; returns where they are."""
        positions = {}
        for stripe, changes in self._found.items():
            head = _read_head(tx, stripe)
            position = positions[stripe] = head.last + 1
            event = ChangeRecord(tx.now_ns(), session_id, tuple(changes))
            tx.put(keys.change(stripe, position), event.encode())
            tx.put(keys.change_head(stripe), replace(head, last=position).encode())
        return positions


def stripe_of(directory: int) -> int:
    """The stripe of a directory's events."""
    # Ids of one lease differ in their low bits only where directories were made one by one.
    return (directory ^ directory >> 12) % CHANGE_STRIPES


def _read_head(tx: ReadTransaction, stripe: int) -> ChangeHeadRecord:
    data = tx.get(keys.change_head(stripe))
    return _NEVER if data is None else ChangeHeadRecord.decode(data)


# --- following --------------------------------------------------------------------------------


def follow(tx: Transaction, session_id: int) -> tuple[int, ...]:
    """Become a follower from now on; returns the positions. Raises SessionLost."""
    require_session(tx, session_id)
    rows = tx.get_many([keys.change_head(stripe) for stripe in range(CHANGE_STRIPES)])
    positions = tuple(0 if row is None else ChangeHeadRecord.decode(row).last for row in rows)
    tx.put(keys.follower(session_id), FollowerRecord(positions).encode())
    return positions


def unfollow(tx: Transaction, session_id: int) -> None:
    """Nobody waits for the session any more."""
    tx.delete(keys.follower(session_id))


class News(NamedTuple):
    """What happened since some positions: the events of others, and how far they go."""

    events: list[ChangeRecord]
    positions: tuple[int, ...]
    complete: bool
    """Whether that is all there is."""


def read_news(tx: ReadTransaction, session_id: int, positions: Sequence[int]) -> News | None:
    """Events behind `positions`, at most a page of each stripe.

    None where the follower lost touch: its record is gone, or the events it needs are, or the
    engine has forgotten the last ones.
    """
    heads = [keys.change_head(stripe) for stripe in range(CHANGE_STRIPES)]
    record, *rows = tx.get_many([keys.follower(session_id), *heads])
    if record is None:
        return None
    events: list[ChangeRecord] = []
    reached = list(positions)
    complete = True
    for stripe, row in enumerate(rows):
        head = _NEVER if row is None else ChangeHeadRecord.decode(row)
        if not head.trimmed <= positions[stripe] <= head.last:
            return None
        if head.last > positions[stripe]:
            reached[stripe] = min(head.last, positions[stripe] + SCAN_PAGE_ROWS)
            complete = complete and reached[stripe] == head.last
            events += _read_events(tx, stripe, positions[stripe], reached[stripe])
    foreign = [event for event in events if event.session != session_id]
    return News(foreign, tuple(reached), complete)


def _read_events(tx: ReadTransaction, stripe: int, after: int, last: int) -> list[ChangeRecord]:
    rows = tx.scan(keys.change(stripe, after + 1), keys.change(stripe, last + 1))
    return [ChangeRecord.decode(row) for _, row in rows]


def acknowledge(tx: Transaction, session_id: int, positions: Sequence[int]) -> bool:
    """The follower has dropped what the events up to `positions` name; False if it is none now."""
    if tx.get(keys.follower(session_id)) is None:
        return False
    tx.put(keys.follower(session_id), FollowerRecord(tuple(positions)).encode())
    return True


# --- waiting for followers --------------------------------------------------------------------


def read_followers(tx: ReadTransaction) -> dict[int, FollowerRecord]:
    """All followers by session."""
    return {
        keys.parse_id(key): FollowerRecord.decode(value)
        for page in scan_layer(tx, keys.FOLLOWER)
        for key, value in page
    }


def is_behind(follower: FollowerRecord, positions: Positions) -> bool:
    """Whether the follower may still serve something older than these events."""
    return any(follower.acknowledged[stripe] < last for stripe, last in positions.items())


def cast_out(tx: Transaction, session_id: int, positions: Positions) -> bool:
    """Wait no longer for a follower that is behind; False if it is not."""
    row = tx.get(keys.follower(session_id))
    if row is None or not is_behind(FollowerRecord.decode(row), positions):
        return False
    tx.delete(keys.follower(session_id))
    return True


# --- trimming ---------------------------------------------------------------------------------


def trim(tx: Transaction, stripe: int) -> bool:
    """Remove a page of a stripe's events older than CHANGES_KEPT_S; True if there may be more."""
    rows = tx.scan(*keys.changes(stripe), limit=SCAN_PAGE_ROWS)
    limit = tx.now_ns() - CHANGES_KEPT_S * _NS_PER_S
    old = 0
    while old < len(rows) and ChangeRecord.decode(rows[old][1]).changed_ns < limit:
        old += 1
    if not old:
        return False
    last = keys.parse_change(rows[old - 1][0])
    tx.delete_range(keys.change(stripe, 0), keys.change(stripe, last + 1))
    tx.put(keys.change_head(stripe), replace(_read_head(tx, stripe), trimmed=last).encode())
    return old == SCAN_PAGE_ROWS


def stripes_to_trim(tx: ReadTransaction) -> list[int]:
    """Stripes whose oldest event is old enough to go."""
    limit = tx.now_ns() - CHANGES_KEPT_S * _NS_PER_S
    oldest = {s: tx.scan(*keys.changes(s), limit=1) for s in range(CHANGE_STRIPES)}
    return [
        stripe
        for stripe, rows in oldest.items()
        if rows and ChangeRecord.decode(rows[0][1]).changed_ns < limit
    ]
