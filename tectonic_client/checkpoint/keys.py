"""Keys of the checkpoint protocol: the CHECKPOINT layer, grouped by the directory of the run.

    K hash dir | 00 | len u16, run id, rank u32     MemberRecord
    K hash dir | 01 | step u64                      AttemptRecord
    K hash dir | 02 | attempt u64, rank u32         PartRecord
    K hash dir | 03 | attempt u64, rank u32         ObjectionRecord

Big-endian, as in `metadata.keys`. Pure.
"""

from __future__ import annotations

import struct
from typing import Final

from tectonic_client.metadata.keys import CHECKPOINT, group, malformed, prefix_end

_MEMBER: Final = b"\x00"
_ATTEMPT: Final = b"\x01"
_PART: Final = b"\x02"
_OBJECTION: Final = b"\x03"

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")

KeyRange = tuple[bytes, bytes]


def member(directory: int, run_id: str, rank: int) -> bytes:
    """Key of the record that says which session is a rank of a run."""
    run = run_id.encode("utf-8", "surrogateescape")
    prefix = group(CHECKPOINT, directory) + _MEMBER
    return prefix + _U16.pack(len(run)) + run + _U32.pack(rank)


def members(directory: int) -> KeyRange:
    """Range of the members of all runs."""
    prefix = group(CHECKPOINT, directory) + _MEMBER
    return prefix, prefix_end(prefix)


def attempt(directory: int, step: int) -> bytes:
    """Key of the newest attempt at a step."""
    return _attempts(directory) + _U64.pack(step)


def attempts(directory: int) -> KeyRange:
    """Range of the attempts at all steps, in their order."""
    prefix = _attempts(directory)
    return prefix, prefix_end(prefix)


def parse_attempt(key: bytes) -> int:
    """The step of an attempt's key. Raises CorruptRecord."""
    start = len(_attempts(0))
    if len(key) != start + _U64.size:
        raise malformed(key)
    return int(_U64.unpack_from(key, start)[0])


def part(directory: int, attempt_id: int, rank: int) -> bytes:
    """Key of what one rank brought to an attempt."""
    return _of_attempt(directory, _PART, attempt_id) + _U32.pack(rank)


def parts(directory: int, attempt_id: int) -> KeyRange:
    """Range of the parts of an attempt."""
    prefix = _of_attempt(directory, _PART, attempt_id)
    return prefix, prefix_end(prefix)


def objection(directory: int, attempt_id: int, rank: int) -> bytes:
    """Key of one rank's reason why an attempt cannot succeed."""
    return _of_attempt(directory, _OBJECTION, attempt_id) + _U32.pack(rank)


def objections(directory: int, attempt_id: int) -> KeyRange:
    """Range of the objections to an attempt."""
    prefix = _of_attempt(directory, _OBJECTION, attempt_id)
    return prefix, prefix_end(prefix)


def parse_rank(key: bytes) -> int:
    """The rank at the end of a part's or objection's key. Raises CorruptRecord."""
    start = len(_of_attempt(0, _PART, 0))
    if len(key) != start + _U32.size:
        raise malformed(key)
    return int(_U32.unpack_from(key, start)[0])


def _attempts(directory: int) -> bytes:
    return group(CHECKPOINT, directory) + _ATTEMPT


def _of_attempt(directory: int, kind: bytes, attempt_id: int) -> bytes:
    return group(CHECKPOINT, directory) + kind + _U64.pack(attempt_id)
