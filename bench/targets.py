"""Places that a rank saves its part of a checkpoint to and loads it from.

One object per rank and place, sent to the rank's process before it opens anything; the calls then
happen there. `save` returns when the bytes are durable, `load` when they are in memory. What a
place needs to be there before, and what it leaves, is made and removed in calls of their own.

torch and the packages behind the places are imported here: import this module only where a
benchmark runs.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bench.errors import BenchError
from bench.ranks import Rank
from bench.tensors import first_difference, make_destination, make_tensors, shard_shapes, size_bytes
from bench.workloads import (
    DirectFiles,
    DirectWork,
    check_contents,
    direct_buffer,
    read_direct,
    read_sequentially,
    sequential_buffer,
    sync_directory,
    write_direct,
    write_sequentially,
)

_COLLECTIVE_TIMEOUT: Final = timedelta(minutes=5)

Tensors = dict[str, torch.Tensor]


class CheckpointTarget(Protocol):
    """Where checkpoints go. All calls are made on every rank."""

    def open(self, rank: Rank) -> None:
        """Everything that a training job does once."""

    def prepare(self, rank: Rank, step: int) -> None:
        """Before a save."""

    def save(self, rank: Rank, step: int) -> None:
        """Store the rank's part, durable."""

    def load(self, rank: Rank, step: int) -> None:
        """Bring the rank's part back."""

    def check(self, rank: Rank, step: int) -> None:
        """Raise BenchError if what was loaded last is not what was saved."""

    def remove(self, rank: Rank, step: int) -> None:
        """Free the space of a step."""

    def close(self, rank: Rank) -> None:
        """Undo `open`."""


# --- a rank's memory --------------------------------------------------------------------------


@dataclass(slots=True)
class RankState:
    """What a rank saves, and memory to load into."""

    source: Tensors
    destination: Tensors
    size_bytes: int


def make_state(rank: Rank, total_bytes: int, seed: int) -> int:
    """Make the rank's tensors; returns their bytes. The size of all is about `total_bytes`."""
    shapes = shard_shapes(total_bytes, rank.world_size)
    source = make_tensors(shapes, seed + rank.number)
    state = RankState(source, make_destination(shapes), size_bytes(shapes))
    rank.objects["state"] = state
    return state.size_bytes


def state_of(rank: Rank) -> RankState:
    """What `make_state` made."""
    state = rank.objects["state"]
    assert isinstance(state, RankState)
    return state


# --- the raw device ---------------------------------------------------------------------------


@dataclass(slots=True)
class RawDevice:
    """The same bytes by O_DIRECT: the limit. `workers` threads in all, spread over the ranks."""

    directory: Path
    total_bytes: int
    write_workers: int = 4
    read_workers: int = 4
    _executor: ThreadPoolExecutor | None = None
    _buffers: list[memoryview] = field(default_factory=list)

    def open(self, rank: Rank) -> None:
        self._executor = ThreadPoolExecutor()

    def prepare(self, rank: Rank, step: int) -> None:
        if rank.number == 0:
            self._files(step).directory.mkdir()
        most = max(self.write_workers, self.read_workers)
        wanted = len(range(rank.number, most, rank.world_size))
        self._buffers += [direct_buffer() for _ in range(wanted - len(self._buffers))]

    def save(self, rank: Rank, step: int) -> None:
        self._run(write_direct, rank, step, self.write_workers)
        sync_directory(self._files(step).directory)

    def load(self, rank: Rank, step: int) -> None:
        self._run(read_direct, rank, step, self.read_workers)

    def check(self, rank: Rank, step: int) -> None:
        """Nothing to check: the reads that were short have raised."""

    def remove(self, rank: Rank, step: int) -> None:
        if rank.number == 0:
            shutil.rmtree(self._files(step).directory)

    def close(self, rank: Rank) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def _files(self, step: int) -> DirectFiles:
        return DirectFiles(self.directory / str(step), self.total_bytes)

    def _run(self, work: DirectWork, rank: Rank, step: int, workers: int) -> None:
        assert self._executor is not None
        mine = range(rank.number, workers, rank.world_size)
        futures = [
            self._executor.submit(work, buffer, self._files(step).share(worker, workers))
            for worker, buffer in zip(mine, self._buffers, strict=False)
        ]
        for future in futures:
            future.result()


# --- files of tensors in a directory ----------------------------------------------------------


@dataclass(slots=True)
class _StepDirectories:
    """A directory for each step; `_loaded` is what the last load returned."""

    directory: Path
    _loaded: Tensors | None = None

    def open(self, rank: Rank) -> None:
        pass

    def prepare(self, rank: Rank, step: int) -> None:
        self._loaded = None
        for tensor in state_of(rank).destination.values():
            tensor.zero_()
        if rank.number == 0:
            self._step_directory(step).mkdir()

    def check(self, rank: Rank, step: int) -> None:
        assert self._loaded is not None, "not loaded"
        difference = first_difference(self._loaded, state_of(rank).source)
        if difference is not None:
            raise BenchError(f"rank {rank.number}: {difference} was not loaded as it was saved")
        self._loaded = None

    def remove(self, rank: Rank, step: int) -> None:
        if rank.number == 0:
            shutil.rmtree(self._step_directory(step))

    def close(self, rank: Rank) -> None:
        pass

    def _step_directory(self, step: int) -> Path:
        return self.directory / str(step)

    def _path(self, rank: Rank, step: int) -> Path:
        return self._step_directory(step) / f"rank-{rank.number:05d}"


class TorchFiles(_StepDirectories):
    """torch.save with fsync, and torch.load, which brings its own memory."""

    def save(self, rank: Rank, step: int) -> None:
        path = self._path(rank, step)
        with path.open("wb") as file:
            torch.save(state_of(rank).source, file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)

    def load(self, rank: Rank, step: int) -> None:
        self._loaded = torch.load(self._path(rank, step), weights_only=True)


class SafetensorsFiles(_StepDirectories):
    """safetensors' save_file with fsync; load_file, which maps the file, and a copy out of it."""

    def save(self, rank: Rank, step: int) -> None:
        path = self._path(rank, step)
        save_file(state_of(rank).source, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sync_directory(path.parent)

    def load(self, rank: Rank, step: int) -> None:
        destination = state_of(rank).destination
        for name, tensor in load_file(path := self._path(rank, step)).items():
            if name not in destination:
                raise BenchError(f"{path} has a tensor {name} that was not saved")
            destination[name].copy_(tensor)
        self._loaded = destination


class DistributedCheckpoint(_StepDirectories):
    """torch.distributed.checkpoint over gloo, each rank with tensors of its own, files synced."""

    def open(self, rank: Rank) -> None:
        # Without it gloo asks for the address of the host's name, which not every host has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.directory / 'rendezvous'}",
            rank=rank.number, world_size=rank.world_size, timeout=_COLLECTIVE_TIMEOUT,
        )  # fmt: skip

    def save(self, rank: Rank, step: int) -> None:
        writer = FileSystemWriter(self._step_directory(step), sync_files=True)
        torch.distributed.checkpoint.save(
            _named_by_rank(rank, state_of(rank).source), storage_writer=writer
        )

    def load(self, rank: Rank, step: int) -> None:
        destination = state_of(rank).destination
        torch.distributed.checkpoint.load(
            _named_by_rank(rank, destination),
            storage_reader=FileSystemReader(self._step_directory(step)),
        )
        self._loaded = destination

    def close(self, rank: Rank) -> None:
        torch.distributed.destroy_process_group()


def _named_by_rank(rank: Rank, tensors: Tensors) -> dict[str, Any]:
    return {f"rank{rank.number}.{name}": tensor for name, tensor in tensors.items()}


# --- files in a mount -------------------------------------------------------------------------


@dataclass(slots=True)
class SequentialFiles:
    """A file for each of the first `writers` ranks: plain sequential writes and fsync, reads.

    `directory` is one of any file system; one that stores nothing cannot be `checked`.
    """

    directory: Path
    total_bytes: int
    writers: int
    checked: bool = True
    _buffer: memoryview | None = None
    _other: memoryview | None = None

    def open(self, rank: Rank) -> None:
        pass

    def prepare(self, rank: Rank, step: int) -> None:
        # Made here and not before: buffers do not travel to the rank's process.
        self._buffer = self._buffer or sequential_buffer()
        self._other = self._other or sequential_buffer()

    def save(self, rank: Rank, step: int) -> None:
        assert self._buffer is not None
        if rank.number < self.writers:
            write_sequentially(self._path(rank, step), self._size, self._buffer)

    def load(self, rank: Rank, step: int) -> None:
        assert self._other is not None
        if rank.number < self.writers:
            read_sequentially(self._path(rank, step), self._size, self._other)

    def check(self, rank: Rank, step: int) -> None:
        assert self._buffer is not None
        if self.checked and rank.number < self.writers:
            check_contents(self._path(rank, step), self._size, self._buffer)

    def remove(self, rank: Rank, step: int) -> None:
        if rank.number < self.writers:
            self._path(rank, step).unlink()

    def close(self, rank: Rank) -> None:
        pass

    @property
    def _size(self) -> int:
        return self.total_bytes // self.writers

    def _path(self, rank: Rank, step: int) -> Path:
        return self.directory / f"{step}-rank-{rank.number:05d}"


# --- the checkpoint API -----------------------------------------------------------------------


@dataclass(slots=True)
class CheckpointAPI:
    """CheckpointManager over a volume."""

    meta_url: str
    directory: str = "/bench"
    _manager: Any = None

    def open(self, rank: Rank) -> None:
        from tectonic_client.checkpoint import CheckpointManager

        self._manager = CheckpointManager(
            self.meta_url, self.directory, rank=rank.number, world_size=rank.world_size
        )

    def prepare(self, rank: Rank, step: int) -> None:
        for tensor in state_of(rank).destination.values():
            tensor.zero_()

    def save(self, rank: Rank, step: int) -> None:
        self._manager.save(step, {"model": state_of(rank).source, "step": step})

    def load(self, rank: Rank, step: int) -> None:
        self._manager.load({"model": state_of(rank).destination, "step": step}, step=step)

    def check(self, rank: Rank, step: int) -> None:
        difference = first_difference(state_of(rank).destination, state_of(rank).source)
        if difference is not None:
            raise BenchError(f"rank {rank.number}: {difference} was not loaded as it was saved")

    def remove(self, rank: Rank, step: int) -> None:
        if rank.number == 0:
            self._manager.delete(step)

    def close(self, rank: Rank) -> None:
        self._manager.close()


# --- what the ranks are told ------------------------------------------------------------------


def use(rank: Rank, name: str, target: CheckpointTarget) -> None:
    """Open a target and keep it under a name."""
    target.open(rank)
    rank.objects[name] = target


def tell(rank: Rank, name: str, action: str, *arguments: object) -> None:
    """Call a method of a target that is kept."""
    getattr(rank.objects[name], action)(rank, *arguments)
