"""Connections to the embedded engine's database file: creating, opening, reading, errors.

Owns the schema, the pragmas, and the table that turns apsw's exceptions into this package's. One
table: kv(key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID; SQLite compares blobs bytewise
(memcmp), which is the order that the port asks for.

The database is in WAL mode. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import apsw

from tectonic_client.errors import (
    BadURL,
    CorruptRecord,
    FormatTooNew,
    MetadataUnavailable,
    NoSpace,
    ReadOnly,
    TectonicError,
    VolumeNotFound,
)
from tectonic_client.kv.pairs import check_pair
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import KiB
from tectonic_client.sharing import open_beside

T = TypeVar("T")

_APPLICATION_ID: Final = 0x74637466
"""In the database header (file(1) shows it): tells a volume from anybody else's database."""

_SCHEMA_VERSION: Final = 1

_SAFE_VERSION: Final = (3, 51, 3)
"""SQLite 3.7.0 to 3.51.2 may corrupt a WAL database that several processes write."""

_ERRORS: Final[tuple[tuple[type[Exception], type[TectonicError]], ...]] = (
    (apsw.FullError, NoSpace),
    (apsw.ReadOnlyError, ReadOnly),
    (apsw.NotADBError, CorruptRecord),
    (apsw.CorruptError, CorruptRecord),
    (FileNotFoundError, VolumeNotFound),
)

_ERRNOS: Final[dict[int, type[TectonicError]]] = {
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EROFS: ReadOnly,
    errno.EACCES: ReadOnly,
    errno.EPERM: ReadOnly,
}


def translate(
    error: BaseException, path: str, connection: apsw.Connection | None = None
) -> TectonicError:
    """The error of this package for one of apsw or the operating system.

    `connection` is where an apsw.IOError came from; it knows the errno.
    """
    for foreign, own in _ERRORS:
        if isinstance(error, foreign):
            return own(f"{path}: {error}")
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, apsw.IOError) and connection is not None:
        number = connection.system_errno
    own = _ERRNOS.get(number or 0, MetadataUnavailable)
    return own(f"{path}: {os.strerror(number) if number else error}")


# --- opening ----------------------------------------------------------------------------------


def create_database(path: str) -> None:
    """Create an empty database at `path` unless there is a file already; durable on return.

    It is built under another name and linked into place, so neither a crash nor a concurrent
    creator leaves a half-made database; a crash may leave `path.*.new` behind. Raises NoSpace,
    ReadOnly, VolumeNotFound (no directory).
    """
    if os.path.exists(path):
        return
    unfinished = f"{path}.{secrets.token_hex(4)}.new"
    try:
        # SQLite gives the files beside it the database's own owner, group and mode.
        os.close(open_beside(unfinished, os.O_RDWR, 0o644))
        _build(unfinished)
        _link(unfinished, path)
    except (apsw.Error, OSError) as error:
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise VolumeNotFound(
                f"{path}: there is no directory {parent} to create it in:"
                f" first run mkdir -p {parent}"
            ) from error
        raise translate(error, path) from error
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)


def _build(path: str) -> None:
    connection = apsw.Connection(path)
    try:
        connection.pragma("journal_mode", "wal")
        connection.execute(
            "BEGIN;"
            "CREATE TABLE kv (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"
            f"PRAGMA application_id = {_APPLICATION_ID};"
            f"PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT"
        )
    finally:
        connection.close()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return  # somebody else created it meanwhile
    sync_directory_of(target)


def sync_directory_of(path: str) -> None:
    """Make the names beside `path` durable. Raises OSError."""
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def connect(
    path: str, *, cache_bytes: int, wait_s: float, read_only: bool = False
) -> apsw.Connection:
    """Open the volume's database; `wait_s` bounds waits for locks of other processes.

    Raises VolumeNotFound (no file), BadURL (not a volume's database), FormatTooNew,
    CorruptRecord, MetadataUnavailable.
    """
    _check_library()
    if not os.path.exists(path):
        raise VolumeNotFound(f"no volume at {path}")
    if os.path.isdir(path):
        raise BadURL(f"{path} is a directory; the metadata of a volume is a file")
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    try:
        connection = apsw.Connection(path, flags=flags)
        try:
            _prepare(connection, path, cache_bytes, wait_s)
        except BaseException:
            connection.close()
            raise
    except apsw.Error as error:
        raise translate(error, path) from error
    return connection


def _check_library() -> None:
    version = apsw.sqlite_lib_version()
    if tuple(map(int, version.split("."))) < _SAFE_VERSION:
        raise MetadataUnavailable(
            f"SQLite {version} may corrupt a database that several processes"
            " write; install apsw 3.51.3 or newer"
        )


def _prepare(connection: apsw.Connection, path: str, cache_bytes: int, wait_s: float) -> None:
    connection.set_busy_timeout(round(wait_s * 1000))
    if connection.pragma("application_id") != _APPLICATION_ID:
        raise BadURL(f"{path} is not the metadata of a tectonicfs volume")
    version = connection.pragma("user_version")
    if version > _SCHEMA_VERSION:
        raise FormatTooNew(
            f"{path} has schema {version}, this release knows {_SCHEMA_VERSION}: upgrade tectonicfs"
        )
    # In WAL mode NORMAL syncs around checkpoints only; the writer syncs commits itself.
    connection.pragma("synchronous", "NORMAL")
    connection.pragma("mmap_size", 0)
    connection.pragma("cache_size", -(cache_bytes // KiB))


# --- transactions -----------------------------------------------------------------------------

_GET = "SELECT value FROM kv WHERE key = ?"
_SCAN = "SELECT key, value FROM kv WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_SCAN_BACK = "SELECT key, value FROM kv WHERE key >= ? AND key < ? ORDER BY key DESC LIMIT ?"
_PUT = "INSERT OR REPLACE INTO kv VALUES (?, ?)"
_DELETE = "DELETE FROM kv WHERE key = ?"
_DELETE_RANGE = "DELETE FROM kv WHERE key >= ? AND key < ?"


class SqliteReadTransaction:
    """Reads through a cursor of a connection that is inside a transaction.

    Raises apsw.Error; whoever runs the function translates it.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._open_cursor: apsw.Cursor | None = connection.cursor()

    @property
    def _cursor(self) -> apsw.Cursor:
        # Outside its transaction a cursor would read other snapshots, or write without one.
        if self._open_cursor is None:
            raise RuntimeError("transaction used outside its function")
        return self._open_cursor

    def end(self) -> None:
        self._open_cursor = None

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._cursor.execute(_GET, (key,)).get
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        bounds = (start, end, -1 if limit is None else limit)
        cursor = self._cursor.execute(_SCAN_BACK if reverse else _SCAN, bounds)
        return cast(list[tuple[bytes, bytes]], cursor.fetchall())

    def now_ns(self) -> int:
        return time.time_ns()


class SqliteTransaction(SqliteReadTransaction):
    """Reads and writes, likewise."""

    def put(self, key: bytes, value: bytes) -> None:
        check_pair(key, value)
        self._cursor.execute(_PUT, (key, value))

    def delete(self, key: bytes) -> None:
        self._cursor.execute(_DELETE, (key,))

    def delete_range(self, start: bytes, end: bytes) -> None:
        self._cursor.execute(_DELETE_RANGE, (start, end))


def read_snapshot(connection: apsw.Connection, path: str, fn: Callable[[ReadTransaction], T]) -> T:
    """Run `fn` in a deferred transaction: its first query fixes the snapshot.

    Raises CorruptRecord, MetadataUnavailable, and what `fn` raises.
    """
    transaction = SqliteReadTransaction(connection)
    try:
        connection.execute("BEGIN")
        try:
            return fn(transaction)
        finally:
            transaction.end()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    except apsw.Error as error:
        raise translate(error, path, connection) from error
