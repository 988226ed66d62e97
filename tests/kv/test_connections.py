"""The stack of connections: how many there are, who waits, which are closed."""

from __future__ import annotations

import pytest

from tectonic_client.errors import MetadataUnavailable
from tectonic_client.kv import connections
from tectonic_client.kv.connections import Connections


class _Opened:
    """Connections that are numbers; `allowed_s` is what the last one was given to open."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.count = 0
        self.allowed_s = 0.0

    def open_one(self, seconds: float) -> int:
        self.allowed_s = seconds
        self.count += 1
        self.open.add(self.count)
        return self.count

    def stack(self) -> Connections[int]:
        return Connections(
            "test", open_one=self.open_one, close_one=self.open.remove, limit=3, wait_s=0.05
        )


def test_the_last_one_given_back_is_taken_first() -> None:
    """Warm caches are used again, and no more are opened than are in use at once."""
    opened = _Opened()
    stack = opened.stack()
    first, second = stack.take(), stack.take()
    stack.give(first)
    stack.give(second)
    assert stack.take() == second
    assert opened.count == 2


def test_what_a_burst_needed_is_closed_when_it_is_idle_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quiet client keeps one connection, however many it once had."""
    opened = _Opened()
    stack = opened.stack()
    for number in [stack.take() for _ in range(3)]:
        stack.give(number)
    assert len(opened.open) == 3
    monkeypatch.setattr(connections, "IDLE_CONNECTION_S", 0.0)
    stack.give(stack.take())
    assert opened.open == {3}
    # Their places are free again.
    assert len({stack.take() for _ in range(3)}) == 3


def test_waiting_and_opening_share_one_deadline() -> None:
    """Who waited for its turn has that much less time to connect; who waits too long is told."""
    opened = _Opened()
    stack = opened.stack()
    stack.take(10.0)
    assert 9.0 < opened.allowed_s <= 10.0
    stack.take()
    assert opened.allowed_s <= 0.05
    stack.take()
    with pytest.raises(MetadataUnavailable, match="all 3 connections in use"):
        stack.take()


def test_close_closes_the_idle_and_what_comes_back() -> None:
    """Nothing stays open, and nothing can be taken any more."""
    opened = _Opened()
    stack = opened.stack()
    first, second = stack.take(), stack.take()
    stack.give(first)
    stack.close()
    assert opened.open == {second}
    stack.give(second)
    assert opened.open == set()
    with pytest.raises(MetadataUnavailable, match="closed"):
        stack.take()
