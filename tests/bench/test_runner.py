"""Interleaving of cases."""

from __future__ import annotations

from collections.abc import Mapping

from bench.runner import Metric, interleave

SPEED = Metric("speed", "GB/s")


class Counted:
    """Measures how many cases were measured before it."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name = name
        self._order = order

    def measure(self) -> Mapping[Metric, float]:
        self._order.append(self.name)
        return {SPEED: float(len(self._order))}


def test_cases_take_turns_and_the_first_pass_is_not_counted() -> None:
    """Each pass measures every case once, begins with another one, and the warm-up is dropped."""
    order: list[str] = []
    said: list[str] = []
    cases = [Counted("a", order), Counted("b", order), Counted("c", order)]
    rows = interleave(cases, 2, said.append)
    assert "".join(order) == "abcbcacab"
    assert [(row.case, row.samples) for row in rows] == [
        ("a", (6.0, 8.0)),
        ("b", (4.0, 9.0)),
        ("c", (5.0, 7.0)),
    ]
    assert said[0] == "a: warm-up"
    assert said[-1] == "b: repeat 2 of 2"
