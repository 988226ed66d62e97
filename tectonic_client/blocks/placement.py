"""Which store each chunk of a block goes to. Pure.

For single encoding the chunks of a block rotate over the active stores, so that every device works
on a large block; where the rotation starts is derived from the block's id, so that small blocks
spread too. Weights count as that many turns per round. Replication, Reed-Solomon and copysets will
choose among failure domains here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Final

from tectonic_client.errors import NoSpace
from tectonic_client.records import StoreRecord, StoreState

_MAX_TURNS: Final = 100
"""Of one store per round: whatever the weights, a rotation stays short."""


def rotation(stores: Iterable[StoreRecord]) -> tuple[int, ...]:
    """Store ids in the order of their turns. Raises NoSpace where none takes new chunks.

    Stores that are draining or have weight 0 get no turn, all others at least one.
    """
    active = sorted((s for s in stores if _takes_chunks(s)), key=lambda s: s.store_id)
    if not active:
        raise NoSpace("no store of the volume takes new chunks")
    unit = gcd(*(store.weight for store in active))
    unit = max(unit, -(-max(store.weight for store in active) // _MAX_TURNS))
    turns = [(store.store_id, max(1, round(store.weight / unit))) for store in active]
    rounds = max(count for _, count in turns)
    return tuple(sid for turn in range(rounds) for sid, count in turns if turn < count)


def _takes_chunks(store: StoreRecord) -> bool:
    return store.state is StoreState.ACTIVE and store.weight > 0


def store_for(turns: Sequence[int], block_id: int, index: int) -> int:
    """Store of chunk `index` of a block."""
    return turns[(block_id * 0x9E3779B97F4A7C15 // 2**32 + index) % len(turns)]
