"""The plain functions that move bytes, the state that is saved, and what is known of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import caches, memory
from bench.errors import BenchError
from bench.tensors import first_difference, make_tensors, shard_shapes, size_bytes
from bench.workloads import (
    DIRECT_FILE_BYTES,
    REQUEST_BYTES,
    DirectFiles,
    check_contents,
    direct_buffer,
    read_direct,
    read_sequentially,
    sequential_buffer,
    write_direct,
    write_sequentially,
)
from tectonic_client.limits import ALIGNMENT_BYTES, KiB, MiB


@given(total=st.integers(1, 40 * DIRECT_FILE_BYTES), workers=st.integers(1, 9))
def test_workers_share_all_bytes_and_no_file_twice(total: int, workers: int) -> None:
    """Together the workers move every byte once, in files of whole device blocks."""
    files = DirectFiles(Path("/x"), total)
    found = [part for worker in range(workers) for part in files.share(worker, workers)]
    assert len({path for path, _ in found}) == len(found)
    assert all(size % ALIGNMENT_BYTES == 0 for _, size in found)
    assert 0 <= sum(size for _, size in found) - total < ALIGNMENT_BYTES


def test_direct_files_come_back_as_written(disk_path: Path) -> None:
    """What is written past the page cache is read past it, byte for byte."""
    files = list(DirectFiles(disk_path, DIRECT_FILE_BYTES + 10 * KiB).share(0, 1))
    written, found = direct_buffer(), direct_buffer()
    write_direct(written, files)
    assert [os.stat(path).st_size for path, _ in files] == [DIRECT_FILE_BYTES, 12 * KiB]
    assert found != written
    read_direct(found, files[:1])
    assert found == written


def test_a_sequential_file_is_checked_down_to_the_place_of_each_byte(tmp_path: Path) -> None:
    """A flipped bit, two writes that changed places, and a short file are all found."""
    buffer, size = sequential_buffer(), 2 * REQUEST_BYTES + 100
    path = tmp_path / "file"
    write_sequentially(path, size, buffer)
    assert path.stat().st_size == size
    read_sequentially(path, size, sequential_buffer())
    check_contents(path, size, buffer)
    whole = path.read_bytes()
    swapped = whole[REQUEST_BYTES : 2 * REQUEST_BYTES] + whole[:REQUEST_BYTES]
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for wrong in (bytes(flipped), swapped + whole[2 * REQUEST_BYTES :]):
        path.write_bytes(wrong)
        with pytest.raises(BenchError, match="reads back wrong"):
            check_contents(path, size, buffer)
    path.write_bytes(whole[:-1])
    with pytest.raises(BenchError, match="moved 99 of 100"):
        read_sequentially(path, size, buffer)


@given(total=st.integers(1 * MiB, 64 * 1024 * MiB), ranks=st.sampled_from([1, 2, 4, 7, 64]))
def test_the_state_has_about_the_size_asked_for(total: int, ranks: int) -> None:
    """All ranks together hold at most the bytes asked for, and nearly that many."""
    held = size_bytes(shard_shapes(total, ranks)) * ranks
    assert held <= max(total, 64 * 2 * ranks)
    assert held > 0.9 * total - 64 * KiB * ranks


def test_one_gibibyte_is_a_realistic_transformer() -> None:
    """The default state has many tensors of a few MiB and some tiny ones, like a real model."""
    sizes = [2 * torch.Size(shape).numel() for shape in shard_shapes(1024 * MiB, 4).values()]
    assert len(sizes) > 50
    assert sum(size >= MiB for size in sizes) > len(sizes) / 2
    assert min(sizes) < 4 * KiB


def test_a_difference_of_one_bit_or_a_missing_tensor_is_found() -> None:
    """What was loaded is compared bit by bit, NaN and negative zero included."""
    tensors = make_tensors({"a": (3, 5), "b": (7,)}, seed=1)
    tensors["b"][0], tensors["b"][1] = float("nan"), 0.0
    same = {name: tensor.clone() for name, tensor in tensors.items()}
    assert first_difference(same, tensors) is None
    same["b"][1] = -0.0
    assert first_difference(same, tensors) == "b"
    del same["a"]
    assert first_difference(same, tensors) == "a"


def test_dropped_caches_make_a_read_come_from_the_device(disk_path: Path) -> None:
    """After a drop a file's bytes are read from the device again, and only then."""
    path = disk_path / "file"
    path.write_bytes(os.urandom(4 * MiB))
    caches.drop(disk_path)
    before = caches.device_read_bytes()
    path.read_bytes()
    cold = caches.device_read_bytes()
    path.read_bytes()
    assert cold - before >= 4 * MiB
    assert caches.device_read_bytes() == cold


def test_the_peak_of_memory_is_seen_after_it_was_given_back() -> None:
    """A passing use of memory shows in the peak, and a reset forgets it."""
    memory.reset_peak()
    start = memory.resident_bytes()
    touched = bytearray(os.urandom(1)) * (64 * MiB)
    del touched
    assert memory.peak_resident_bytes() - start > 60 * MiB
    memory.reset_peak()
    assert memory.peak_resident_bytes() - start < 60 * MiB
