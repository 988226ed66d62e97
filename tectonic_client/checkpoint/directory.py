"""The committed steps of a run's directory: list, describe, verify, delete. No rank is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tectonic_client.checkpoint.index import RankEntry, StepIndex, parse_index
from tectonic_client.checkpoint.layout import LENGTH_BYTES, Layout, header_length, parse_header
from tectonic_client.checkpoint.names import INDEX_NAME, parse_step_name, step_name
from tectonic_client.checkpoint.transfer import UNREADABLE, StoredFile
from tectonic_client.errors import (
    CorruptCheckpoint,
    FormatTooNew,
    InvalidArgument,
    NotDirectory,
    NotFound,
    StaleHandle,
    StepNotFound,
    TectonicError,
)
from tectonic_client.filesystem.namespace import Actor, detach_tree
from tectonic_client.filesystem.paths import resolve
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_CHECKPOINT_INDEX_BYTES, SCAN_PAGE_ROWS
from tectonic_client.metadata import keys
from tectonic_client.metadata.changes import Changes, Positions
from tectonic_client.metadata.names import list_entries
from tectonic_client.records import FileType
from tectonic_client.volume import Volume

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying a step found; `problems` names tensors, file, block and store.

    `files` and `bytes` are those without a problem.
    """

    step: int
    files: int
    bytes: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is there and equals its checksum."""
        return not self.problems


class CheckpointDirectory:
    """The steps below one directory of an open volume. Used in the volume's event loop."""

    def __init__(self, volume: Volume, path: str) -> None:
        self._volume = volume
        self.path = plain_path(path)

    async def check(self) -> None:
        """Raise NotFound or NotDirectory where the path names no directory."""
        filesystem = self._volume.filesystem
        try:
            await filesystem.lookup(await filesystem.resolve(self.path), b".")
        except NotDirectory:
            raise NotDirectory(f"{self.path} is not a directory") from None

    async def steps(self) -> list[int]:
        """Committed steps in ascending order; empty where the directory does not exist."""
        try:
            return await self._volume.kv.read(self._list)
        except NotFound:
            return []

    def _list(self, tx: ReadTransaction) -> list[int]:
        directory, cookie, found = resolve(tx, self.path), 0, []
        while page := list_entries(tx, directory, cookie, SCAN_PAGE_ROWS):
            steps = {
                entry.record.inode: step
                for entry in page
                if entry.record.file_type is FileType.DIRECTORY
                and (step := parse_step_name(entry.name.decode("utf-8", "replace"))) is not None
            }
            index_keys = [keys.entry(inode, INDEX_NAME.encode()) for inode in steps]
            rows = tx.get_many(index_keys)
            found += [s for s, row in zip(steps.values(), rows, strict=True) if row is not None]
            cookie = page[-1].cookie
        return sorted(found)

    async def latest(self) -> int | None:
        """The newest committed step, None if there is none."""
        return max(await self.steps(), default=None)

    async def require(self, step: int | None) -> int:
        """`step` if it is committed, the newest one for None. Raises StepNotFound."""
        steps = await self.steps()
        if not steps or (step is not None and step not in steps):
            what = "no committed step" if step is None else f"no committed step {step}"
            have = f"; there are {_shown(steps)}" if steps else ""
            raise StepNotFound(f"{what} in {self.path}{have}")
        return steps[-1] if step is None else step

    def path_of(self, step: int, name: str) -> str:
        """Path of a file of a step."""
        return f"{self.path}/{step_name(step)}/{name}"

    async def open_file(self, step: int, name: str) -> StoredFile:
        """A file of a step. Raises CorruptCheckpoint where it is missing."""
        path = self.path_of(step, name)
        try:
            return await StoredFile.open(self._volume, path)
        except (NotFound, StaleHandle) as error:
            await self.require(step)  # a step that was deleted meanwhile is not corrupt
            raise CorruptCheckpoint(f"{path} is missing") from error

    async def index(self, step: int) -> StepIndex:
        """The step's index. Raises CorruptCheckpoint, CorruptChunk, ..."""
        file = await self.open_file(step, INDEX_NAME)
        if file.size_bytes > MAX_CHECKPOINT_INDEX_BYTES:
            raise CorruptCheckpoint(f"{file.name} has {file.size_bytes} bytes: no index of ours")
        data = bytes(await file.read(0, file.size_bytes))
        with about(file):
            return parse_index(data)

    async def layout(self, file: StoredFile) -> Layout:
        """What is where in a rank's file. Raises CorruptCheckpoint, CorruptChunk, ..."""
        start = await file.read(0, min(LENGTH_BYTES, file.size_bytes))
        with about(file):
            length = header_length(bytes(start), file.size_bytes)
        header = bytes(await file.read(0, length))
        with about(file):
            return parse_header(header, file.size_bytes)

    async def verify(self, step: int) -> VerifyReport:
        """Read every byte of a step and compare it with its checksum. Raises StepNotFound."""
        started = time.perf_counter()
        step = await self.require(step)
        problems: list[str] = []
        files, size = 0, 0
        try:
            index = await self.index(step)
        except UNREADABLE as error:
            return VerifyReport(step, 0, 0, time.perf_counter() - started, (str(error),))
        for part in index.ranks:
            found = await self._verify_file(step, part)
            problems += found
            if not found:
                files, size = files + 1, size + part.bytes
        if problems:
            await self.require(step)  # a step that was deleted meanwhile is not damaged
        return VerifyReport(step, files, size, time.perf_counter() - started, tuple(problems))

    async def _verify_file(self, step: int, part: RankEntry) -> list[str]:
        try:
            file = await self.open_file(step, part.file)
            if file.size_bytes != part.bytes:
                raise CorruptCheckpoint(
                    f"{file.name} has {file.size_bytes} bytes, the index says {part.bytes}"
                )
            return await file.verify(await self.layout(file))
        except UNREADABLE as error:
            return [str(error)]

    def _detach(self, name: bytes, tx: Transaction) -> tuple[int, Positions]:
        session_id = self._volume.session_id
        actor = Actor(session_id, time.time_ns(), Changes())
        inode = detach_tree(tx, resolve(tx, self.path), name, actor)
        return inode, actor.changes.write(tx, session_id)

    async def delete(self, step: int) -> None:
        """Remove a step: at once from sight, then its data. Raises StepNotFound.

        Data that cannot be removed now (a store is away) is left to the cleaner.
        """
        await self.require(step)
        try:
            detach = partial(self._detach, step_name(step).encode())
            inode, positions = await self._volume.kv.transact(detach, durable=True)
        except NotFound:
            raise StepNotFound(f"no committed step {step} in {self.path}") from None
        await self._volume.audience.has_seen(positions)
        try:
            await self._volume.cleaner.reclaim(inode)
            await self._volume.cleaner.delete_dead_blocks()
        except TectonicError as error:
            _log.warning("step %d is removed, its data will be later: %s", step, error)


@contextmanager
def about(file: StoredFile) -> Iterator[None]:
    """Say in errors of parsing which file they are about."""
    try:
        yield
    except (CorruptCheckpoint, FormatTooNew) as error:
        raise type(error)(f"{file.name}: {error}") from error


def plain_path(path: str) -> str:
    """The path of a run's directory as messages show it. Raises InvalidArgument.

    An empty one, as of a variable that is not set, is not the root.
    """
    if not path.startswith("/"):
        raise InvalidArgument(f"{path!r} is not an absolute path in the volume")
    return path.rstrip("/") or "/"


def _shown(steps: list[int]) -> str:
    text = ", ".join(map(str, steps[-5:]))
    return text if len(steps) <= 5 else f"... {text}"
