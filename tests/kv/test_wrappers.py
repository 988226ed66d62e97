"""The wrappers keep the contract, count right, and fail exactly what they were asked to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tectonic_client.errors import MetadataUnavailable, NoSpace, UnknownOutcome
from tectonic_client.kv.executor import AsyncKV, SubmittingKV
from tectonic_client.kv.memory import MemoryData, MemoryKV
from tectonic_client.kv.port import KV
from tectonic_client.kv.wrappers import CountingKV, FaultyKV
from tests.contracts.kv import KVContract, OpenEngine, Planned, closing, get, increment


class TestCounting(KVContract):
    engine = CountingKV

    @pytest.fixture
    def open_engine(self) -> Iterator[OpenEngine]:
        data = MemoryData()
        yield from closing(lambda read_only: CountingKV(MemoryKV(data, read_only=read_only)))


class TestFaulty(KVContract):
    engine = FaultyKV

    @pytest.fixture
    def open_engine(self) -> Iterator[OpenEngine]:
        data = MemoryData()
        yield from closing(lambda read_only: FaultyKV(MemoryKV(data, read_only=read_only)))


def test_counts() -> None:
    """Each call is counted once, through transact and submit, also one that fails."""
    kv = CountingKV(MemoryKV())
    kv.transact(increment)
    kv.transact(increment, durable=True)
    trio.run(AsyncKV(kv).transact, increment)
    get(kv, b"count")
    with pytest.raises(ZeroDivisionError):
        kv.read(lambda _: 1 // 0)
    assert (kv.reads, kv.transactions, kv.durable_transactions) == (2, 3, 1)
    kv.reset()
    assert (kv.reads, kv.transactions, kv.durable_transactions) == (0, 0, 0)


def _transact(kv: KV, through_submit: bool) -> int:
    if not through_submit:
        return kv.transact(increment)
    assert isinstance(kv, SubmittingKV)
    return kv.submit(increment).result(timeout=10)


@pytest.mark.parametrize("through_submit", [False, True])
def test_faults_before_commit(through_submit: bool) -> None:
    """The planned transaction fails and does not happen; those around it do."""
    kv = FaultyKV(MemoryKV())
    kv.fail_transaction(2, NoSpace("planned"))
    assert _transact(kv, through_submit) == 1
    assert kv.pending
    with pytest.raises(NoSpace, match="planned"):
        _transact(kv, through_submit)
    assert not kv.pending
    assert _transact(kv, through_submit) == 2


@pytest.mark.parametrize("through_submit", [False, True])
def test_lost_answer(through_submit: bool) -> None:
    """The planned transaction happens, and its caller is told that nobody knows."""
    kv = FaultyKV(MemoryKV())
    kv.lose_answer(1)
    with pytest.raises(UnknownOutcome):
        _transact(kv, through_submit)
    assert get(kv, b"count") == b"1"
    assert _transact(kv, through_submit) == 2


def test_lost_answer_of_a_failed_function() -> None:
    """A function that raises was not committed: its own error counts."""

    def fail(_: object) -> None:
        raise Planned

    kv = FaultyKV(MemoryKV())
    kv.lose_answer(1)
    with pytest.raises(Planned):
        kv.transact(fail)
    kv.lose_answer(1)
    assert isinstance(kv.submit(fail).exception(timeout=0), Planned)


def test_faults_of_reads() -> None:
    """The planned read fails, once; clear() forgets a plan."""
    kv = FaultyKV(MemoryKV())
    kv.fail_read(1, MetadataUnavailable("planned"))
    with pytest.raises(MetadataUnavailable, match="planned"):
        get(kv, b"a")
    assert get(kv, b"a") is None
    kv.fail_read(1, MetadataUnavailable("planned"))
    kv.clear()
    assert get(kv, b"a") is None
