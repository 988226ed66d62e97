"""Loads one rank's part of a step: its header, a comparison with the state, then the bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tectonic_client.checkpoint.directory import CheckpointDirectory, about
from tectonic_client.checkpoint.layout import TREE_KEY, Layout, plan_reads
from tectonic_client.checkpoint.names import check_rank, part_name
from tectonic_client.checkpoint.state import LoadPlan, build, flatten, match
from tectonic_client.checkpoint.transfer import StoredFile
from tectonic_client.checkpoint.tree import Node, decode_tree
from tectonic_client.errors import ChunkMissing, CorruptCheckpoint, RankMismatch
from tectonic_client.limits import CHECKPOINT_READ_GAP_BYTES


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank; bytes of the tensors that were read."""

    step: int
    rank: int
    bytes: int
    total_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes over the whole duration."""
        return self.bytes / self.total_s


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's file, opened."""

    step: int
    file: StoredFile
    layout: Layout
    tree: Node


async def load_state(
    directory: CheckpointDirectory, step: int | None, state: Any, rank: int, world_size: int
) -> LoadReport:
    """See `CheckpointManager.load`."""
    begun = time.perf_counter()
    part = await _open(directory, step, rank, world_size)
    with about(part.file):
        plan = match(flatten(state), part.tree, part.layout.by_name())
    read = await _fill(directory, part, plan)
    plan.assign()
    return LoadReport(part.step, rank, read, time.perf_counter() - begun)


async def read_state(
    directory: CheckpointDirectory, step: int | None, rank: int, world_size: int
) -> Any:
    """See `CheckpointManager.read`."""
    part = await _open(directory, step, rank, world_size)
    tensors = part.layout.by_name()
    with about(part.file):
        state = build(part.tree, tensors)
        plan = match(flatten(state), part.tree, tensors)
    await _fill(directory, part, plan)
    return state


async def _open(
    directory: CheckpointDirectory, step: int | None, rank: int, world_size: int
) -> _Part:
    check_rank(rank, world_size)
    step = await directory.require(step)
    index = await directory.index(step)
    if index.world_size != world_size:
        raise RankMismatch(
            f"step {step} was saved by {index.world_size} ranks, not by {world_size}:"
            " load it with as many ranks as saved it"
        )
    file = await directory.open_file(step, part_name(rank, world_size))
    layout = await directory.layout(file)
    document = layout.metadata.get(TREE_KEY)
    if document is None:
        raise CorruptCheckpoint(f"{file.name} does not describe a state: not written by tectonicfs")
    with about(file):
        return _Part(step, file, layout, decode_tree(document))


async def _fill(directory: CheckpointDirectory, part: _Part, plan: LoadPlan) -> int:
    """Read the tensors that the plan wants; returns their bytes."""
    positions = {tensor.name: index for index, tensor in enumerate(part.layout.tensors)}
    targets = {positions[name]: leaves for name, leaves in plan.targets}
    reads = plan_reads(
        part.layout, targets, part.file.borders(), gap_bytes=CHECKPOINT_READ_GAP_BYTES
    )
    try:
        await part.file.scatter(reads, targets)
    except ChunkMissing:
        await directory.require(part.step)  # a step that was deleted meanwhile is not corrupt
        raise
    tensors = (part.layout.tensors[index] for index in targets)
    return sum(tensor.end - tensor.start for tensor in tensors)
