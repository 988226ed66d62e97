"""The index of a step: `index.json`, who saved it, when, and what each rank took.

    {"format": "tectonicfs.checkpoint", "version": 1, "step": 100, "world_size": 2,
     "run_id": "...", "committed_at": "2026-01-31T12:00:00.000000+00:00", "total_bytes": 30,
     "metadata": {...},
     "ranks": [{"rank": 0, "file": "rank-00000-of-00002.safetensors", "bytes": 10,
                "stage_s": 0.1, "write_s": 0.5, "arrive_s": 0.7}, ...]}

`metadata` is the caller's. Per rank: seconds spent on staging and on writing, and when it arrived,
in seconds since the attempt began. Pure; parsing trusts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tectonic_client.checkpoint.names import MAX_STEP, part_name
from tectonic_client.checkpoint.records import AttemptRecord, PartRecord
from tectonic_client.errors import CorruptCheckpoint, FormatTooNew, InvalidArgument
from tectonic_client.limits import MAX_CHECKPOINT_INDEX_BYTES, MAX_WORLD_SIZE

INDEX_FORMAT: Final = "tectonicfs.checkpoint"
INDEX_VERSION: Final = 1

_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank's file: its name, size in bytes and the rank's times in seconds."""

    rank: int
    file: str
    bytes: int
    stage_s: float
    write_s: float
    arrive_s: float


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What is known of a step besides its arrays; `ranks` in order."""

    step: int
    world_size: int
    run_id: str
    committed_at: datetime
    ranks: tuple[RankEntry, ...]
    metadata: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks' files."""
        return sum(entry.bytes for entry in self.ranks)


def make_index(
    step: int, attempt: AttemptRecord, parts: Mapping[int, PartRecord], now_ns: int,
    metadata: Mapping[str, Any],
) -> StepIndex:  # fmt: skip
    """The index of a complete attempt that is committed at `now_ns`."""
    ranks = tuple(
        RankEntry(
            rank=rank,
            file=part_name(rank, attempt.world_size),
            bytes=part.nbytes,
            stage_s=part.stage_ns / _NS_PER_S,
            write_s=part.write_ns / _NS_PER_S,
            arrive_s=max(0, part.arrived_ns - attempt.started_ns) / _NS_PER_S,
        )
        for rank, part in sorted(parts.items())
    )
    committed_at = datetime.fromtimestamp(now_ns // 1000 / 1_000_000, UTC)
    return StepIndex(step, attempt.world_size, attempt.run_id, committed_at, ranks, metadata)


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise InvalidArgument unless the caller's metadata can be kept in an index."""
    try:
        text = json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the step's metadata is not JSON: {error}") from error
    if len(text) > MAX_CHECKPOINT_INDEX_BYTES // 4:
        raise InvalidArgument(
            f"the step's metadata takes {len(text)} bytes, at most"
            f" {MAX_CHECKPOINT_INDEX_BYTES // 4} are allowed"
        )


def encode_index(index: StepIndex) -> bytes:
    """Bytes of the file, one rank a line."""
    head = {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "step": index.step,
        "world_size": index.world_size,
        "run_id": index.run_id,
        "committed_at": index.committed_at.isoformat(timespec="microseconds"),
        "total_bytes": index.total_bytes,
        "metadata": dict(index.metadata),
    }
    ranks = ",\n  ".join(json.dumps(_rank_fields(entry)) for entry in index.ranks)
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return ("{\n " + ",\n ".join([*fields, f'"ranks": [\n  {ranks}\n ]']) + "\n}\n").encode("ascii")


def _rank_fields(entry: RankEntry) -> dict[str, Any]:
    return {
        "rank": entry.rank,
        "file": entry.file,
        "bytes": entry.bytes,
        "stage_s": round(entry.stage_s, 6),
        "write_s": round(entry.write_s, 6),
        "arrive_s": round(entry.arrive_s, 6),
    }


def parse_index(data: bytes) -> StepIndex:
    """The index of these bytes. Raises CorruptCheckpoint, FormatTooNew."""
    if len(data) > MAX_CHECKPOINT_INDEX_BYTES:
        raise CorruptCheckpoint(f"checkpoint index of {len(data)} bytes")
    try:
        value = json.loads(data)
        if not isinstance(value, dict) or value.get("format") != INDEX_FORMAT:
            raise ValueError(f"it is not of the format {INDEX_FORMAT}")
        version = _whole(value["version"], 1 << 31)
        if version <= INDEX_VERSION:
            return _parse(value)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"checkpoint index: {error}") from error
    raise FormatTooNew(
        f"checkpoint index version {version} was written by a newer release"
        f" (this one knows {INDEX_VERSION}): upgrade tectonicfs"
    )


def _parse(value: dict[str, Any]) -> StepIndex:
    world_size = _whole(value["world_size"], MAX_WORLD_SIZE)
    committed_at = datetime.fromisoformat(value["committed_at"])
    if committed_at.tzinfo is None:
        raise ValueError("committed_at has no time zone")
    run_id, metadata = value["run_id"], value["metadata"]
    if not isinstance(run_id, str) or not isinstance(metadata, dict):
        raise ValueError("run_id is not a string or metadata not an object")
    if len(value["ranks"]) != world_size:
        raise ValueError(f"{len(value['ranks'])} ranks of {world_size}")
    ranks = tuple(_parse_rank(rank, world_size, item) for rank, item in enumerate(value["ranks"]))
    step = _whole(value["step"], MAX_STEP)
    index = StepIndex(step, world_size, run_id, committed_at, ranks, metadata)
    if value["total_bytes"] != index.total_bytes:
        raise ValueError(f"total_bytes is not the sum of the ranks' {index.total_bytes}")
    return index


def _parse_rank(rank: int, world_size: int, item: Any) -> RankEntry:
    name = part_name(rank, world_size)
    if item["rank"] != rank or item["file"] != name:
        raise ValueError(f"entry {rank} is not rank {rank} with file {name}")
    times = [_seconds(item[key]) for key in ("stage_s", "write_s", "arrive_s")]
    return RankEntry(rank, name, _whole(item["bytes"], 1 << 63), *times)


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not an integer from 0 to {most}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)
