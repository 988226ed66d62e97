"""What every metadata engine must do: the contract of `tectonic_client.kv.port`, as tests.

A test module makes a subclass, names the `engine` it covers, and gives a fixture `open_engine`
that opens one more client of one database, fresh for the test.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tectonic_client.errors import MetadataUnavailable, ReadOnly
from tectonic_client.kv.port import KV, Listener, ReadTransaction, Transaction
from tectonic_client.limits import MAX_KEY_BYTES, MAX_VALUE_BYTES

Pairs = list[tuple[bytes, bytes]]

LAST = b"\xff" * 8
"""Above every key of these tests."""

DEADLINE_S = 60


class OpenEngine(Protocol):
    def __call__(self, *, read_only: bool = False) -> KV:
        """One more client of the test's database; the fixture closes it."""


class Closing:
    """Opens engines and closes them all."""

    def __init__(self, open_one: Callable[[bool], KV]) -> None:
        self._open_one = open_one
        self._opened: list[KV] = []

    def __call__(self, *, read_only: bool = False) -> KV:
        kv = self._open_one(read_only)
        self._opened.append(kv)
        return kv

    def close(self) -> None:
        for kv in self._opened:
            kv.close()


def put_all(kv: KV, pairs: dict[bytes, bytes], *, durable: bool = False) -> None:
    def put(transaction: Transaction) -> None:
        for key, value in pairs.items():
            transaction.put(key, value)

    kv.transact(put, durable=durable)


def get(kv: KV, key: bytes) -> bytes | None:
    return kv.read(lambda transaction: transaction.get(key))


def scan_all(kv: KV) -> Pairs:
    return kv.read(lambda transaction: transaction.scan(b"", LAST))


def increment(transaction: Transaction) -> int:
    count = int(transaction.get(b"count") or b"0") + 1
    transaction.put(b"count", b"%d" % count)
    return count


def in_threads(*functions: Callable[[], object]) -> None:
    """Run all at once; the first error, if any, is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait(DEADLINE_S)
            function()
        except BaseException as error:  # noqa: BLE001  (raised in the caller)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a transaction hangs"
    if errors:
        raise errors[0]


class Planned(Exception):
    """What the tests' own functions raise."""


def _hears(listener: Listener, wait_s: float = DEADLINE_S) -> bool:
    return bool(select.select([listener], [], [], wait_s)[0])


def _drain_all(listener: Listener) -> None:
    """Wait until a call has come, and take note until none follows."""
    assert _hears(listener)
    while _hears(listener, wait_s=0.2):
        listener.drain()


class KVContract:
    """The contract; see the module's docstring."""

    engine: ClassVar[type]
    model_examples: ClassVar[int] = 25

    @pytest.fixture
    def kv(self, open_engine: OpenEngine) -> KV:
        return open_engine()

    # --- calls --------------------------------------------------------------------------------

    def test_a_call_wakes_every_listener_of_its_topic(self, open_engine: OpenEngine) -> None:
        """A call reaches all clients that listen to the topic, its own included, and no others."""
        caller, other = open_engine(), open_engine()
        listeners = [caller.listen("news"), other.listen("news"), other.listen("weather")]
        caller.call("news")
        assert [_hears(listener) for listener in listeners[:2]] == [True, True]
        assert not _hears(listeners[2], wait_s=0.2)
        for listener in listeners:
            listener.close()

    def test_a_listener_is_quiet_after_drain_until_the_next_call(
        self, open_engine: OpenEngine
    ) -> None:
        """Several calls are taken note of at once, and the next one is heard again."""
        kv = open_engine()
        listener = kv.listen("news")
        for _ in range(2):
            for _ in range(3):
                kv.call("news")
            _drain_all(listener)
        listener.close()

    def test_a_call_comes_after_what_was_committed(self, open_engine: OpenEngine) -> None:
        """Who is woken finds what the caller had committed, every time."""
        writer, reader = open_engine(), open_engine()
        listener = reader.listen("news")
        for count in range(20):
            writer.transact(increment)
            writer.call("news")
            assert _hears(listener)
            listener.drain()
            assert get(reader, b"count") == b"%d" % (count + 1)
        listener.close()

    def test_nobody_calls_or_listens_through_a_closed_client(self, open_engine: OpenEngine) -> None:
        """A closed client refuses both with the error of a closed engine."""
        kv = open_engine()
        kv.close()
        with pytest.raises(MetadataUnavailable):
            kv.call("news")
        with pytest.raises(MetadataUnavailable):
            kv.listen("news")

    # --- one transaction ----------------------------------------------------------------------

    def test_put_get_delete(self, kv: KV) -> None:
        """What was put is there, what was deleted or never put is not."""
        put_all(kv, {b"a": b"1", b"b": b"2"})
        kv.transact(lambda transaction: transaction.delete(b"a"))
        kv.transact(lambda transaction: transaction.delete(b"never there"))
        assert get(kv, b"a") is None
        assert get(kv, b"b") == b"2"
        put_all(kv, {b"b": b"3"})
        assert get(kv, b"b") == b"3"

    def test_result(self, kv: KV) -> None:
        """read and transact return what the function returns, durable or not."""
        assert kv.read(lambda _: "read") == "read"
        assert kv.transact(lambda _: "write") == "write"
        assert kv.transact(lambda _: "durable", durable=True) == "durable"
        assert kv.transact(lambda transaction: transaction.put(b"k", b"v"), durable=True) is None
        assert get(kv, b"k") == b"v"

    def test_empty_key_and_value(self, kv: KV) -> None:
        """The empty key is a key and sorts first; an empty value differs from no value."""
        put_all(kv, {b"": b"", b"\0": b"zero"})
        assert get(kv, b"") == b""
        assert scan_all(kv) == [(b"", b""), (b"\0", b"zero")]

    def test_order_is_bytewise(self, kv: KV) -> None:
        """Keys are ordered as unsigned bytes, a prefix before what it begins."""
        keys = [
            b"",
            b"\0",
            b"\0\0",
            b"\0\xff",
            b"A",
            b"a",
            b"a\0",
            b"ab",
            b"\x7f",
            b"\x80",
            b"\xff",
        ]
        put_all(kv, dict.fromkeys(reversed(keys), b"\0\xff'\\%\n"))
        assert scan_all(kv) == [(key, b"\0\xff'\\%\n") for key in keys]

    def test_scan(self, kv: KV) -> None:
        """Ranges are half open; limit counts from the end that the order begins with."""
        put_all(kv, {bytes((byte,)): b"%d" % byte for byte in range(10)})

        def keys(
            start: bytes, end: bytes, limit: int | None = None, reverse: bool = False
        ) -> list[int]:
            pairs = kv.read(
                lambda transaction: transaction.scan(start, end, limit=limit, reverse=reverse)
            )
            assert all(value == b"%d" % key[0] for key, value in pairs)
            return [key[0] for key, _ in pairs]

        assert keys(b"\3", b"\6") == [3, 4, 5]
        assert keys(b"\3", b"\6", reverse=True) == [5, 4, 3]
        assert keys(b"\3", b"\6", limit=2) == [3, 4]
        assert keys(b"\3", b"\6", limit=2, reverse=True) == [5, 4]
        assert keys(b"\3", b"\6", limit=100) == [3, 4, 5]
        assert keys(b"\3", b"\6", limit=0) == []
        assert keys(b"\3\0", b"\4") == []
        assert keys(b"\6", b"\6") == []
        assert keys(b"\6", b"\3") == []
        assert keys(b"\x0a", LAST) == []

    def test_get_many(self, kv: KV) -> None:
        """Values come in the order asked for; absent keys are None, repeated keys repeat."""
        put_all(kv, {b"a": b"1", b"b": b"2"})
        wanted = [b"b", b"x", b"a", b"b", b""]
        expected = [b"2", None, b"1", b"2", None]
        assert kv.read(lambda transaction: transaction.get_many(wanted)) == expected
        assert kv.read(lambda transaction: transaction.get_many([])) == []
        assert kv.transact(lambda transaction: transaction.get_many(wanted)) == expected

    def test_reads_its_own_writes(self, kv: KV) -> None:
        """Every kind of read in a transaction sees every kind of write before it."""
        put_all(kv, {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"})

        def check(transaction: Transaction) -> None:
            transaction.put(b"b", b"new")
            transaction.delete(b"c")
            assert transaction.get(b"b") == b"new"
            assert transaction.get(b"c") is None
            assert transaction.get_many([b"c", b"b", b"a", b"b"]) == [None, b"new", b"1", b"new"]
            assert transaction.scan(b"a", b"d", limit=2) == [(b"a", b"1"), (b"b", b"new")]
            transaction.delete_range(b"a", b"c")
            assert transaction.get_many([b"a", b"b", b"d"]) == [None, None, b"4"]
            transaction.put(b"b", b"again")
            transaction.put(b"bb", b"5")
            expected = [(b"b", b"again"), (b"bb", b"5"), (b"d", b"4")]
            assert transaction.scan(b"", LAST) == expected
            assert transaction.scan(b"", LAST, reverse=True, limit=1) == [(b"d", b"4")]
            transaction.delete(b"bb")
            transaction.put(b"bb", b"6")
            transaction.put(b"d", b"7")
            transaction.delete(b"d")

        kv.transact(check)
        assert scan_all(kv) == [(b"b", b"again"), (b"bb", b"6")]

    def test_delete_range(self, kv: KV) -> None:
        """Removes start <= key < end and nothing else; empty ranges do nothing."""
        put_all(kv, dict.fromkeys((b"a", b"b", b"b\0", b"c"), b""))
        kv.transact(lambda transaction: transaction.delete_range(b"b", b"b"))
        kv.transact(lambda transaction: transaction.delete_range(b"c", b"a"))
        assert len(scan_all(kv)) == 4
        kv.transact(lambda transaction: transaction.delete_range(b"b", b"c"))
        assert [key for key, _ in scan_all(kv)] == [b"a", b"c"]

    def test_large_transaction(self, kv: KV) -> None:
        """Thousands of writes in one transaction are all there."""
        pairs = {b"%05d" % number: b"v%d" % number for number in range(3000)}
        put_all(kv, pairs)
        assert scan_all(kv) == sorted(pairs.items())

    def test_sizes(self, kv: KV) -> None:
        """The largest key and value are accepted; one byte more is ValueError, without a trace."""
        key, value = b"k" * MAX_KEY_BYTES, b"\xff" * MAX_VALUE_BYTES
        put_all(kv, {key: value})
        assert get(kv, key) == value

        def put_too_much(key: bytes, value: bytes) -> None:
            def put(transaction: Transaction) -> None:
                transaction.put(b"before", b"")
                transaction.put(key, value)

            kv.transact(put)

        with pytest.raises(ValueError, match="key"):
            put_too_much(key + b"k", b"")
        with pytest.raises(ValueError, match="value"):
            put_too_much(b"", value + b"v")
        assert [found for found, _ in scan_all(kv)] == [key]

    def test_clock(self, kv: KV) -> None:
        """now_ns is the time since the epoch and does not run backwards."""
        first = kv.read(lambda transaction: transaction.now_ns())
        second = kv.transact(lambda transaction: transaction.now_ns())
        assert first <= second
        assert abs(second - time.time_ns()) < 3600 * 10**9

    # --- failures of the function -------------------------------------------------------------

    @pytest.mark.parametrize("error", [Planned("planned"), TimeoutError("planned"), KeyError(1)])
    def test_exception_rolls_back(self, kv: KV, error: Exception) -> None:
        """An exception reaches the caller unchanged and leaves nothing of the transaction."""
        put_all(kv, {b"a": b"1", b"b": b"2"})

        def fail(transaction: Transaction) -> None:
            transaction.put(b"a", b"new")
            transaction.put(b"c", b"3")
            transaction.delete(b"b")
            transaction.delete_range(b"a", b"b")
            transaction.put(b"a", b"newer")
            raise error

        with pytest.raises(type(error)) as caught:
            kv.transact(fail)
        assert caught.value is error
        assert scan_all(kv) == [(b"a", b"1"), (b"b", b"2")]

    def test_exception_in_read(self, kv: KV) -> None:
        """An exception from a read reaches the caller, and the engine goes on."""

        def fail(transaction: ReadTransaction) -> None:
            transaction.get(b"a")
            raise Planned

        for _ in range(40):  # more than there are connections: none is lost
            with pytest.raises(Planned):
                kv.read(fail)
        assert get(kv, b"a") is None

    def test_transaction_ends_with_its_function(self, kv: KV) -> None:
        """A transaction that leaks out of its function refuses to work."""
        put_all(kv, {b"a": b"1"})
        reading = kv.read(lambda transaction: transaction)
        writing = kv.transact(lambda transaction: transaction)
        with pytest.raises(RuntimeError):
            reading.get(b"a")
        with pytest.raises(RuntimeError):
            writing.scan(b"", LAST)
        with pytest.raises(RuntimeError):
            writing.delete_range(b"", LAST)
        assert get(kv, b"a") == b"1"

    # --- several clients ----------------------------------------------------------------------

    def test_commit_is_visible(self, open_engine: OpenEngine) -> None:
        """What one client committed the next read of another one sees."""
        writer, reader = open_engine(), open_engine()
        for number in range(20):
            put_all(writer, {b"n": b"%d" % number})
            assert get(reader, b"n") == b"%d" % number

    def test_increments_lose_nothing(self, open_engine: OpenEngine) -> None:
        """Eight threads over two clients increment one value; every increment counts."""
        clients = [open_engine(), open_engine()]

        def work(kv: KV) -> Callable[[], None]:
            def run() -> None:
                for _ in range(25):
                    kv.transact(increment)

            return run

        in_threads(*(work(kv) for kv in clients * 4))
        assert get(clients[0], b"count") == b"200"

    def test_no_write_skew(self, open_engine: OpenEngine) -> None:
        """Two transactions that each scan where the other one writes do not both succeed."""
        first, second = open_engine(), open_engine()

        def claim(mine: bytes, other: bytes) -> Callable[[Transaction], None]:
            def run(transaction: Transaction) -> None:
                if not transaction.scan(other, other + b"\xff"):
                    transaction.put(mine + b"/claimed", b"")

            return run

        def both_claim(prefix: bytes) -> None:
            left, right = prefix + b"left", prefix + b"right"
            in_threads(
                lambda: first.transact(claim(left, right)),
                lambda: second.transact(claim(right, left)),
            )
            claims = first.read(lambda transaction: transaction.scan(prefix, prefix + b"\xff"))
            assert len(claims) == 1

        for number in range(15):
            both_claim(b"%d-" % number)

    def test_read_is_a_snapshot(self, open_engine: OpenEngine) -> None:
        """While others write, a read sees each transaction whole or not at all."""
        writer, reader = open_engine(), open_engine()
        put_all(writer, {b"a": b"0", b"b": b"0"})

        def write() -> None:
            for number in range(100):
                put_all(writer, {b"a": b"%d" % number, b"b": b"%d" % number})

        def look(transaction: ReadTransaction) -> set[bytes | None]:
            values = {transaction.get(b"a"), transaction.get(b"b")}
            values.update(transaction.get_many([b"b", b"a"]))
            values.update(value for _, value in transaction.scan(b"a", b"c"))
            return values

        def read() -> None:
            for _ in range(100):
                assert len(reader.read(look)) == 1

        in_threads(write, read)

    # --- closing, read-only -------------------------------------------------------------------

    def test_closed(self, open_engine: OpenEngine) -> None:
        """After close every call raises MetadataUnavailable; closing again is fine; data stays."""
        kv, other = open_engine(), open_engine()
        put_all(kv, {b"a": b"1"})
        kv.close()
        kv.close()
        with pytest.raises(MetadataUnavailable, match="closed"):
            get(kv, b"a")
        with pytest.raises(MetadataUnavailable, match="closed"):
            put_all(kv, {b"a": b"2"})
        assert get(other, b"a") == b"1"
        other.close()
        assert get(open_engine(), b"a") == b"1"

    def test_read_only(self, open_engine: OpenEngine) -> None:
        """A client opened read-only reads and refuses to write."""
        put_all(open_engine(), {b"a": b"1"})
        kv = open_engine(read_only=True)
        assert get(kv, b"a") == b"1"
        with pytest.raises(ReadOnly):
            put_all(kv, {b"a": b"2"})
        assert get(kv, b"a") == b"1"

    # --- against a model ----------------------------------------------------------------------

    def test_model(self, open_engine: OpenEngine) -> None:
        """Any sequence of transactions, committed or failed, leaves what a dict says."""
        kv = open_engine()
        run_state_machine_as_test(
            lambda: _Model(kv),  # type: ignore[arg-type]  # a factory serves as well
            settings=settings(
                max_examples=self.model_examples,
                stateful_step_count=12,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


class ConcurrentKVContract(KVContract):
    """The contract of engines whose transactions run side by side."""

    def test_read_does_not_see_later_commits(self, open_engine: OpenEngine) -> None:
        """A commit in the middle of a read neither waits for it nor shows in it."""
        writer, reader = open_engine(), open_engine()
        put_all(writer, {b"a": b"old"})

        def look(transaction: ReadTransaction) -> list[bytes | None]:
            before = transaction.get(b"a")
            put_all(writer, {b"a": b"new"})
            return [before, transaction.get(b"a")]

        assert reader.read(look) == [b"old", b"old"]
        assert get(reader, b"a") == b"new"


_keys = st.lists(st.sampled_from([b"\0", b"\1", b"a", b"\xff"]), max_size=3).map(b"".join)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _keys, st.binary(max_size=4)),
        st.tuples(st.just("delete"), _keys, st.none()),
        st.tuples(st.just("delete_range"), _keys, _keys),
        st.tuples(st.just("get"), _keys, st.none()),
        st.tuples(st.just("get_many"), _keys, _keys),
        st.tuples(st.just("scan"), _keys, _keys),
    ),
    max_size=8,
)


class _Model(RuleBasedStateMachine):
    """The engine beside a dict."""

    def __init__(self, kv: KV) -> None:
        super().__init__()
        self.kv = kv
        self.pairs: dict[bytes, bytes] = {}
        kv.transact(lambda transaction: transaction.delete_range(b"", LAST))

    @rule(operations=_operations, durable=st.booleans(), fails=st.booleans())
    def transact(
        self, operations: list[tuple[str, bytes, bytes]], durable: bool, fails: bool
    ) -> None:
        def run(transaction: Transaction) -> dict[bytes, bytes]:
            pairs = dict(self.pairs)
            for operation in operations:
                _apply(transaction, pairs, *operation)
            if fails:
                raise Planned
            return pairs

        try:
            self.pairs = self.kv.transact(run, durable=durable)
        except Planned:
            assert fails

    @rule(
        start=_keys,
        end=_keys,
        limit=st.none() | st.integers(min_value=0, max_value=4),
        reverse=st.booleans(),
    )
    def scan(self, start: bytes, end: bytes, limit: int | None, reverse: bool) -> None:
        found = self.kv.read(lambda t: t.scan(start, end, limit=limit, reverse=reverse))
        assert found == _in_range(self.pairs, start, end, reverse)[:limit]

    @invariant()
    def same(self) -> None:
        assert scan_all(self.kv) == sorted(self.pairs.items())


def _in_range(pairs: dict[bytes, bytes], start: bytes, end: bytes, reverse: bool = False) -> Pairs:
    return [pair for pair in sorted(pairs.items(), reverse=reverse) if start <= pair[0] < end]


def _apply(
    transaction: Transaction, pairs: dict[bytes, bytes], name: str, first: bytes, second: bytes
) -> None:
    """Do one operation on both; reads are compared."""
    match name:
        case "put":
            transaction.put(first, second)
            pairs[first] = second
        case "delete":
            transaction.delete(first)
            pairs.pop(first, None)
        case "delete_range":
            transaction.delete_range(first, second)
            for key, _ in _in_range(pairs, first, second):
                del pairs[key]
        case "get":
            assert transaction.get(first) == pairs.get(first)
        case "get_many":
            expected = [pairs.get(first), pairs.get(second)]
            assert transaction.get_many([first, second]) == expected
        case "scan":
            assert transaction.scan(first, second) == _in_range(pairs, first, second)


def closing(open_one: Callable[[bool], KV]) -> Iterator[OpenEngine]:
    """Body of an `open_engine` fixture."""
    clients = Closing(open_one)
    yield clients
    clients.close()
