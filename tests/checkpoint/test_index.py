"""The index of a step: written, parsed, and refused when it is not what we write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.checkpoint.index import (
    RankEntry,
    StepIndex,
    check_metadata,
    encode_index,
    make_index,
    parse_index,
)
from tectonic_client.checkpoint.names import (
    check_rank,
    check_step,
    parse_step_name,
    part_name,
    step_name,
)
from tectonic_client.checkpoint.records import AttemptRecord, PartRecord
from tectonic_client.errors import CorruptCheckpoint, FormatTooNew, InvalidArgument

ATTEMPT = AttemptRecord(
    attempt_id=9, session=1, token=2, started_ns=1_000_000_000, decided_ns=0, world_size=2, pid=3,
    run_id="gpt/ü", hostname="node",
)  # fmt: skip
PARTS = {
    1: PartRecord(5, 12, 200, 2_000_000, 3_500_000_000, 4_000_000_000),
    0: PartRecord(4, 11, 100, 1_000_000, 2_500_000_000, 900_000_000),
}


def sample(metadata: dict[str, Any] | None = None) -> StepIndex:
    return make_index(100, ATTEMPT, PARTS, 1_700_000_000_123_456_789, metadata or {})


def test_golden_file() -> None:
    """The bytes of version 1 of the format; an arrival before the start counts as zero."""
    assert encode_index(sample({"loss": 2.5})) == (
        b'{\n "format": "tectonicfs.checkpoint",\n "version": 1,\n "step": 100,\n'
        b' "world_size": 2,\n "run_id": "gpt/\\u00fc",\n'
        b' "committed_at": "2023-11-14T22:13:20.123456+00:00",\n'
        b' "total_bytes": 300,\n "metadata": {"loss": 2.5},\n "ranks": [\n'
        b'  {"rank": 0, "file": "rank-00000-of-00002.safetensors", "bytes": 100,'
        b' "stage_s": 0.001, "write_s": 2.5, "arrive_s": 0.0},\n'
        b'  {"rank": 1, "file": "rank-00001-of-00002.safetensors", "bytes": 200,'
        b' "stage_s": 0.002, "write_s": 3.5, "arrive_s": 3.0}\n ]\n}\n'
    )


def test_an_index_survives() -> None:
    """Parsing what was written gives the same index."""
    index = sample({"nested": {"a": [1, None, "ü"]}})
    assert parse_index(encode_index(index)) == index
    assert index.total_bytes == 300
    assert index.committed_at == datetime(2023, 11, 14, 22, 13, 20, 123456, UTC)
    assert index.ranks[1] == RankEntry(1, part_name(1, 2), 200, 0.002, 3.5, 3.0)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda d: d.update(format="other"),
    "no format": lambda d: d.pop("format"),
    "version": lambda d: d.update(version="1"),
    "step": lambda d: d.update(step=-1),
    "bool step": lambda d: d.update(step=True),
    "world size": lambda d: d.update(world_size=3),
    "huge world": lambda d: d.update(world_size=1 << 40),
    "run": lambda d: d.update(run_id=5),
    "time": lambda d: d.update(committed_at="yesterday"),
    "no zone": lambda d: d.update(committed_at="2023-11-14T22:13:20"),
    "time type": lambda d: d.update(committed_at=5),
    "metadata": lambda d: d.update(metadata=[]),
    "total": lambda d: d.update(total_bytes=1),
    "no ranks": lambda d: d.pop("ranks"),
    "ranks": lambda d: d.update(ranks=5),
    "rank order": lambda d: d["ranks"].reverse(),
    "file": lambda d: d["ranks"][0].update(file="../../etc/passwd"),
    "bytes": lambda d: d["ranks"][0].update(bytes=-5),
    "seconds": lambda d: d["ranks"][0].update(write_s=-1),
    "infinite": lambda d: d["ranks"][0].update(write_s=1e999),
    "seconds type": lambda d: d["ranks"][0].update(write_s="1"),
    "rank type": lambda d: d["ranks"].__setitem__(0, 7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inconsistent_indices(name: str) -> None:
    """Every field is checked; the error is CorruptCheckpoint in one line."""
    value = json.loads(encode_index(sample()))
    CHANGES[name](value)
    with pytest.raises(CorruptCheckpoint) as caught:
        parse_index(json.dumps(value).encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_what_is_no_index(data: bytes) -> None:
    """Other files are CorruptCheckpoint, never another exception."""
    with pytest.raises(CorruptCheckpoint):
        parse_index(data)


@given(st.integers(0, 700), st.integers(0, 255))
def test_damaged_indices(place: int, byte: int) -> None:
    """A damaged byte gives an index, CorruptCheckpoint or FormatTooNew, nothing else."""
    data = bytearray(encode_index(sample()))
    data[place % len(data)] = byte
    with contextlib.suppress(CorruptCheckpoint, FormatTooNew):
        parse_index(bytes(data))


def test_newer_versions_are_refused() -> None:
    """An index of a newer release is not guessed at."""
    with pytest.raises(FormatTooNew, match="upgrade"):
        parse_index(b'{"format": "tectonicfs.checkpoint", "version": 2}')


@pytest.mark.parametrize(
    "metadata", [{"x": object()}, {"x": float("nan")}, {"x": "y" * (17 << 20)}]
)
def test_metadata_must_be_json(metadata: dict[str, Any]) -> None:
    """What the index cannot hold is refused before anything is written."""
    with pytest.raises(InvalidArgument, match="metadata"):
        check_metadata(metadata)
    check_metadata({"fine": [1, "x", None]})


def test_names() -> None:
    """Step names sort, parse back, and nothing else parses; ranks and steps are checked."""
    assert step_name(100) == "step-0000000100"
    assert step_name(10**12) == "step-1000000000000"
    assert [parse_step_name(step_name(step)) for step in (0, 100, 10**12)] == [0, 100, 10**12]
    for name in ("step-100", "step-00000000100", "step-000000010a", "x", "step-٠٠٠٠٠٠٠٠٠١"):
        assert parse_step_name(name) is None
    assert part_name(12, 4096) == "rank-00012-of-04096.safetensors"
    for step in (-1, True, 1.0, 10**18):
        with pytest.raises(InvalidArgument, match="step"):
            check_step(step)  # type: ignore[arg-type]  # that is the point
    for rank, world_size in ((-1, 2), (2, 2), (0, 0), (0, 70_000), (True, 2)):
        with pytest.raises(InvalidArgument):
            check_rank(rank, world_size)
    check_step(0)
    check_rank(3, 4)
