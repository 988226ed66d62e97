"""Names of a checkpoint's directories and files. Pure."""

from __future__ import annotations

import re
from typing import Final

from tectonic_client.errors import InvalidArgument
from tectonic_client.limits import MAX_WORLD_SIZE

INDEX_NAME: Final = "index.json"
MAX_STEP: Final = 10**18 - 1

_STEP: Final = re.compile(r"step-([0-9]{10,18})")


def check_step(step: int) -> None:
    """Raise InvalidArgument for what cannot be a step."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise InvalidArgument(f"step {step!r} is not an integer from 0 to {MAX_STEP}")


def check_rank(rank: int, world_size: int) -> None:
    """Raise InvalidArgument for what cannot be a rank of so many."""
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size {world_size!r} is not from 1 to {MAX_WORLD_SIZE}")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise InvalidArgument(f"rank {rank!r} is not from 0 to {world_size - 1}")


def step_name(step: int) -> str:
    """Name of a step's directory; ten digits keep listings in order."""
    return f"step-{step:010d}"


def parse_step_name(name: str) -> int | None:
    """The step of a directory's name; None if it is none of ours."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def part_name(rank: int, world_size: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
