"""A chunk store in a directory of a flash device.

    DIR/tectonicfs-store                 which store of which volume this is
    DIR/chunks/XX/BBBBBBBBBBBBBBBB.IIII  chunk IIII of block BBBB..., hexadecimal; XX is the low
                                         byte of the block's lease number

All chunks of a lease's ids lie in one XX, so listing a range of ids reads few directories.

A chunk is written straight under its final name: ids are never used twice and nothing names a
chunk before its put has returned, so a torn one is garbage under a leased id (FAILURES.md) and no
rename is needed. I/O is O_DIRECT where the file system has it, else buffered; durable on return
either way.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from crc32c import crc32c

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, StoreUsage
from tectonic_client.errors import (
    ChunkMissing,
    Exists,
    NoSpace,
    ReadOnly,
    StoreMismatch,
    StoreUnavailable,
    TectonicError,
)
from tectonic_client.limits import ALIGNMENT_BYTES, IDS_PER_LEASE

_log = logging.getLogger(__name__)

MARKER: Final = "tectonicfs-store"
_MARKER_MAGIC: Final = b"TECTSTOR"
_MARKER_LAYOUT: Final = struct.Struct("<8sHxx16sHxx")
_CRC: Final = struct.Struct("<I")
_FAN_OUT: Final = 256
_CHUNK_NAME: Final = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{4})")

_ERRORS: Final[dict[int, type[TectonicError]]] = {
    errno.ENOENT: ChunkMissing,
    errno.EEXIST: Exists,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EROFS: ReadOnly,
    errno.EACCES: ReadOnly,
    errno.EPERM: ReadOnly,
}


class FlashStore:
    """See `port.ChunkStore`. Opens directories that `initialise` prepared."""

    def __init__(
        self, directory: str, *, volume_uuid: bytes, store_id: int, read_only: bool = False
    ) -> None:
        """Raises StoreMismatch unless `directory` is that store of that volume."""
        self.name = directory
        self._read_only = read_only
        _check_marker(directory, volume_uuid, store_id)
        if not read_only and os.statvfs(directory).f_flag & os.ST_RDONLY:
            raise ReadOnly(f"store {directory} is on a read-only file system")
        self.direct_io = _supports_direct_io(Path(directory, MARKER))
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if self.direct_io else 0)
        self._directories = [
            os.open(Path(directory, "chunks", f"{n:02x}"), os.O_RDONLY | os.O_DIRECTORY)
            for n in range(_FAN_OUT)
        ]

    @staticmethod
    def initialise(
        directory: str, volume_uuid: bytes, store_id: int, *, force: bool = False
    ) -> None:
        """Prepare a directory (made if missing) for a new volume.

        Raises StoreMismatch where something else is in it; `force` allows an older store, whose
        chunks are removed.
        """
        with _mapped(directory, directory):
            os.makedirs(directory, exist_ok=True)
            _clear_for(directory, force=force)
            for number in range(_FAN_OUT):
                os.makedirs(Path(directory, "chunks", f"{number:02x}"), exist_ok=True)
            _write_marker(directory, volume_uuid, store_id)
            for path in (Path(directory, "chunks"), Path(directory), Path(directory).parent):
                _sync_directory(path)

    def _directory_of(self, block_id: int) -> int:
        return self._directories[(block_id // IDS_PER_LEASE) % _FAN_OUT]

    # --- the port -----------------------------------------------------------------------------

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        if self._read_only:
            raise ReadOnly(f"store {self.name} was opened read-only")
        directory, name = self._directory_of(key.block_id), str(key)
        with _mapped(self.name, key):
            descriptor = os.open(
                name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, 0o600, dir_fd=directory
            )
        try:
            with _mapped(self.name, key):
                try:
                    _write_all(descriptor, parts)
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                os.fsync(directory)
        except TectonicError:
            with suppress(OSError):  # the error that matters is on its way
                os.unlink(name, dir_fd=directory)
            raise

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        with _mapped(self.name, key):
            descriptor = os.open(
                str(key), os.O_RDONLY | self._flags, dir_fd=self._directory_of(key.block_id)
            )
            try:
                return _read_all(descriptor, offset, target)
            finally:
                os.close(descriptor)

    def head(self, key: ChunkKey) -> int:
        with _mapped(self.name, key):
            return os.stat(str(key), dir_fd=self._directory_of(key.block_id)).st_size

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        if self._read_only:
            raise ReadOnly(f"store {self.name} was opened read-only")
        for key in keys:
            with _mapped(self.name, key), suppress(FileNotFoundError):
                os.unlink(str(key), dir_fd=self._directory_of(key.block_id))

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        first, end = first_block_id // IDS_PER_LEASE, -(-end_block_id // IDS_PER_LEASE)
        if end - first > _FAN_OUT:
            yield from sorted(self._scan(range(_FAN_OUT), first_block_id, end_block_id))
            return
        for lease in range(first, end):
            low = max(first_block_id, lease * IDS_PER_LEASE)
            high = min(end_block_id, (lease + 1) * IDS_PER_LEASE)
            yield from sorted(self._scan((lease % _FAN_OUT,), low, high))

    def _scan(
        self, fan_out: Iterable[int], first_block_id: int, end_block_id: int
    ) -> Iterator[ChunkInfo]:
        for number in fan_out:
            with _mapped(self.name, f"chunks/{number:02x}"):
                names = os.listdir(self._directories[number])
            for name in names:
                match = _CHUNK_NAME.fullmatch(name)
                if match is None:
                    _log.warning("%s/chunks/%02x: foreign file %r", self.name, number, name)
                    continue
                key = ChunkKey(int(match[1], 16), int(match[2], 16))
                if first_block_id <= key.block_id < end_block_id:
                    with suppress(ChunkMissing):  # deleted meanwhile
                        yield ChunkInfo(key, self.head(key))

    def usage(self) -> StoreUsage:
        with _mapped(self.name, "usage"):
            found = os.statvfs(self.name)
        return StoreUsage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def close(self) -> None:
        while self._directories:
            os.close(self._directories.pop())


# --- files ------------------------------------------------------------------------------------


@contextmanager
def _mapped(store: str, subject: object) -> Iterator[None]:
    """Turn OSError into our errors, naming store and chunk."""
    try:
        yield
    except OSError as error:
        kind = _ERRORS.get(error.errno or 0, StoreUnavailable)
        raise kind(f"store {store}, {_called(subject)}: {error.strerror}") from error


def _called(subject: object) -> str:
    return f"chunk {subject}" if isinstance(subject, ChunkKey) else str(subject)


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    total = sum(len(part) for part in parts)
    written = os.pwritev(descriptor, parts, 0)
    while written < total:
        # A short write is rare (a signal, a full device): go on behind it, page by page.
        written = written // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        rest, skip = [], written
        for part in parts:
            if skip < len(part):
                rest.append(part[skip:])
            skip = max(0, skip - len(part))
        count = os.pwritev(descriptor, rest, written)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count


def _read_all(descriptor: int, offset: int, target: memoryview) -> int:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        done += count
        if not count or count % ALIGNMENT_BYTES:
            break
    return done


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _supports_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.info("%s: no O_DIRECT on this file system, using buffered I/O", path.parent)
        return False
    return True


# --- the marker -------------------------------------------------------------------------------
#
# magic "TECTSTOR" | version u16 | 0 u16 | volume uuid 16 bytes | store id u16 | 0 u16 | crc32c u32


def _write_marker(directory: str, volume_uuid: bytes, store_id: int) -> None:
    data = _MARKER_LAYOUT.pack(_MARKER_MAGIC, 1, volume_uuid, store_id)
    path = Path(directory, MARKER)
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, data + _CRC.pack(crc32c(data)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, path)


def _read_marker(directory: str) -> tuple[bytes, int]:
    """Volume uuid and store id. Raises StoreMismatch."""
    path = Path(directory, MARKER)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a chunk store" if os.path.isdir(directory) else "does not exist"
        raise StoreMismatch(
            f"store {directory} {what}: is its device mounted, is the path right?"
        ) from None
    except OSError as error:
        raise StoreUnavailable(f"store {directory}: {error.strerror}") from error
    whole = len(data) == _MARKER_LAYOUT.size + _CRC.size
    if not whole or _CRC.pack(crc32c(data[: -_CRC.size])) != data[-_CRC.size :]:
        raise StoreMismatch(f"store {directory}: its {MARKER} file is damaged")
    magic, version, volume_uuid, store_id = _MARKER_LAYOUT.unpack_from(data)
    if magic != _MARKER_MAGIC or version != 1:
        raise StoreMismatch(f"store {directory}: written by a newer release, upgrade tectonicfs")
    return volume_uuid, store_id


def _check_marker(directory: str, volume_uuid: bytes, store_id: int) -> None:
    found_uuid, found_id = _read_marker(directory)
    if found_uuid != volume_uuid:
        raise StoreMismatch(
            f"store {directory} belongs to volume {found_uuid.hex()}, not {volume_uuid.hex()}"
        )
    if found_id != store_id:
        raise StoreMismatch(f"store {directory} is store {found_id}, expected store {store_id}")


def _clear_for(directory: str, *, force: bool) -> None:
    """Refuse a directory that holds something else; with `force` remove an older store."""
    names = [name for name in os.listdir(directory) if name != "lost+found"]
    if not names:
        return
    if MARKER not in names and names != ["chunks"]:
        raise StoreMismatch(f"directory {directory} is not empty and not a chunk store")
    if not force:
        raise StoreMismatch(
            f"store {directory} belongs to a volume already: --force removes its chunks"
        )
    with suppress(FileNotFoundError):
        os.unlink(Path(directory, MARKER))
    for fan_out in os.scandir(Path(directory, "chunks")):
        for entry in os.scandir(fan_out.path):
            if _CHUNK_NAME.fullmatch(entry.name) and stat.S_ISREG(entry.stat().st_mode):
                os.unlink(entry.path)
