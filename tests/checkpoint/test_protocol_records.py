"""Records and keys of the checkpoint protocol: golden bytes, damage, order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.records import (
    AttemptRecord,
    MemberRecord,
    ObjectionKind,
    ObjectionRecord,
    Outcome,
    PartRecord,
    Verdict,
)
from tectonic_client.errors import (
    CheckpointError,
    CorruptRecord,
    RankMismatch,
    RanksMissing,
    StepExists,
)
from tectonic_client.limits import MAX_KEY_BYTES, MAX_RUN_ID_BYTES
from tectonic_client.records import Record

MEMBER = MemberRecord(1, 2, 3, 4, 5, 6, 7, 8, "host")
ATTEMPT = AttemptRecord(
    1, 2, 3, 4, 5, 6, 7, "run/1", "host", Verdict(Outcome.RANKS_MISSING, "rank 3 died", (3, 65_535))
)
PART = PartRecord(1, 2, 3, 4, 5, 6)
OBJECTION = ObjectionRecord(ObjectionKind.ELSEWHERE, 101, 8, "host", "text")

GOLDEN: dict[str, tuple[Record, str]] = {
    "member": (
        MEMBER,
        "2001" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000"
        "0500000000000000" "0600000000000000" "07000000" "08000000" "0400686f7374" "a2f8dae9",
    ),
    "attempt": (
        ATTEMPT,
        "2101" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000"
        "0500000000000000" "06000000" "07000000" "02" "02000000" "050072756e2f31" "0400686f7374"
        "0b0072616e6b20332064696564" "03000000" "ffff0000" "76f917e9",
    ),
    "part": (
        PART,
        "2201" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000"
        "0500000000000000" "0600000000000000" "6d6d6746",
    ),
    "objection": (
        OBJECTION,
        "2301" "02" "6500000000000000" "08000000" "0400686f7374" "040074657874" "ff82d156",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_records(name: str) -> None:
    """The bytes of version 1 of each record, and back."""
    record, golden = GOLDEN[name]
    assert record.encode().hex() == golden
    assert type(record).decode(bytes.fromhex(golden)) == record


@given(st.sampled_from(list(GOLDEN)), st.integers(0, 10_000), st.integers(1, 255))
def test_any_flipped_bit_is_detected(name: str, place: int, flip: int) -> None:
    """A damaged record is CorruptRecord, never another record."""
    record, golden = GOLDEN[name]
    data = bytearray.fromhex(golden)
    data[place % len(data)] ^= flip
    with pytest.raises(CorruptRecord):
        type(record).decode(bytes(data))


def test_verdicts_are_errors() -> None:
    """Each outcome is the error that every rank raises; a committed attempt has none."""
    assert Verdict(Outcome.COMMITTED).error() is None
    assert Verdict(Outcome.OPEN).error() is None
    missing = Verdict(Outcome.RANKS_MISSING, "gone", (1, 2)).error()
    assert isinstance(missing, RanksMissing)
    assert missing.ranks == (1, 2)
    for outcome, kind in (
        (Outcome.RANK_MISMATCH, RankMismatch),
        (Outcome.STEP_EXISTS, StepExists),
        (Outcome.FAILED, CheckpointError),
    ):
        error = Verdict(outcome, "why").error()
        assert type(error) is kind
        assert str(error) == "why"


def test_keys() -> None:
    """Keys are distinct, sort by step and rank, parse back, lie in their ranges and fit."""
    assert keys.parse_attempt(keys.attempt(7, 300)) == 300
    assert keys.parse_rank(keys.part(7, 9, 65_535)) == 65_535
    assert keys.attempt(7, 9) < keys.attempt(7, 10) < keys.attempt(7, 300)
    for key, (start, end) in (
        (keys.member(7, "r", 1), keys.members(7)),
        (keys.attempt(7, 1), keys.attempts(7)),
        (keys.part(7, 9, 1), keys.parts(7, 9)),
        (keys.objection(7, 9, 1), keys.objections(7, 9)),
    ):
        assert start <= key < end
    assert not keys.parts(7, 9)[0] <= keys.part(7, 10, 0) < keys.parts(7, 9)[1]
    assert keys.member(7, "ab", 0) != keys.member(7, "a", 0)
    assert len(keys.member(7, "x" * MAX_RUN_ID_BYTES, 0)) < MAX_KEY_BYTES
