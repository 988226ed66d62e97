"""Steps whose stored bytes are damaged: the error names what and where, nothing wrong is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.chunkstore.port import ChunkKey, ChunkStore
from tectonic_client.chunkstore.wrappers import Fail, Fault, FaultyStore
from tectonic_client.errors import (
    ChunkMissing,
    CorruptCheckpoint,
    CorruptChunk,
    FormatTooNew,
    StateMismatch,
    StoreUnavailable,
    TectonicError,
)
from tectonic_client.types import AttributeChanges
from tectonic_client.volume import VolumeOptions, open_volume
from tests.checkpoint.damage import Damage, StoredChunk, chunks_of
from tests.checkpoint.rankprocesses import same, state_of
from tests.checkpoint.threadranks import save_together, thread_ranks

RUN = "/runs/test"
PART = f"{RUN}/step-0000000001/rank-00000-of-00001.safetensors"
INDEX = f"{RUN}/step-0000000001/index.json"


def _manager(url: str) -> CheckpointManager:
    return CheckpointManager(url, RUN, run_id="damage")


@pytest.fixture
def saved(url: str) -> str:
    """A volume with steps 1 and 2 of seeds 1 and 2."""
    with _manager(url) as manager:
        for step in (1, 2):
            manager.save(step, state_of(0, step))
    return url


def _middle_of_weights(url: str) -> StoredChunk:
    """`weights` comes last in the file (bytes have the smallest elements)."""
    return chunks_of(url, PART)[-2]


def _assert_names(error: Exception, chunk: StoredChunk, tensor: str = "weights") -> None:
    for word in (f"tensor {tensor}", PART, *chunk.words):
        assert word in str(error), str(error)


@pytest.mark.parametrize("how", get_args(Damage))
def test_a_damaged_chunk_is_never_loaded(saved: str, how: Damage) -> None:
    """load, read and verify name tensor, file, block and store; the other step is untouched."""
    chunk = _middle_of_weights(saved)
    chunk.damage(how)
    kind = ChunkMissing if how == "remove" else CorruptChunk
    with _manager(saved) as manager:
        state = state_of(0, 7)
        with pytest.raises(kind) as caught:
            manager.load(state, 1)
        _assert_names(caught.value, chunk)
        assert state["step"] == 7
        assert state["name"] == "rank 0"
        with pytest.raises(kind) as caught:
            manager.read(1)
        _assert_names(caught.value, chunk)
        report = manager.verify(1)
        assert not report.ok
        assert (report.files, report.bytes) == (0, 0)
        (problem,) = report.problems
        _assert_names(Exception(problem), chunk)
        assert manager.verify(2).ok
        assert manager.steps() == [1, 2]
        manager.load(state)
        assert same(state, state_of(0, 2))


def test_verify_reports_every_bad_chunk(saved: str) -> None:
    """It reads on behind the first one, and the rest of the step too."""
    chunks = chunks_of(saved, PART)
    for chunk in chunks[1::2]:
        chunk.damage("flip")
    with _manager(saved) as manager:
        problems = manager.verify(1).problems
    assert len(problems) == len(chunks[1::2]) > 2
    for chunk in chunks[1::2]:
        assert any(all(word in problem for word in chunk.words) for problem in problems)


def test_a_message_names_few_of_many_tensors(url: str) -> None:
    """A chunk that holds hundreds of tensors does not make a message of hundreds of names."""
    with _manager(url) as manager:
        manager.save(1, {f"t{number:03}": np.full(50, number) for number in range(300)})
        chunks_of(url, PART)[1].damage("flip")
        (problem,) = manager.verify(1).problems
        with pytest.raises(CorruptChunk, match="more: ") as caught:
            manager.read(1)
    for message in (problem, str(caught.value)):
        assert message.startswith("tensors t")
        assert len(message) < 400


def test_a_device_that_fails_requests_is_reported_by_verify(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector is an I/O error, not a wrong checksum: verify reads on and says so."""
    broken = chunks_of(saved, PART)[2]
    key = ChunkKey(broken.block_id, broken.chunk)
    bad_sector = Fail(StoreUnavailable("injected: Input/output error"))

    def wrap(store: ChunkStore) -> ChunkStore:
        return FaultyStore(store, [Fault("get_into", bad_sector, times=None, key=key)])

    monkeypatch.setattr(
        "tectonic_client.checkpoint.manager.VolumeOptions",
        lambda **options: VolumeOptions(wrap_store=wrap, **options),
    )
    with _manager(saved) as manager:
        (problem,) = manager.verify(1).problems
        _assert_names(Exception(problem), broken, "moments.0")
        assert "Input/output error" in problem
        assert manager.verify(2).ok
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            manager.read(1)


def _overwrite(url: str, path: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file as a program would that writes through a mount."""

    async def main() -> None:
        async with open_volume(url) as volume:
            fs = volume.filesystem
            inode = await fs.resolve(path)
            handle = await fs.open(inode, os.O_RDWR)
            data = bytes(await fs.read(handle, 0, (await fs.getattr(inode)).size))
            await fs.setattr(inode, AttributeChanges(size=0))
            await fs.write(handle, 0, change(data))
            await fs.release(handle)

    trio.run(main)


def _too_new(data: bytes) -> bytes:
    return data.replace(b'"version": 1', b'"version": 9')


def _too_new_tree(data: bytes) -> bytes:
    assert data.count(b'\\"version\\":1') == 1
    return data.replace(b'\\"version\\":1', b'\\"version\\":9')


_OVERWRITTEN: list[tuple[str, Callable[[bytes], bytes], type[TectonicError]]] = [
    (INDEX, lambda data: b"not JSON", CorruptCheckpoint),
    (INDEX, lambda data: data[:-10], CorruptCheckpoint),
    (INDEX, _too_new, FormatTooNew),
    (PART, lambda data: data[:4], CorruptCheckpoint),
    (PART, lambda data: data[:-1], CorruptCheckpoint),
    (PART, lambda data: b"\xff" * 8 + data[8:], CorruptCheckpoint),
    (PART, lambda data: data.replace(b"tectonicfs.tree", b"somebodys.trees"), CorruptCheckpoint),
    (PART, lambda data: data.replace(b'"weights":{', b'"heights":{', 1), CorruptCheckpoint),
    (PART, _too_new_tree, FormatTooNew),
]


@pytest.mark.parametrize(("path", "change", "kind"), _OVERWRITTEN)
def test_a_file_that_somebody_changed_is_named(
    saved: str, path: str, change: Callable[[bytes], bytes], kind: type[TectonicError]
) -> None:
    """Its checksums are right, its content is not: the error says which file, and nothing loads."""
    _overwrite(saved, path, change)
    with _manager(saved) as manager:
        state = state_of(0, 7)
        with pytest.raises(kind) as caught:
            manager.load(state, 1)
        assert path in str(caught.value)
        assert same(state, state_of(0, 7))
        assert manager.verify(2).ok


def test_a_part_that_is_gone_is_named(saved: str) -> None:
    """Somebody removed a rank's file through a mount: it is missing, not the step."""

    async def remove() -> None:
        async with open_volume(saved) as volume:
            parent = await volume.filesystem.resolve(os.path.dirname(PART))
            await volume.filesystem.unlink(parent, os.path.basename(PART).encode())

    trio.run(remove)
    with _manager(saved) as manager:
        for read in (lambda: manager.read(1), lambda: manager.load(state_of(0, 7), 1)):
            with pytest.raises(CorruptCheckpoint, match=f"{PART} is missing"):
                read()
        assert manager.verify(1).problems == (f"{PART} is missing",)


def test_a_state_that_differs_is_not_touched(saved: str) -> None:
    """StateMismatch lists every difference at once, and not a byte of the state has changed."""
    state: dict[str, Any] = {
        "weights": np.full(300_000, 7, np.int8),
        "moments": [np.full((300, 100), 7.0), np.full(7, 7, np.float32), np.full(1, 7)],
        "step": 7,
        "extra": np.full(3, 7),
    }
    with _manager(saved) as manager, pytest.raises(StateMismatch) as caught:
        manager.load(state, 1)
    said = "\n".join(caught.value.problems)
    for difference in ("weights: dtype", "moments.0: shape", "moments: 3 items", "extra", "name"):
        assert difference in said
        assert difference in str(caught.value)
    assert len(caught.value.problems) == 5
    assert state["step"] == 7
    for array in (state["weights"], *state["moments"], state["extra"]):
        assert (array == 7).all()


def test_every_part_of_a_step_is_verified(url: str) -> None:
    """A damaged part of one rank is found by any rank's verify, and stops only that rank's load."""
    with thread_ranks(url, 3) as ranks:
        save_together(ranks, 1, [state_of(rank, 1) for rank in range(3)], timeout=30)
        part = f"{RUN}/step-0000000001/rank-00001-of-00003.safetensors"
        chunks_of(url, part)[0].damage("remove")
        report = ranks[2].manager.verify(1)
        (problem,) = report.problems
        assert part in problem
        assert report.files == 2
        with pytest.raises(ChunkMissing, match="rank-00001"):
            ranks[1].manager.read(1)
        for rank in (0, 2):
            assert same(ranks[rank].manager.read(1), state_of(rank, 1))
