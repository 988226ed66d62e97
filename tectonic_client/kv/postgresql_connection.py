"""Connections to PostgreSQL: the URL, the settings, the table, and psycopg's errors.

SQL and settings stay inside what CockroachDB and YugabyteDB also understand. (In YugabyteDB let
the database be created with range sharding, else scans visit every tablet.)

Messages never contain a password: they are built from the display URL, and libpq's own messages
name host, user and database only. What libpq says about an URL that it cannot parse may quote any
part of it, so that is not shown.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_plus

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tectonic_client.errors import (
    BadURL,
    CorruptRecord,
    MetadataRefused,
    MetadataUnavailable,
    NoSpace,
    ReadOnly,
    TectonicError,
    TransactionConflict,
    VolumeNotFound,
)
from tectonic_client.kv.urls import display_url
from tectonic_client.kv.watchdog import SocketWatchdog
from tectonic_client.limits import MAX_SCHEMA_NAME_BYTES

DEFAULT_SCHEMA: Final = "tectonicfs"

_SQLSTATES: Final[dict[str, type[TectonicError]]] = {
    "": MetadataUnavailable,  # the client's own: no connection, or it was lost
    "08": MetadataUnavailable,  # connection exception
    "25006": ReadOnly,  # read-only transaction: a standby
    "25P03": MetadataUnavailable,  # idle in a transaction for too long
    "28": BadURL,  # invalid authorization
    "3D": VolumeNotFound,  # no such database
    "3F": VolumeNotFound,  # no such schema
    "40": TransactionConflict,  # serialization failure, deadlock
    "42501": ReadOnly,  # insufficient privilege
    "42P01": VolumeNotFound,  # no such table
    "53": MetadataUnavailable,  # out of memory, connections, locks
    "53100": NoSpace,  # disk full
    "55": MetadataUnavailable,  # not in the state for it, for example a lock not available
    "57": MetadataUnavailable,  # shutting down, starting, cancelled, timed out
    "58": MetadataUnavailable,  # I/O error of the server
    "XX001": CorruptRecord,  # data corrupted
    "XX002": CorruptRecord,  # index corrupted
}
"""By SQLSTATE or its class (PostgreSQL manual, appendix A); the rest is MetadataRefused: it would
be the same the next time."""

_CONNECT_MESSAGES: Final[tuple[tuple[str, type[TectonicError]], ...]] = (
    (r'database ".*" does not exist', VolumeNotFound),
    (r"authentication failed", BadURL),
    (r'role ".*" does not exist', BadURL),
    (r"no password supplied", BadURL),
    (r"no pg_hba\.conf entry", BadURL),
    (r"could not translate host name", BadURL),
)
"""libpq gives no SQLSTATE for a connection that failed; in other languages than English these
fall back to MetadataUnavailable, with the server's message."""

_ADVICE: Final[tuple[tuple[str, str], ...]] = (
    (r'Connection refused|/\.s\.PGSQL\.\d+" failed: No such file', "is the server running there?"),
    (
        r"no password supplied",
        "put it into ~/.pgpass (HOST:PORT:DATABASE:USER:PASSWORD; chmod 600 ~/.pgpass)",
    ),
    (r"password authentication failed", "it is taken from the URL, PGPASSWORD or ~/.pgpass"),
    (r'database ".*" does not exist', "first run createdb, or ask whoever runs the server"),
    (
        r"permission denied for database",
        "its owner gives it: GRANT CONNECT, CREATE ON DATABASE ... TO ... (CREATE for format only)",
    ),
    (
        r"permission denied for (schema|table)",
        "be the user who formatted the volume, or let that one grant what docs/mounting.md says",
    ),
)
"""What to do about what the server or libpq says. In other languages than English: nothing."""

_LIBPQ_NOISE: Final = r"^connection (failed|is bad): |\s*Is the server running .*\?$"


@dataclass(frozen=True, slots=True)
class Database:
    """Where the table is. `name` is the URL for messages, without the password."""

    name: str
    conninfo: str
    schema: str
    deadline_s: float

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier(self.schema, "kv")

    @property
    def sync_table(self) -> sql.Identifier:
        return sql.Identifier(self.schema, "sync")

    def error(self, error: psycopg.Error) -> TectonicError:
        """The error of this package for one of psycopg."""
        state = error.sqlstate or ""
        own = _SQLSTATES.get(state) or _SQLSTATES.get(state[:2]) or MetadataRefused
        return own(f"{self.name}: {_in_one_line(error)}")


@dataclass(frozen=True, slots=True)
class Link:
    """A connection and a second descriptor of its socket, by which another thread can end it."""

    connection: psycopg.Connection[tuple[Any, ...]]
    wire: socket.socket

    def close(self) -> None:
        self.connection.close()
        self.wire.close()


def parse_url(url: str, deadline_s: float) -> Database:
    """Take `schema=` out of the URL's query; the rest is libpq's. Raises BadURL."""
    name = display_url(url)
    base, _, query = url.partition("?")
    settings = [setting for setting in query.split("&") if setting]
    schemas = [
        unquote_plus(setting.partition("=")[2])
        for setting in settings
        if setting.startswith("schema=")
    ]
    others = [setting for setting in settings if not setting.startswith("schema=")]
    schema = schemas[-1] if schemas else DEFAULT_SCHEMA
    if not 0 < len(schema.encode()) <= MAX_SCHEMA_NAME_BYTES or "\0" in schema:
        raise BadURL(f"{name}: schema={schema!r}: give 1 to {MAX_SCHEMA_NAME_BYTES} bytes")
    conninfo = base + ("?" + "&".join(others) if others else "")
    try:
        conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise BadURL(
            f"{name}: not a PostgreSQL URL; the form is"
            " postgresql://USER@HOST:PORT/DATABASE?schema=NAME (percent-encode special characters)"
        ) from None
    return Database(name, conninfo, schema, deadline_s)


def connect(database: Database, watchdog: SocketWatchdog, wait_s: float | None = None) -> Link:
    """A connection with this package's settings, within `wait_s`, by default the deadline.

    Raises BadURL (authentication, host), VolumeNotFound (no such database), MetadataUnavailable.
    """
    wait_s = database.deadline_s if wait_s is None else wait_s
    seconds = max(2, round(wait_s))  # libpq takes 1 for 2
    user_settings = conninfo_to_dict(database.conninfo)
    defaults: dict[str, Any] = {
        "connect_timeout": seconds,
        "tcp_user_timeout": max(2000, round(database.deadline_s * 1000)),
        "fallback_application_name": "tectonicfs",
    }
    chosen = {key: value for key, value in defaults.items() if key not in user_settings}
    try:
        # psycopg loses track of prepared statements when a pipeline aborts, which a conflict does.
        connection = psycopg.connect(
            database.conninfo, autocommit=True, prepare_threshold=None, **chosen
        )
        link = Link(connection, socket.socket(fileno=os.dup(connection.fileno())))
        try:
            # The server's own timeouts are not set yet.
            with watchdog.limit(link.wire, wait_s):
                _configure(connection, database.deadline_s)
        except BaseException:
            link.close()
            raise
    except psycopg.Error as error:
        raise _connect_error(database, error) from error
    return link


def _configure(connection: psycopg.Connection[Any], deadline_s: float) -> None:
    milliseconds = round(deadline_s * 1000)
    settings = [
        f"SET statement_timeout = {milliseconds}",
        # A client that is stopped in a transaction must not keep others from theirs.
        f"SET idle_in_transaction_session_timeout = {milliseconds}",
    ]
    if connection.info.parameter_status("crdb_version") is None:
        # On a small table the planner prefers to read it all, and SERIALIZABLE then takes every
        # concurrent write for a conflict.
        settings.append("SET enable_seqscan = off")
    connection.execute("; ".join(settings).encode())


def _connect_error(database: Database, error: psycopg.Error) -> TectonicError:
    if error.sqlstate is not None:
        return database.error(error)
    message = _in_one_line(error)
    for pattern, own in _CONNECT_MESSAGES:
        if re.search(pattern, message):
            return own(f"{database.name}: {message}")
    return MetadataUnavailable(f"{database.name}: {message}")


def _in_one_line(error: psycopg.Error) -> str:
    """What is the matter, without the statement that met it, and what to do where that is known."""
    whole = " ".join((error.diag.message_primary or str(error)).split())
    message = re.sub(_LIBPQ_NOISE, "", whole) or type(error).__name__
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, message)), None)
    return message if advice is None else f"{message}: {advice}"


# --- the table --------------------------------------------------------------------------------

_CREATE: Final = (
    "CREATE SCHEMA IF NOT EXISTS {schema}",
    "CREATE TABLE IF NOT EXISTS {table} (key bytea PRIMARY KEY, value bytea NOT NULL)",
    "CREATE TABLE IF NOT EXISTS {sync} (token bytea PRIMARY KEY)",
)

_CREATED_MEANWHILE: Final = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DuplicateSchema,
    psycopg.errors.DuplicateTable,
    psycopg.errors.DuplicateObject,
)
"""What IF NOT EXISTS answers where somebody creates the same at this moment."""

_CREATE_ATTEMPTS: Final = 1 + len(_CREATE)
"""Each of the statements may lose once."""


def find_tables(link: Link, database: Database, *, create: bool) -> None:
    """Check that the tables are there, or make them; safe against others who do the same.

    Raises VolumeNotFound, and what the server answers.
    """
    if not _tables_missing(link, database):
        return
    if not create:
        raise VolumeNotFound(f"no volume at {database.name} (schema {database.schema})")
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            _create(link, database)
            return
        except _CREATED_MEANWHILE as error:
            if attempt == _CREATE_ATTEMPTS - 1:
                raise database.error(error) from error
        except psycopg.Error as error:
            raise database.error(error) from error


def _tables_missing(link: Link, database: Database) -> bool:
    try:
        for table in (database.table, database.sync_table):
            link.connection.execute(sql.SQL("SELECT 1 FROM {} LIMIT 1").format(table))
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return True
    except psycopg.Error as error:
        raise database.error(error) from error
    return False


def _create(link: Link, database: Database) -> None:
    for statement in _CREATE:
        link.connection.execute(
            sql.SQL(statement).format(
                schema=sql.Identifier(database.schema),
                table=database.table,
                sync=database.sync_table,
            )
        )
