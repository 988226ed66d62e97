"""Meters count right, in bounded memory, and what they measured travels and subtracts."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.metrics import BUCKETS, Measured, Meter

durations = st.integers(0, 2**70)


def test_quantiles() -> None:
    """Quantiles are the upper bounds of the buckets, but never above the longest call; without
    calls they are zero."""
    measured = Measured(100, 0, 0, 0, 12_000, (0, 50, 0, 49, 1))
    assert [measured.quantile_s(q) for q in (0, 0.5, 0.51, 0.99, 1)] == [
        2e-6, 2e-6, 8e-6, 8e-6, 12e-6,
    ]  # fmt: skip
    assert Measured().quantile_s(0.5) == 0


@given(st.lists(durations, min_size=1))
def test_a_call_is_in_the_bucket_of_its_duration(elapsed: list[int]) -> None:
    """Whatever the durations, each call is counted once, where the buckets' bounds say."""
    meter = Meter()
    for ns in elapsed:
        meter.add(ns)
    measured = meter.measured()
    assert measured.calls == len(elapsed) == sum(measured.buckets)
    assert (measured.total_ns, measured.max_ns) == (sum(elapsed), max(elapsed))
    assert len(measured.buckets) == BUCKETS
    for exponent in range(BUCKETS - 1):
        below = sum(ns < 2**exponent * 1000 for ns in elapsed)
        assert sum(measured.buckets[: exponent + 1]) == below


@given(st.lists(durations), st.lists(durations))
def test_later_minus_earlier_is_what_came_between(first: list[int], then: list[int]) -> None:
    """Two looks, one of which has travelled as JSON, subtract to the calls between them."""
    meter, between = Meter(), Meter()
    for ns in first:
        meter.add(ns, 3, failed=True)
    earlier = Measured.from_json(json.loads(json.dumps(meter.measured().to_json())))
    for ns in then:
        meter.add(ns, 5)
        between.add(ns, 5)
    found = meter.measured().since(earlier)
    expected = between.measured()
    assert found.buckets == expected.buckets
    assert (found.calls, found.errors) == (len(then), 0)
    assert (found.transferred_bytes, found.total_ns) == (5 * len(then), expected.total_ns)
