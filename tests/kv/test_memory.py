"""The memory engine, bare and below the wrappers that tests of other layers use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tectonic_client.kv.memory import MemoryData, MemoryKV
from tests.contracts.kv import KVContract, OpenEngine, closing, increment


class TestMemory(KVContract):
    engine = MemoryKV

    @pytest.fixture
    def open_engine(self) -> Iterator[OpenEngine]:
        data = MemoryData()
        yield from closing(lambda read_only: MemoryKV(data, read_only=read_only))


def test_submit_is_done_at_once() -> None:
    """submit answers before it returns, results and errors alike."""
    kv = MemoryKV()
    future = kv.submit(increment)
    assert future.done()
    assert future.result() == 1
    failed: Future[int] = kv.submit(lambda _: 1 // 0)
    assert isinstance(failed.exception(timeout=0), ZeroDivisionError)
