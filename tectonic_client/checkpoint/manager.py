"""The checkpoint API: collective saves and in-place loads for plain processes that share a volume.

    manager = CheckpointManager(META_URL, "/runs/gpt", rank=r, world_size=n)
    manager.save(step, state)           # all ranks, all or nothing
    manager.load(state)                 # in place, the newest committed step

Synchronous; the work is done by the volume's event loop in a thread and by threads that release the
GIL. `saving` and `loading` say how.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from tectonic_client.blocking import BlockingVolume
from tectonic_client.checkpoint.directory import CheckpointDirectory, VerifyReport, plain_path
from tectonic_client.checkpoint.loading import LoadReport, load_state, read_state
from tectonic_client.checkpoint.members import Identity, Memory, leave, register
from tectonic_client.checkpoint.names import check_rank, check_step
from tectonic_client.checkpoint.rundirectory import RunDirectory
from tectonic_client.checkpoint.runid import check_run_id, default_run_id
from tectonic_client.checkpoint.saving import SaveReport, save_state
from tectonic_client.errors import CheckpointError, Exists, NotFound, TectonicError
from tectonic_client.limits import DEFAULT_CHECKPOINT_TIMEOUT_S, DEFAULT_MEMORY_LIMIT_BYTES
from tectonic_client.metadata.sessions import this_host
from tectonic_client.types import Owner
from tectonic_client.volume import Volume, VolumeOptions

_PROCESS = secrets.randbits(63)
"""Tells processes apart, whatever their pids; renewed in a forked child."""


def _renew_process() -> None:
    global _PROCESS
    _PROCESS = secrets.randbits(63)


os.register_at_fork(after_in_child=_renew_process)


class CheckpointManager:
    """One rank's access to the checkpoints of a run; a context manager.

    `directory` is an absolute path in the volume (made if it is missing). All ranks of a job must
    agree on `run_id`; by default it is the launcher's (torchrun, Slurm, MPI), else derived from the
    process that started the ranks. Safe to call from several threads. After a fork, make a new one.
    """

    def __init__(
        self,
        meta_url: str,
        directory: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        run_id: str | None = None,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    ) -> None:
        """Open the volume and register as a rank.

        Raises VolumeNotFound, StoreMismatch, RankMismatch, InvalidArgument, and others of
        `open_volume`.
        """
        check_rank(rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.directory = plain_path(directory)
        self.run_id = default_run_id() if run_id is None else run_id
        check_run_id(self.run_id)
        self._memory = Memory()
        options = VolumeOptions(memory_limit_bytes=memory_limit_bytes, client=f"rank {rank}")
        self._volume = BlockingVolume(meta_url, options)
        try:
            self._identity, self._run_directory = self._volume.run(self._register)
        except BaseException:
            self._volume.close()
            raise

    async def _register(self, volume: Volume) -> tuple[Identity, RunDirectory]:
        inode = await _make_directories(volume, self.directory)
        run_directory = RunDirectory(inode, volume.session_id)
        identity = Identity(
            directory=inode, run_id=self.run_id, rank=self.rank, world_size=self.world_size,
            session=volume.session_id, token=secrets.randbits(63), process=_PROCESS,
            born_ns=await volume.kv.read(lambda tx: tx.now_ns()), pid=os.getpid(),
            hostname=this_host().name,
        )  # fmt: skip
        if self.world_size > 1:
            # A lone rank registers when it saves: others of its run may only want to look.
            self._memory.registered = await volume.kv.transact(
                lambda tx: register(tx, run_directory, identity, saving=False)
            )
        return identity, run_directory

    # --- saving and loading -------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        timeout: float = DEFAULT_CHECKPOINT_TIMEOUT_S,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveReport:
        """Save `state` as this rank's part of a step; returns when all parts are durable.

        Collective: every rank calls it with the same step. All or nothing: if any rank fails, dies
        or does not arrive within `timeout` seconds, every rank gets an error and nothing is
        visible. `state` is a nested dict or list of numpy arrays, torch tensors, Python scalars,
        strings, bytes and None; it must not change during the call. `metadata` (JSON) is kept in
        the step's index; rank 0's counts.

        Raises RanksMissing (naming them), RankMismatch, StepExists, StepInProgress,
        UnsupportedLeaf (naming each), NoSpace, SessionLost, ...
        """
        check_step(step)
        if not timeout > 0:
            raise CheckpointError(f"a timeout of {timeout} s leaves no time to save")
        return self._volume.run(
            lambda volume: save_state(
                volume,
                self._run_directory,
                self._identity,
                self._memory,
                step,
                state,
                timeout,
                metadata or {},
            )
        )

    def load(self, state: Any, step: int | None = None) -> LoadReport:
        """Load this rank's part of a step (None: the newest) into the arrays of `state`, in place.

        Raises StepNotFound, StateMismatch (listing every difference; nothing was changed),
        RankMismatch (saved by another number of ranks), CorruptChunk, ChunkMissing and
        CorruptCheckpoint (naming the tensor; `state` is then partly loaded).
        """
        return self._volume.run(
            lambda volume: load_state(self._steps(volume), step, state, self.rank, self.world_size)
        )

    def read(self, step: int | None = None) -> Any:
        """This rank's part of a step (None: the newest) as a new state.

        Tensors come back as torch tensors where torch is installed. Raises as `load` does.
        """
        return self._volume.run(
            lambda volume: read_state(self._steps(volume), step, self.rank, self.world_size)
        )

    # --- steps --------------------------------------------------------------------------------

    def _steps(self, volume: Volume) -> CheckpointDirectory:
        return CheckpointDirectory(volume, self.directory)

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return self._volume.run(lambda volume: self._steps(volume).steps())

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return self._volume.run(lambda volume: self._steps(volume).latest())

    def verify(self, step: int) -> VerifyReport:
        """Read a step (all ranks' parts) and compare it with its checksums. Raises StepNotFound."""
        return self._volume.run(lambda volume: self._steps(volume).verify(step))

    def delete(self, step: int) -> None:
        """Remove a step: at once from sight, then its data. Raises StepNotFound."""
        self._volume.run(lambda volume: self._steps(volume).delete(step))

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run and the volume; idempotent. Raises what `BlockingVolume.close` raises.

        A rank that cannot leave (its session was ended, the database is away) is known to be gone
        by its session.
        """
        try:
            if self._volume.open:
                with suppress(TectonicError):
                    self._volume.run(self._leave)
        finally:
            self._volume.close()

    async def _leave(self, volume: Volume) -> None:
        await volume.kv.transact(lambda tx: leave(tx, self._identity))

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _make_directories(volume: Volume, path: str) -> int:
    """Inode of a directory, made with its parents where missing; safe against others who do so."""
    filesystem, owner = volume.filesystem, Owner(os.getuid(), os.getgid())
    inode = await filesystem.resolve("/")
    done = ""
    for name in path.strip("/").split("/") if path.strip("/") else []:
        done += f"/{name}"
        try:
            inode = await filesystem.resolve(done)
        except NotFound:
            try:
                inode = (await filesystem.mkdir(inode, os.fsencode(name), 0o755, owner)).inode
            except Exists:
                inode = await filesystem.resolve(done)
    await CheckpointDirectory(volume, path).check()
    return inode
