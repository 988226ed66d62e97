"""The PostgreSQL engine: the contract, bad URLs, lost connections, crashes, conflicts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
from psycopg import sql

from tectonic_client.errors import (
    BadURL,
    MetadataRefused,
    MetadataUnavailable,
    ReadOnly,
    TectonicError,
    TransactionConflict,
    TransientError,
    UnknownOutcome,
    UsedAfterFork,
    VolumeNotFound,
)
from tectonic_client.kv.open import open_kv
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.kv.postgresql import PostgresKV
from tectonic_client.kv.postgresql_connection import connect, parse_url
from tectonic_client.kv.watchdog import SocketWatchdog
from tests.contracts.kv import (
    ConcurrentKVContract,
    OpenEngine,
    closing,
    get,
    in_threads,
    increment,
    put_all,
    scan_all,
)
from tests.kv.proxy import Proxy
from tests.postgres import PASSWORD, PostgresServer

pytestmark = pytest.mark.postgres


class TestPostgres(ConcurrentKVContract):
    engine = PostgresKV
    model_examples = 15

    @pytest.fixture
    def open_engine(self, postgres_server: PostgresServer) -> Iterator[OpenEngine]:
        url = postgres_server.fresh_url()
        yield from closing(
            lambda read_only: PostgresKV(url, create=not read_only, read_only=read_only)
        )


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    """URL of a volume that exists, in a schema of its own."""
    url = postgres_server.fresh_url()
    PostgresKV(url, create=True).close()
    return url


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(url: str, postgres_server: PostgresServer, proxy: Proxy) -> Iterator[PostgresKV]:
    """A client whose connections the test can watch, cut and freeze."""
    kv = PostgresKV(
        url.replace(f":{postgres_server.port}", f":{proxy.port}"), create=False, deadline_s=2
    )
    yield kv
    kv.close()


@contextmanager
def closing_watchdog() -> Iterator[SocketWatchdog]:
    watchdog = SocketWatchdog()
    try:
        yield watchdog
    finally:
        watchdog.close()


# --- URLs -------------------------------------------------------------------------------------


def test_url_forms(postgres_server: PostgresServer) -> None:
    """postgresql://, postgres://, a unix socket; the schema tells volumes of a database apart."""
    first, second = postgres_server.fresh_url(), postgres_server.fresh_url()
    schema = second.partition("schema=")[2]
    kv = open_kv(first, create=True)
    put_all(kv, {b"a": b"1"})
    kv.close()
    kv = open_kv(first.replace("postgresql://", "postgres://"))
    assert get(kv, b"a") == b"1"
    kv.close()
    kv = open_kv(f"{postgres_server.socket_url()}&schema={schema}", create=True)
    assert get(kv, b"a") is None
    kv.close()


def test_schema_name_is_quoted(postgres_server: PostgresServer) -> None:
    """A schema name with special characters is a name, not SQL."""
    url = f"{postgres_server.url()}?schema=a%22%3B+drop--%C3%A9"
    kv = open_kv(url, create=True)
    put_all(kv, {b"a": b"1"})
    assert scan_all(kv) == [(b"a", b"1")]
    kv.close()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda server: server.url(password="wrong"), BadURL, r"authentication failed.*\.pgpass"),
        (lambda server: _no_password(server), BadURL, r"no password supplied: .*\.pgpass"),
        (lambda server: server.url(database="nowhere"), VolumeNotFound, '"nowhere".*createdb'),
        (
            lambda server: server.socket_url().replace("/postgres?", "/nowhere?"),
            VolumeNotFound,
            '"nowhere" does not exist: first run createdb',
        ),
        (
            lambda server: "postgresql://u@/db?host=/nowhere",
            MetadataUnavailable,
            "No such file or directory: is the server running there",
        ),
        (lambda server: server.fresh_url(), VolumeNotFound, "no volume at"),
        (lambda server: server.url() + "?schema=" + "x" * 64, BadURL, "63"),
        (lambda server: server.url() + "?schema=", BadURL, "schema"),
        (lambda server: server.url() + "?no_such_setting=1", BadURL, "not a PostgreSQL URL"),
        (lambda server: "postgresql://u:p%zz@host/db", BadURL, "not a PostgreSQL URL"),
        (
            lambda server: "postgresql://u:pw@127.0.0.1:1/db",
            MetadataUnavailable,
            r"failed: Connection refused: is the server running there\?$",
        ),
    ],
)
def test_bad_urls(
    postgres_server: PostgresServer,
    change: Callable[[PostgresServer], str],
    error: type[TectonicError],
    words: str,
) -> None:
    """What is wrong with a URL is one clear line of the right type, without the password."""
    url = change(postgres_server)
    with pytest.raises(error, match=words) as caught:
        open_kv(url)
    message = str(caught.value)
    assert "\n" not in message
    for secret in (PASSWORD, "p%40ss", "wrong", "p%zz", ":pw@"):
        assert secret not in message


def _no_password(server: PostgresServer) -> str:
    return server.url().replace(f":{server.url().split(':')[2].split('@')[0]}@", "@")


def test_rights_that_are_missing_are_named(postgres_server: PostgresServer) -> None:
    """Each right that a user lacks is one line that says how to get it; with what docs/mounting.md
    grants, the volume can be used, though not formatted."""
    owner = postgres_server.fresh_url()
    schema = owner.partition("schema=")[2]
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute("CREATE ROLE weak LOGIN PASSWORD 'weak'")
        weak = owner.replace(postgres_server.url(), _as_user(postgres_server, "weak", "weak"))
        with pytest.raises(ReadOnly, match=r"permission denied for database .*: .*GRANT CONNECT"):
            open_kv(weak, create=True)
        open_kv(owner, create=True).close()
        for grant in (
            f"GRANT USAGE ON SCHEMA {schema} TO weak",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO weak",
        ):
            with pytest.raises(ReadOnly, match=r"denied for (schema|table) \w+: .*mounting\.md"):
                open_kv(weak)
            admin.execute(grant.encode())
        kv = open_kv(weak)
        kv.transact(increment, durable=True)
        kv.close()


def _as_user(server: PostgresServer, user: str, password: str) -> str:
    return f"postgresql://{user}:{password}@{server.url().rpartition('@')[2]}"


def test_concurrent_creation(postgres_server: PostgresServer) -> None:
    """Many clients that create the same volume at once all get it."""
    url = postgres_server.fresh_url()

    def create() -> None:
        kv = PostgresKV(url, create=True)
        kv.transact(increment)
        kv.close()

    in_threads(*[create] * 6)
    kv = PostgresKV(url, create=False)
    assert get(kv, b"count") == b"6"
    kv.close()


# --- conflicts and round trips ----------------------------------------------------------------


def test_conflict_until_the_deadline(url: str) -> None:
    """A transaction that loses every time ends as TransactionConflict and leaves no trace."""
    victim = PostgresKV(url, create=False, deadline_s=1)
    other = PostgresKV(url, create=False)

    def lose(transaction: Transaction) -> None:
        transaction.get(b"count")
        other.transact(increment)
        transaction.put(b"count", b"lost")

    with pytest.raises(TransactionConflict):
        victim.transact(lose)
    count = get(other, b"count")
    assert count is not None
    assert int(count) > 1, "it was not retried"
    victim.close()
    other.close()


def test_what_would_fail_again_is_not_tried_again(
    url: str, postgres_server: PostgresServer
) -> None:
    """A request that the server refuses for its form fails at once, not at the deadline."""
    kv = PostgresKV(url, create=False, deadline_s=60)
    schema = url.partition("schema=")[2]
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {schema}.kv RENAME COLUMN value TO other".encode())
    attempts = 0

    def read(transaction: ReadTransaction) -> None:
        nonlocal attempts
        attempts += 1
        transaction.get(b"a")

    with pytest.raises(MetadataRefused, match='column "value" does not exist'):
        kv.read(read)
    assert attempts == 1
    kv.close()


def test_round_trips(through_proxy: PostgresKV, proxy: Proxy) -> None:
    """A batched read and writes cost two round trips, blind writes one, a read two."""
    put_all(through_proxy, {b"a": b"1"})

    def read_and_write(transaction: Transaction) -> None:
        transaction.get_many([b"a", b"b"])
        transaction.put(b"a", b"2")
        transaction.put(b"b", b"2")
        transaction.delete(b"c")

    def round_trips(call: Callable[[], object]) -> int:
        before = proxy.round_trips
        call()
        return proxy.round_trips - before

    assert round_trips(lambda: through_proxy.transact(read_and_write)) == 2
    assert round_trips(lambda: through_proxy.transact(read_and_write, durable=True)) == 2
    assert round_trips(lambda: put_all(through_proxy, {b"c": b"3"})) == 1
    assert round_trips(lambda: get(through_proxy, b"a")) == 2


# --- lost connections -------------------------------------------------------------------------


def test_connection_lost_in_the_body(through_proxy: PostgresKV, proxy: Proxy) -> None:
    """A connection lost before COMMIT: the transaction runs again, once in effect."""
    runs: list[int] = []

    def cut_once(transaction: Transaction) -> int:
        if not runs:
            proxy.cut()
        runs.append(1)
        return increment(transaction)

    assert through_proxy.transact(cut_once) == 1
    assert len(runs) == 2
    proxy.cut()
    assert get(through_proxy, b"count") == b"1"


@pytest.mark.parametrize("arrives", [False, True])
def test_connection_lost_while_committing(
    through_proxy: PostgresKV, proxy: Proxy, arrives: bool
) -> None:
    """A connection lost after COMMIT was sent is UnknownOutcome, whether it arrived or not."""
    put_all(through_proxy, {b"count": b"0"})
    proxy.cut_at(b"COMMIT", forward=arrives)
    with pytest.raises(UnknownOutcome) as caught:
        through_proxy.transact(increment, durable=True)
    assert PASSWORD not in str(caught.value)
    assert through_proxy.transact(increment) == (2 if arrives else 1)


@pytest.mark.parametrize("committing", [False, True])
def test_frozen_server(through_proxy: PostgresKV, proxy: Proxy, committing: bool) -> None:
    """A server that stops answering costs little more than one deadline; then all works again."""
    put_all(through_proxy, {b"count": b"0"})
    started = time.monotonic()

    def freeze(transaction: Transaction) -> None:
        proxy.freeze()
        if not committing:
            transaction.get(b"count")
        transaction.put(b"count", b"7")

    with pytest.raises(UnknownOutcome if committing else MetadataUnavailable):
        through_proxy.transact(freeze)
    # The deadline is 2 s, and libpq waits no less than 2 s for a connection.
    assert time.monotonic() - started < 5
    proxy.thaw()
    through_proxy.transact(increment)


def test_server_frozen_behind_the_login(
    url: str, postgres_server: PostgresServer, proxy: Proxy
) -> None:
    """A pooler that accepts a client and then answers nothing costs a bounded time, too."""
    database = parse_url(url.replace(f":{postgres_server.port}", f":{proxy.port}"), deadline_s=2)
    proxy.freeze_at(b"statement_timeout")
    with closing_watchdog() as watchdog, pytest.raises(MetadataUnavailable):
        connect(database, watchdog)


def test_server_goes_away_and_comes_back(url: str, postgres_server: PostgresServer) -> None:
    """Crashes in a stream of transactions: typed errors, nothing durable lost, it recovers."""
    kv = PostgresKV(url, create=False, deadline_s=1)
    acknowledged: list[bytes] = []
    failures: list[Exception] = []
    progress = threading.Semaphore(0)
    stop = threading.Event()

    def put(transaction: Transaction, key: bytes) -> None:
        transaction.put(key, b"")

    def write() -> None:
        number = 0
        while not stop.is_set():
            key = b"%06d" % number
            number += 1
            try:
                kv.transact(partial(put, key=key), durable=True)
            except (TransientError, UnknownOutcome) as error:
                failures.append(error)
            else:
                acknowledged.append(key)
            progress.release()

    def disturb() -> None:
        try:
            for _ in range(2):
                for _ in range(30):
                    assert progress.acquire(timeout=30)
                postgres_server.crash()
                postgres_server.start()
            for _ in range(30):
                assert progress.acquire(timeout=30)
        finally:
            stop.set()

    in_threads(write, disturb)
    assert failures
    present = {key for key, _ in scan_all(kv)}
    assert present.issuperset(acknowledged)
    kv.close()


def test_server_stays_away(url: str, postgres_server: PostgresServer) -> None:
    """Without a server, reads and writes fail as MetadataUnavailable at the deadline."""
    kv = PostgresKV(url, create=False, deadline_s=2)
    postgres_server.stop()
    try:
        with pytest.raises(MetadataUnavailable):
            get(kv, b"a")
        with pytest.raises(MetadataUnavailable):
            kv.transact(increment)
    finally:
        postgres_server.start()
    assert kv.transact(increment) == 1
    kv.close()


def test_durable_covers_earlier_transactions(url: str, postgres_server: PostgresServer) -> None:
    """A durable transaction that writes nothing makes the earlier ones survive a server crash."""
    kv = PostgresKV(url, create=False)
    for number in range(20):
        put_all(kv, {b"%d" % number: b""})
        kv.transact(lambda transaction: transaction.delete(b"not there"), durable=True)
        if number % 10 == 9:
            postgres_server.crash()
            postgres_server.start()
            assert len(scan_all(kv)) == number + 1
    kv.close()


def test_stalled_client_does_not_block_others(url: str) -> None:
    """The server ends a session that sits in a transaction, so that its locks go."""
    with closing_watchdog() as watchdog:
        stalled = connect(parse_url(url, deadline_s=0.3), watchdog)
    schema = url.partition("schema=")[2]
    stalled.connection.execute("BEGIN")
    stalled.connection.execute(
        sql.SQL("INSERT INTO {} VALUES ('count', '7')").format(sql.Identifier(schema, "kv"))
    )
    kv = PostgresKV(url, create=False)
    assert kv.transact(increment) == 1
    kv.close()
    stalled.close()


def test_use_after_fork(url: str) -> None:
    """A forked child, which would share the connections, is refused; the parent goes on."""
    kv = PostgresKV(url, create=False)
    kv.transact(increment)
    child = os.fork()
    if child == 0:
        try:
            get(kv, b"count")
        except UsedAfterFork:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.transact(increment) == 2
    kv.close()
