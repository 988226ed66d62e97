"""Calls through PostgreSQL: LISTEN and NOTIFY (PostgreSQL manual, "Asynchronous Notification").

A listener has a connection of its own, which waits for nothing but notifications. The channel is
named after schema and topic, so that the volumes of one database do not wake each other. Databases
that only speak like PostgreSQL may refuse both statements; clients then look now and then.
"""

from __future__ import annotations

from hashlib import blake2b

import psycopg
from psycopg import sql

from tectonic_client.errors import MetadataUnavailable
from tectonic_client.kv.postgresql_connection import Database, Link, connect
from tectonic_client.kv.watchdog import SocketWatchdog


def channel_of(database: Database, topic: str) -> str:
    """The channel's name, within the limit for identifiers whatever the schema's length."""
    return f"tectonicfs_{blake2b(database.schema.encode(), digest_size=8).hexdigest()}_{topic}"


class PostgresListener:
    """See `kv.port.Listener`. Opening it waits for the server, within the database's deadline."""

    def __init__(self, database: Database, watchdog: SocketWatchdog, topic: str) -> None:
        self._database = database
        self._link: Link = connect(database, watchdog)
        listen = sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(database, topic)))
        try:
            with watchdog.limit(self._link.wire, database.deadline_s):
                self._link.connection.execute(listen)
        except psycopg.Error as error:
            self.close()
            raise MetadataUnavailable(str(database.error(error))) from error

    def fileno(self) -> int:
        return self._link.connection.fileno()

    def drain(self) -> None:
        wire = self._link.connection.pgconn
        try:
            wire.consume_input()
            while wire.notifies() is not None:
                pass
        except psycopg.Error as error:
            raise MetadataUnavailable(str(self._database.error(error))) from error

    def close(self) -> None:
        self._link.close()
