"""Carries out one rank's side of a collective save: `collective.Save` says what, this does it.

The upload of the rank's file and the protocol run side by side, so that a save that cannot succeed
(the step exists, a rank is dead) ends without waiting for the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from tectonic_client.checkpoint.attempts import Arrival, Attempt
from tectonic_client.checkpoint.collective import Pause, Read, Request, Save, Transact, WriteIndex
from tectonic_client.checkpoint.index import check_metadata, encode_index, make_index
from tectonic_client.checkpoint.layout import TREE_KEY, Shaped, lay_out
from tectonic_client.checkpoint.leaves import wait_for_devices
from tectonic_client.checkpoint.members import Identity, Memory
from tectonic_client.checkpoint.rundirectory import PendingFile, RunDirectory
from tectonic_client.checkpoint.state import FlatState, flatten
from tectonic_client.checkpoint.transfer import discard_file, write_bytes, write_file
from tectonic_client.checkpoint.tree import encode_tree
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.errors import TectonicError, TransientError, UnknownOutcome
from tectonic_client.limits import CHECKPOINT_GIVE_UP_S, CHECKPOINT_POLL_MAX_S, SLOW_STEP_S
from tectonic_client.metadata.blocks import read_blocks
from tectonic_client.volume import Volume

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did on this rank; seconds of its phases, bytes of its file.

    `write_s` is copying, checksumming and storing this rank's bytes; `commit_s` the wait until all
    parts are there and the step is durable.
    """

    step: int
    rank: int
    bytes: int
    write_s: float
    commit_s: float
    total_s: float

    @property
    def bytes_per_s(self) -> float:
        """This rank's bytes over the whole duration."""
        return self.bytes / self.total_s


class _Upload:
    """The rank's file on its way into the stores."""

    def __init__(self, volume: Volume, directory: int, flat: FlatState) -> None:
        self._volume = volume
        self._directory = directory
        self._flat = flat
        self.ended = trio.Event()
        self.file: PendingFile | None = None
        self.seconds = 0.0

    async def run(self) -> None:
        begun = time.perf_counter()
        shapes = [Shaped(leaf.name, leaf.dtype, leaf.shape) for leaf in self._flat.leaves]
        layout, header = lay_out(shapes, {TREE_KEY: encode_tree(self._flat.tree)})
        await self._volume.filesystem.quotas.admit_below(self._directory, layout.file_bytes)
        leaves = {leaf.name: leaf for leaf in self._flat.leaves}
        await trio.to_thread.run_sync(wait_for_devices, self._flat.leaves)
        inode = await self._volume.ids.next_id()
        written = await write_file(self._volume, layout, header, leaves, time.time_ns())
        self.seconds = time.perf_counter() - begun
        self.file = PendingFile(inode, written)
        self.ended.set()

    def arrival(self) -> Arrival | None:
        """What the protocol needs once the file is durable."""
        return None if self.file is None else Arrival(self.file, 0.0, self.seconds)


async def save_state(
    volume: Volume, directory: RunDirectory, me: Identity, memory: Memory, step: int, state: Any,
    timeout_s: float, metadata: Mapping[str, Any],
) -> SaveReport:  # fmt: skip
    """See `CheckpointManager.save`."""
    begun = time.perf_counter()
    upload: _Upload | None = None
    save = Save(
        directory, me, memory, step, attempt_id=await _attempt_id(volume, me, timeout_s),
        arrival=lambda: None if upload is None else upload.arrival(), clock=trio.current_time,
        timeout_s=timeout_s, hindrance=partial(volume.stores.unanswered, SLOW_STEP_S / 2),
    )  # fmt: skip
    driver = _Driver(volume, metadata)
    try:
        check_metadata(metadata)
        upload = _Upload(volume, directory.inode, flatten(state))
        driver.interrupt = upload.ended
        with unwrapped_groups():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(upload.run)
                await driver.run(save.run())
    except BaseException as error:
        with trio.move_on_after(CHECKPOINT_GIVE_UP_S, shield=True):
            await _give_up(driver, save, error)
        raise
    finally:
        with trio.move_on_after(CHECKPOINT_GIVE_UP_S, shield=True):
            await driver.remove_unused(upload)
    await volume.audience.has_seen(directory.take_positions())
    assert upload.file is not None
    total_s = time.perf_counter() - begun
    return SaveReport(
        step=step, rank=me.rank, bytes=upload.file.nbytes, write_s=upload.seconds,
        commit_s=total_s - upload.seconds, total_s=total_s,
    )  # fmt: skip


async def _attempt_id(volume: Volume, me: Identity, timeout_s: float) -> int:
    """A fresh inode id for rank 0, 0 for others, who need none.

    Without an attempt there is no way to tell the others that this rank failed: they would wait for
    their timeout. So it is tried for as long.
    """
    if me.rank != 0:
        return 0
    deadline = trio.current_time() + timeout_s
    while True:
        try:
            return await volume.ids.next_id()
        except (TransientError, UnknownOutcome):
            if trio.current_time() >= deadline:
                raise
        await trio.sleep(CHECKPOINT_POLL_MAX_S)


async def _give_up(driver: _Driver, save: Save, error: BaseException) -> None:
    """Tell the others at once. Whoever interrupts a save does not want to wait for that."""
    patient = isinstance(error, Exception)
    reason = (str(error) or type(error).__name__) if patient else "it was interrupted"
    try:
        await driver.run(save.give_up(reason, patient=patient))
    except TectonicError as second:
        _log.info("giving up a save: %s", second)


class _Driver:
    """Carries out the requests of the protocol."""

    def __init__(self, volume: Volume, metadata: Mapping[str, Any]) -> None:
        self._volume = volume
        self._metadata = metadata
        self._indexes: list[PendingFile] = []
        self._answers_lost = False
        self.interrupt = trio.Event()

    async def remove_unused(self, upload: _Upload | None) -> None:
        """Delete the chunks of files that no attempt has taken over.

        Where the answer to a transaction was lost, it may still be taking them over: they are left
        to whoever cleans up the lease when this session has ended.
        """
        file = None if upload is None else upload.file
        for pending in (*self._indexes, *([] if file is None else [file])):
            blocks = pending.written.blocks
            try:
                named = await self._volume.kv.read(partial(read_blocks, block_ids=list(blocks)))
                if any(record is not None for record in named):
                    continue
                if not self._answers_lost:
                    await discard_file(self._volume, pending.written)
                    continue
            except TectonicError as error:
                _log.info("removing unused chunks: %s", error)
            for block_id in blocks:
                self._volume.debris.note(block_id)

    async def run(self, steps: Generator[Request, Any, Attempt | None]) -> None:
        """Run a generator of the protocol to its end. Raises what it raises.

        It is closed on the way out: a cancelled save is over before it is given up.
        """
        with contextlib.closing(steps):
            await self._drive(steps)

    async def _drive(self, steps: Generator[Request, Any, Attempt | None]) -> None:
        answer: Any = None
        failure: TectonicError | None = None
        while True:
            try:
                request = steps.throw(failure) if failure is not None else steps.send(answer)
            except StopIteration:
                return
            answer, failure = None, None
            try:
                answer = await self._answer(request)
            except TectonicError as error:
                self._answers_lost = self._answers_lost or isinstance(error, UnknownOutcome)
                failure = error

    async def _answer(self, request: Request) -> Any:
        match request:
            case Read(fn):
                return await self._volume.kv.read(fn)
            case Transact(fn, durable):
                return await self._volume.kv.transact(fn, durable=durable)
            case Pause(seconds):
                await self._pause(seconds)
                return None
            case WriteIndex(attempt, parts):
                data = encode_index(
                    make_index(attempt.step, attempt.record, parts, time.time_ns(), self._metadata)
                )
                inode = await self._volume.ids.next_id()
                written = await write_bytes(self._volume, data, time.time_ns())
                self._indexes.append(PendingFile(inode, written))
                return self._indexes[-1]

    async def _pause(self, seconds: float) -> None:
        if self.interrupt.is_set():
            await trio.sleep(seconds)
            return
        with trio.move_on_after(seconds):
            await self.interrupt.wait()
