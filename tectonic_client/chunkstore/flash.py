"""A chunk store in a directory of a flash device.

    DIR/tectonicfs-store                 which store of which volume this is
    DIR/chunks/XX/BBBBBBBBBBBBBBBB.IIII  chunk IIII of block BBBB..., hexadecimal; XX is the low
                                         byte of the block's lease number

All chunks of a lease's ids lie in one XX, so listing a range of ids reads few directories.

A chunk is written straight under its final name: ids are never used twice and nothing names a
chunk before its put has returned, so a torn one is garbage under a leased id (FAILURES.md) and no
rename is needed. I/O is O_DIRECT where the file system has it, else buffered; durable on return
either way.

The open store holds one descriptor, of `chunks`: it keeps the device from being unmounted, and
nothing can be written into the empty directory that an unmounted device leaves. Opening a file
costs 2 microseconds, reading 4 KiB of it 50, so no descriptors of files are kept.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from tectonic_client.chunkstore.marker import MARKER, StoreMarker
from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, StoreUsage
from tectonic_client.errors import (
    ChunkMissing,
    Exists,
    FormatTooNew,
    NoSpace,
    ReadOnly,
    StoreMismatch,
    StoreUnavailable,
    TectonicError,
)
from tectonic_client.limits import ALIGNMENT_BYTES, IDS_PER_LEASE, LIST_WINDOW_CHUNKS
from tectonic_client.sharing import is_shared, make_directory, share_file

_log = logging.getLogger(__name__)

_NEW_MARKER: Final = MARKER + ".new"
_CHUNKS: Final = "chunks"
_OLD_CHUNKS: Final = "chunks.old"
"""What `initialise` with force is about to remove."""

_FAN_OUT: Final = 256
_CHUNK_NAME: Final = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{4})")

_Errors = Mapping[int, type[TectonicError]]

_READING: Final[_Errors] = {errno.ENOENT: ChunkMissing}
_WRITING: Final[_Errors] = {
    errno.EEXIST: Exists,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EROFS: ReadOnly,
    errno.EACCES: ReadOnly,
    errno.EPERM: ReadOnly,
}
_OPENING: Final[_Errors] = {errno.ENOENT: StoreMismatch, errno.ENOTDIR: StoreMismatch}
_INITIALISING: Final[_Errors] = {
    **_WRITING,
    errno.EEXIST: StoreMismatch,
    errno.ENOTDIR: StoreMismatch,
}


class FlashStore:
    """See `port.ChunkStore`. Opens directories that `initialise` prepared."""

    def __init__(
        self, directory: str, *, volume_uuid: bytes, store_id: int, read_only: bool = False
    ) -> None:
        """Raises StoreMismatch unless `directory` is that store of that volume, FormatTooNew.

        ReadOnly on a read-only file system without `read_only`; StoreUnavailable.
        """
        self.name = directory
        self._read_only = read_only
        self._chunks = -1
        root = _open_root(directory)
        try:
            found, expected = _read_marker(directory, root), StoreMarker(volume_uuid, store_id)
            if found != expected:
                raise StoreMismatch(f"directory {directory} is {found}, expected {expected}")
            if not read_only and os.fstatvfs(root).f_flag & os.ST_RDONLY:
                raise ReadOnly(f"store {directory} is on a read-only file system")
            with _mapped(directory, _CHUNKS, _OPENING):
                self.direct_io = _supports_direct_io(directory, root)
                self._chunks = os.open(_CHUNKS, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
                self._shared = is_shared(self._chunks)
        finally:
            os.close(root)
        self._flags = os.O_DIRECT if self.direct_io else 0

    @staticmethod
    def initialise(
        directory: str, volume_uuid: bytes, store_id: int, *, force: bool = False
    ) -> None:
        """Prepare a directory for a new volume; durable on return.

        It is made if missing, but not what lies above it: that may be where a device, not mounted
        yet, belongs. Raises StoreMismatch where that is missing or something else is in the
        directory; `force` allows an older store, whose chunks are removed. Raises ReadOnly,
        NoSpace, StoreUnavailable.
        """
        with _mapped(directory, "initialising", _INITIALISING):
            _make_directory(directory)
            root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _refuse_foreign(directory, root, force=force)
                _clear(directory, root)
                shared = is_shared(root)
                make_directory(_CHUNKS, root, shared=shared)
                for number in range(_FAN_OUT):
                    make_directory(f"{_CHUNKS}/{_fan_out_of(number)}", root, shared=shared)
                _sync_directory(_CHUNKS, root)
                _write_marker(root, StoreMarker(volume_uuid, store_id))
                os.fsync(root)
            finally:
                os.close(root)

    @staticmethod
    def check(directory: str, *, force: bool = False) -> None:
        """Raise what `initialise` would raise before it changes anything, as far as can be told."""
        with _mapped(directory, "initialising", _INITIALISING):
            try:
                root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                _refuse_without_parent(directory)
                return
            try:
                _refuse_foreign(directory, root, force=force)
                if not os.access(directory, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            finally:
                os.close(root)

    # --- the port -----------------------------------------------------------------------------

    def put(self, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        self._refuse_if_read_only()
        path = _path_of(key)
        with _mapped(self.name, key, _WRITING):
            # No temporary name and no rename: see the module's docstring.
            descriptor = os.open(
                path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, 0o600, dir_fd=self._chunks
            )
            try:
                try:
                    if self._shared:
                        share_file(descriptor)
                    _write_all(descriptor, parts)
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                _sync_directory(os.path.dirname(path), self._chunks)
            except BaseException:
                with suppress(OSError):  # the error that matters is on its way
                    os.unlink(path, dir_fd=self._chunks)
                raise

    def get_into(self, key: ChunkKey, offset: int, target: memoryview) -> int:
        with _mapped(self.name, key, _READING):
            descriptor = os.open(_path_of(key), os.O_RDONLY | self._flags, dir_fd=self._chunks)
            try:
                return _read_all(descriptor, offset, target)
            finally:
                os.close(descriptor)

    def head(self, key: ChunkKey) -> int:
        with _mapped(self.name, key, _READING):
            return os.stat(_path_of(key), dir_fd=self._chunks).st_size

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        """As the port says, and durable: metadata forgets the chunks next, so they must not
        come back after a power loss."""
        self._refuse_if_read_only()
        changed: set[str] = set()
        for key in keys:
            path = _path_of(key)
            with _mapped(self.name, key, _WRITING), suppress(FileNotFoundError):
                os.unlink(path, dir_fd=self._chunks)
                changed.add(os.path.dirname(path))
        for fan_out in changed:
            with _mapped(self.name, f"{_CHUNKS}/{fan_out}", _WRITING):
                _sync_directory(fan_out, self._chunks)

    def list(self, first_block_id: int, end_block_id: int) -> Iterator[ChunkInfo]:
        for first, end in self._windows(first_block_id, end_block_id):
            for key in sorted(self._scan(first, end)):
                with suppress(ChunkMissing):  # deleted meanwhile
                    yield ChunkInfo(key, self.head(key))

    def usage(self) -> StoreUsage:
        with _mapped(self.name, "usage"):
            found = os.fstatvfs(self._chunks)
            device = os.fstat(self._chunks).st_dev
        return StoreUsage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, device)

    def close(self) -> None:
        descriptor, self._chunks = self._chunks, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- inside -------------------------------------------------------------------------------

    def _refuse_if_read_only(self) -> None:
        if self._read_only:
            raise ReadOnly(f"store {self.name} was opened read-only")

    def _windows(self, first_block_id: int, end_block_id: int) -> Iterator[tuple[int, int]]:
        """The range in pieces of about LIST_WINDOW_CHUNKS chunks, cut between leases.

        A fan-out directory holds every 256th lease, so key order is not directory order: a window
        is read from all its directories and sorted, and its size bounds the memory.
        """
        leases = Counter(
            key.block_id // IDS_PER_LEASE
            for key in self._scan(first_block_id, end_block_id, report=True)
        )
        start, size = first_block_id, 0
        for lease in sorted(leases):
            if size and size + leases[lease] > LIST_WINDOW_CHUNKS:
                yield start, lease * IDS_PER_LEASE
                start, size = lease * IDS_PER_LEASE, 0
            size += leases[lease]
        if size:
            yield start, end_block_id

    def _scan(
        self, first_block_id: int, end_block_id: int, *, report: bool = False
    ) -> Iterator[ChunkKey]:
        """Keys in the range, in no order; with `report` what is not a chunk is logged."""
        first, end = first_block_id // IDS_PER_LEASE, -(-end_block_id // IDS_PER_LEASE)
        for lease in range(first, min(end, first + _FAN_OUT)):
            fan_out = _fan_out_of(lease)
            with _mapped(self.name, f"{_CHUNKS}/{fan_out}"):
                names = _names(fan_out, self._chunks)
            foreign = []
            for name in names:
                match = _CHUNK_NAME.fullmatch(name)
                key = ChunkKey(int(match[1], 16), int(match[2], 16)) if match else None
                if key is None or _fan_out_of(key.block_id // IDS_PER_LEASE) != fan_out:
                    foreign.append(name)
                elif first_block_id <= key.block_id < end_block_id:
                    yield key
            if foreign and report:
                _log.warning(
                    "store %s: %d files in %s/%s are not chunks of it, for example %r",
                    self.name, len(foreign), _CHUNKS, fan_out, min(foreign),
                )  # fmt: skip


# --- files ------------------------------------------------------------------------------------


@contextmanager
def _mapped(store: str, subject: object, errors: _Errors | None = None) -> Iterator[None]:
    """Turn OSError into our errors, naming store and chunk; by default StoreUnavailable."""
    try:
        yield
    except OSError as error:
        kind = (errors or {}).get(error.errno or 0, StoreUnavailable)
        called = f"chunk {subject}" if isinstance(subject, ChunkKey) else subject
        raise kind(f"store {store}, {called}: {error.strerror}") from error


def _fan_out_of(lease: int) -> str:
    return f"{lease % _FAN_OUT:02x}"


def _path_of(key: ChunkKey) -> str:
    """Path of a chunk below `chunks`."""
    return f"{_fan_out_of(key.block_id // IDS_PER_LEASE)}/{key}"


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Write the parts one after another from the file's start."""
    rest, position = list(parts), 0
    while rest:
        count = os.pwritev(descriptor, rest, position)
        # A short write is rare (a signal, a device that gets full): go on at a page's start.
        count -= count % ALIGNMENT_BYTES
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        position += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]


def _read_all(descriptor: int, offset: int, target: memoryview) -> int:
    """Fill `target`; returns the bytes read, fewer only at the file's end."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        done += count
        if not count or count % ALIGNMENT_BYTES:
            break
    return done


def _names(path: str, root: int) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: str, root: int | None = None) -> None:
    """Make a directory's entries durable. (Opening it each time costs nothing measurable.)"""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_without_parent(path: str) -> None:
    """Raise StoreMismatch where the directory that `path` would be made in is missing."""
    parent = os.path.dirname(path)
    try:
        os.stat(parent)
    except FileNotFoundError as error:
        raise StoreMismatch(
            f"store {path}: there is no directory {parent} to make it in: is its device mounted?"
            f" If it belongs there, first run mkdir -p {path}"
        ) from error


def _make_directory(path: str) -> None:
    """Make a directory if missing, durable in its parent."""
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        _refuse_without_parent(path)
        os.mkdir(path)
    with suppress(PermissionError):  # a parent that we may not read is not of our making
        _sync_directory(parent)


def _supports_direct_io(directory: str, root: int) -> bool:
    """Whether files here can be read with O_DIRECT, tried on the marker."""
    try:
        descriptor = os.open(MARKER, os.O_RDONLY | os.O_DIRECT, dir_fd=root)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT_BYTES)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _log.info("store %s: no O_DIRECT on this file system, using buffered I/O", directory)
        return False
    return True


# --- the marker -------------------------------------------------------------------------------


def _read_marker(directory: str, root: int) -> StoreMarker:
    """Raises StoreMismatch, FormatTooNew, StoreUnavailable."""
    try:
        descriptor = os.open(MARKER, os.O_RDONLY, dir_fd=root)
        try:
            data = os.read(descriptor, ALIGNMENT_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise StoreMismatch(
            f"directory {directory} is not a chunk store: is its device mounted?"
        ) from error
    except OSError as error:
        raise StoreUnavailable(f"store {directory}, {MARKER}: {error.strerror}") from error
    return StoreMarker.decode(data, directory)


def _open_root(directory: str) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMismatch(
            f"there is no store directory {directory}: is its device mounted, is the path right?"
        ) from error
    except OSError as error:
        raise StoreUnavailable(f"store {directory}: {error.strerror}") from error


def _write_marker(root: int, marker: StoreMarker) -> None:
    """The last step of `initialise`: without a marker a directory is no store."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
    descriptor = os.open(_NEW_MARKER, flags, 0o600, dir_fd=root)
    try:
        if is_shared(root):
            share_file(descriptor)
        os.write(descriptor, marker.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(_NEW_MARKER, MARKER, src_dir_fd=root, dst_dir_fd=root)


# --- an older store ---------------------------------------------------------------------------


def _refuse_foreign(directory: str, root: int, *, force: bool) -> None:
    """Raise StoreMismatch over something else in the directory; without `force` over a store."""
    names = _contents(root)
    ours = {MARKER, _NEW_MARKER, _CHUNKS, _OLD_CHUNKS}
    if MARKER not in names and not names <= ours:
        raise StoreMismatch(f"directory {directory} is not empty and not a chunk store")
    if names and not force:
        raise StoreMismatch(f"directory {directory} {_tenant(directory, root)}: --force removes it")


def _contents(root: int) -> set[str]:
    return set(os.listdir(root)) - {"lost+found"}


def _clear(directory: str, root: int) -> None:
    """Remove an older store."""
    names = _contents(root)
    if not names:
        return
    for name in (MARKER, _NEW_MARKER):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=root)
    os.fsync(root)
    if _OLD_CHUNKS in names:
        _remove_old_chunks(directory, root)
    if _CHUNKS in names:
        # Moved away first: a client that still has the old store open must not write into the new
        # one, whose block ids begin anew.
        os.rename(_CHUNKS, _OLD_CHUNKS, src_dir_fd=root, dst_dir_fd=root)
        _remove_old_chunks(directory, root)


def _tenant(directory: str, root: int) -> str:
    try:
        return f"is {_read_marker(directory, root)} already"
    except (StoreMismatch, FormatTooNew):
        return "holds an unfinished, damaged or newer store"


def _remove_old_chunks(directory: str, root: int) -> None:
    """Remove chunks and their directories. Raises StoreMismatch over files that are not ours."""
    for fan_out in _names(_OLD_CHUNKS, root):
        path = f"{_OLD_CHUNKS}/{fan_out}"
        for name in _names(path, root):
            if not _CHUNK_NAME.fullmatch(name):
                raise StoreMismatch(f"{directory}/{path}/{name} is not a chunk: move it away")
            os.unlink(f"{path}/{name}", dir_fd=root)
        os.rmdir(path, dir_fd=root)
    os.rmdir(_OLD_CHUNKS, dir_fd=root)
