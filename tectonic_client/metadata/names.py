"""The name layer: (directory, name) -> inode and type. Functions over a transaction."""

from __future__ import annotations

from typing import NamedTuple

from tectonic_client.errors import CorruptRecord, InvalidArgument, NameTooLong
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_NAME_BYTES
from tectonic_client.metadata import keys
from tectonic_client.records import DirentRecord


class Entry(NamedTuple):
    """One entry of a listing; the listing goes on behind `cookie`."""

    cookie: int
    name: bytes
    record: DirentRecord


def check_name(name: bytes) -> None:
    """Raise InvalidArgument or NameTooLong for what cannot be an entry's name."""
    if len(name) > MAX_NAME_BYTES:
        raise NameTooLong(f"name of {len(name)} bytes, at most {MAX_NAME_BYTES} are allowed")
    if not name or name in (b".", b"..") or b"/" in name or b"\x00" in name:
        raise InvalidArgument(f"{name!r} cannot be a name")


def read_entry(tx: ReadTransaction, directory: int, name: bytes) -> DirentRecord | None:
    """The entry, or None."""
    data = tx.get(keys.entry(directory, name))
    return None if data is None else DirentRecord.decode(data)


def write_entry(tx: Transaction, directory: int, name: bytes, record: DirentRecord) -> None:
    """Set the entry."""
    tx.put(keys.entry(directory, name), record.encode())


def delete_entry(tx: Transaction, directory: int, name: bytes) -> None:
    """Remove the entry."""
    tx.delete(keys.entry(directory, name))


def list_entries(tx: ReadTransaction, directory: int, cookie: int, limit: int) -> list[Entry]:
    """At most about `limit` entries behind `cookie` (0: from the start).

    A page never ends between two names of the same hash: the next page begins behind the hash.
    """
    start, end = keys.entries_after(directory, cookie)
    rows = tx.scan(start, end, limit=limit)
    if len(rows) == limit:
        last = keys.parse_entry(rows[-1][0])[0]
        rows += tx.scan(rows[-1][0] + b"\x00", keys.entries_after(directory, last)[0])
    return [_decode(key, value) for key, value in rows]


def _decode(key: bytes, value: bytes) -> Entry:
    cookie, name = keys.parse_entry(key)
    try:
        check_name(name)
    except (InvalidArgument, NameTooLong) as error:
        raise CorruptRecord(
            f"a directory has an entry that nobody can have made: {error}"
        ) from error
    return Entry(cookie, name, DirentRecord.decode(value))


def is_empty(tx: ReadTransaction, directory: int) -> bool:
    """Whether the directory has no entry."""
    return not tx.scan(*keys.entries_after(directory, 0), limit=1)
