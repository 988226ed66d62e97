"""Records of the checkpoint protocol, kinds 32 to 35. Envelope: `tectonic_client.records`.

All little-endian; `string` is a u16 length and UTF-8 bytes; times are nanoseconds since the epoch
on the engine's clock.

    32 member      session u64, token u64, process u64, born u64, active u64, fence u64,
                   world_size u32, pid u32, hostname string
    33 attempt     attempt u64, session u64, token u64, started u64, decided u64, world_size u32,
                   pid u32, outcome u8, number of ranks u32, run id string, hostname string,
                   message string, ranks u32 each
    34 part        token u64, inode u64, bytes u64, stage u64, write u64, arrived u64
                   (stage and write: nanoseconds that they took)
    35 objection   kind u8, value u64, pid u32, hostname string, message string

Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from tectonic_client.errors import (
    CheckpointError,
    RankMismatch,
    RanksMissing,
    StepExists,
    TectonicError,
)
from tectonic_client.limits import MAX_WORLD_SIZE
from tectonic_client.records import Cursor, Record, pack_string, unpack_exactly, within


@dataclass(frozen=True, slots=True)
class MemberRecord(Record):
    """Which manager is a rank of a run. Directory, run id and rank are in the key.

    `token` is the manager's, `process` its process's; it was made at `born_ns` and last wrote here
    at `active_ns`. `fence_ns` is the last sign of life of other processes that were this rank.
    """

    KIND = 32
    _LAYOUT: ClassVar = struct.Struct("<QQQQQQII")

    session: int
    token: int
    process: int
    born_ns: int
    active_ns: int
    fence_ns: int
    world_size: int
    pid: int
    hostname: str

    def _body(self) -> bytes:
        return self._LAYOUT.pack(
            self.session, self.token, self.process, self.born_ns, self.active_ns, self.fence_ns,
            self.world_size, self.pid,
        ) + pack_string(self.hostname)  # fmt: skip

    @classmethod
    def _from_body(cls, body: memoryview) -> MemberRecord:
        cursor = Cursor(body)
        session, token, process, born, active, fence, world_size, pid = cursor.take(cls._LAYOUT)
        hostname = cursor.string()
        cursor.done()
        within(MAX_WORLD_SIZE, world_size=world_size)
        return cls(session, token, process, born, active, fence, world_size, pid, hostname)


class Outcome(IntEnum):
    """How an attempt ended. The values are persisted."""

    OPEN = 0
    COMMITTED = 1
    RANKS_MISSING = 2
    RANK_MISMATCH = 3
    STEP_EXISTS = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of an attempt, the same for every rank."""

    outcome: Outcome
    message: str = ""
    ranks: tuple[int, ...] = ()

    def error(self) -> TectonicError | None:
        """What every rank of the attempt raises; None when it was committed."""
        match self.outcome:
            case Outcome.OPEN | Outcome.COMMITTED:
                return None
            case Outcome.RANKS_MISSING:
                return RanksMissing(self.message, self.ranks)
            case Outcome.RANK_MISMATCH:
                return RankMismatch(self.message)
            case Outcome.STEP_EXISTS:
                return StepExists(self.message)
            case Outcome.FAILED:
                return CheckpointError(self.message)


OPEN = Verdict(Outcome.OPEN)


@dataclass(frozen=True, slots=True)
class AttemptRecord(Record):
    """The newest attempt at a step; directory and step are in the key.

    `attempt_id` is the inode of the hidden directory that becomes the step's. `session`, `token`,
    `pid` and `hostname` are those of its coordinator, rank 0.
    """

    KIND = 33
    _LAYOUT: ClassVar = struct.Struct("<QQQQQIIBI")
    _RANK: ClassVar = struct.Struct("<I")

    attempt_id: int
    session: int
    token: int
    started_ns: int
    decided_ns: int
    world_size: int
    pid: int
    run_id: str
    hostname: str
    verdict: Verdict = OPEN

    @property
    def is_open(self) -> bool:
        return self.verdict.outcome is Outcome.OPEN

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(
            self.attempt_id, self.session, self.token, self.started_ns, self.decided_ns,
            self.world_size, self.pid, self.verdict.outcome, len(self.verdict.ranks),
        )  # fmt: skip
        texts = (self.run_id, self.hostname, self.verdict.message)
        ranks = b"".join(self._RANK.pack(rank) for rank in self.verdict.ranks)
        return fixed + b"".join(map(pack_string, texts)) + ranks

    @classmethod
    def _from_body(cls, body: memoryview) -> AttemptRecord:
        cursor = Cursor(body)
        attempt, session, token, started, decided, world_size, pid, outcome, count = cursor.take(
            cls._LAYOUT
        )
        within(MAX_WORLD_SIZE, world_size=world_size, ranks=count)
        run_id, hostname, message = cursor.string(), cursor.string(), cursor.string()
        ranks = tuple(cursor.take(cls._RANK)[0] for _ in range(count))
        cursor.done()
        verdict = Verdict(Outcome(outcome), message, ranks)
        return cls(
            attempt, session, token, started, decided, world_size, pid, run_id, hostname, verdict
        )


@dataclass(frozen=True, slots=True)
class PartRecord(Record):
    """What a rank brought to an attempt; `stage_ns` and `write_ns` are durations."""

    KIND = 34
    _LAYOUT: ClassVar = struct.Struct("<QQQQQQ")

    token: int
    inode: int
    nbytes: int
    stage_ns: int
    write_ns: int
    arrived_ns: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(
            self.token, self.inode, self.nbytes, self.stage_ns, self.write_ns, self.arrived_ns
        )

    @classmethod
    def _from_body(cls, body: memoryview) -> PartRecord:
        return cls(*unpack_exactly(cls._LAYOUT, body))


class ObjectionKind(IntEnum):
    """Why a rank says that an attempt cannot succeed. The values are persisted."""

    WORLD_SIZE = 1
    """The rank was told another world_size, `value`."""

    ELSEWHERE = 2
    """The rank waits at another step, `value`."""

    FAILED = 3
    """The rank could not write its part; the message says why."""


@dataclass(frozen=True, slots=True)
class ObjectionRecord(Record):
    """One rank's objection to an attempt; attempt and rank are in the key."""

    KIND = 35
    _LAYOUT: ClassVar = struct.Struct("<BQI")

    kind: ObjectionKind
    value: int
    pid: int
    hostname: str
    message: str = ""

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(self.kind, self.value, self.pid)
        return fixed + pack_string(self.hostname) + pack_string(self.message)

    @classmethod
    def _from_body(cls, body: memoryview) -> ObjectionRecord:
        cursor = Cursor(body)
        kind, value, pid = cursor.take(cls._LAYOUT)
        record = cls(ObjectionKind(kind), value, pid, cursor.string(), cursor.string())
        cursor.done()
        return record
