"""Persisted metadata records: frozen dataclasses and their bytes. FORMAT.md has the byte tables.

Every record is `kind u8 | version u8 | body | crc32c u32`, little-endian, the checksum over all
that precedes it. A reader refuses a wrong kind, a bad checksum, and a version newer than it knows.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, Self

from crc32c import crc32c

from tectonic_client.errors import CorruptRecord, FormatTooNew
from tectonic_client.limits import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS_PER_BLOCK,
    MAX_FILE_BYTES,
    MAX_SYMLINK_BYTES,
    MIN_CHUNK_BYTES,
)

FORMAT_VERSION: Final = 1
"""Version of a volume as a whole; raised when an older client must not touch it."""

_CRC: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BB")
_MAX_COUNT: Final = 2**62
"""The most that anything is counted to: two of them still fit a field."""
_MAX_LINKS: Final = 2**31
_MAX_PID: Final = 2**31 - 1
_MAX_TIME_NS: Final = 2**63 - 1


class EncodingKind(IntEnum):
    """How a block is spread over chunks. Only SINGLE is written so far."""

    SINGLE = 0
    REPLICATED = 1
    REED_SOLOMON = 2


class Codec(IntEnum):
    """Compression policy of a volume, and what was done to a block's chunks."""

    NONE = 0
    ZSTD = 1
    AUTO = 2


class FileType(IntEnum):
    """Type of an inode, as the high nibble of st_mode (S_IFMT >> 12)."""

    FIFO = 0o01
    CHARACTER = 0o02
    DIRECTORY = 0o04
    BLOCK_DEVICE = 0o06
    REGULAR = 0o10
    SYMLINK = 0o12
    SOCKET = 0o14


class InodeFlag(IntEnum):
    """Bits of an inode's flags: what else is recorded of it, so that others need no look."""

    XATTRS = 1
    """It has extended attributes."""
    PUSH = 4
    """`coherence=push`: changes of the inode, and of a directory's entries, are told at once."""
    QUOTA = 8
    """It has a member record of a quota."""
    TAIL = 16
    """It has a tail record."""


class StoreState(IntEnum):
    """Whether new chunks are placed in a store."""

    ACTIVE = 0
    DRAINING = 1


class Record:
    """Envelope shared by all records; subclasses give KIND, VERSION and their body."""

    KIND: ClassVar[int]
    VERSION: ClassVar[int] = 1
    __slots__ = ()

    def _body(self) -> bytes:
        raise AssertionError(f"{type(self).__name__} has no body encoder")

    @classmethod
    def _from_body(cls, body: memoryview) -> Self:
        raise AssertionError(f"{cls.__name__} has no body decoder")

    def encode(self) -> bytes:
        """Bytes of the record."""
        data = _HEAD.pack(self.KIND, self.VERSION) + self._body()
        return data + _CRC.pack(crc32c(data))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Record of these bytes. Raises CorruptRecord, FormatTooNew."""
        view = memoryview(data)
        if len(view) < _HEAD.size + _CRC.size:
            raise CorruptRecord(f"{cls.__name__}: {len(view)} bytes are too few for a record")
        if crc32c(view[: -_CRC.size]) != _CRC.unpack_from(view, len(view) - _CRC.size)[0]:
            raise CorruptRecord(f"{cls.__name__}: checksum does not match")
        kind, version = _HEAD.unpack_from(view)
        if kind != cls.KIND:
            raise CorruptRecord(f"{cls.__name__}: found record kind {kind}, expected {cls.KIND}")
        if version > cls.VERSION:
            raise FormatTooNew(
                f"{cls.__name__} version {version} was written by a newer release"
                f" (this one knows {cls.VERSION}): upgrade tectonicfs"
            )
        try:
            return cls._from_body(view[_HEAD.size : -_CRC.size])
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"{cls.__name__}: {error}") from error


def pack_string(text: str) -> bytes:
    """A string of a record's body."""
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<H", len(data)) + data


def within(most: int, least: int = 0, /, **fields: int) -> None:
    """Raise ValueError unless the fields are numbers that somebody can have meant: who goes on to
    count with them then stays within what a record can hold."""
    for name, value in fields.items():
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, not from {least} to {most}")


def unpack_exactly(layout: struct.Struct, body: memoryview) -> tuple[int, ...]:
    """The fields of a body that has no others. Raises ValueError."""
    if len(body) != layout.size:
        raise ValueError(f"body of {len(body)} bytes, expected {layout.size}")
    return layout.unpack(body)


class Cursor:
    """Reads a body from front to back and insists on its end.

    Every method raises ValueError or struct.error where the body is not as it should be, which
    `Record.decode` turns into CorruptRecord.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next fields."""
        values = layout.unpack_from(self._body, self._position)
        self._position += layout.size
        return values

    def raw(self, length: int) -> bytes:
        """The next `length` bytes."""
        end = self._position + length
        if end > len(self._body):
            raise ValueError(f"{length} bytes announced, {len(self._body) - self._position} left")
        data = bytes(self._body[self._position : end])
        self._position = end
        return data

    def string(self) -> str:
        """The next string."""
        (length,) = self.take(_U16)
        return self.raw(length).decode("utf-8", "surrogateescape")

    def done(self) -> None:
        """Raise ValueError unless all was read."""
        if self._position != len(self._body):
            raise ValueError(f"{len(self._body) - self._position} bytes behind the record's end")


_U16: Final = struct.Struct("<H")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class VolumeRecord(Record):
    """The superblock: identity and choices of a volume that never change."""

    KIND = 1
    _LAYOUT: ClassVar = struct.Struct("<I16sQIIBbB")

    format_version: int
    uuid: bytes
    created_ns: int
    block_bytes: int
    chunk_bytes: int
    codec: Codec
    level: int
    encoding: EncodingKind
    name: str

    def _body(self) -> bytes:
        return self._LAYOUT.pack(
            self.format_version, self.uuid, self.created_ns, self.block_bytes, self.chunk_bytes,
            self.codec, self.level, self.encoding,
        ) + pack_string(self.name)  # fmt: skip

    @classmethod
    def _from_body(cls, body: memoryview) -> VolumeRecord:
        cursor = Cursor(body)
        version, uuid, created, block, chunk, codec, level, encoding = cls._LAYOUT.unpack_from(body)
        cursor.take(cls._LAYOUT)
        name = cursor.string()
        cursor.done()
        within(MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_bytes=chunk)
        within(MAX_CHUNKS_PER_BLOCK * chunk, chunk, block_bytes=block)
        within(19, -19, level=level)
        return cls(
            version, uuid, created, block, chunk, Codec(codec), level, EncodingKind(encoding), name
        )


@dataclass(frozen=True, slots=True)
class StoreRecord(Record):
    """One chunk store of the volume."""

    KIND = 2
    _LAYOUT: ClassVar = struct.Struct("<HBI")

    store_id: int
    state: StoreState
    weight: int
    url: str
    domain: str

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(self.store_id, self.state, self.weight)
        return fixed + pack_string(self.url) + pack_string(self.domain)

    @classmethod
    def _from_body(cls, body: memoryview) -> StoreRecord:
        cursor = Cursor(body)
        store_id, state, weight = cursor.take(cls._LAYOUT)
        record = cls(store_id, StoreState(state), weight, cursor.string(), cursor.string())
        cursor.done()
        return record


@dataclass(frozen=True, slots=True)
class InodeRecord(Record):
    """Attributes of an inode. Times are nanoseconds since the epoch.

    `parent` is the directory that the inode was last linked into: for a directory its `..`, for
    others a hint that names the file in messages. `flags` are those of InodeFlag.
    """

    KIND = 3
    _LAYOUT: ClassVar = struct.Struct("<IIIIQqqqIQI")

    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int
    parent: int
    flags: int = 0

    def _body(self) -> bytes:
        return self._LAYOUT.pack(
            self.mode, self.uid, self.gid, self.nlink, self.size, self.atime_ns, self.mtime_ns,
            self.ctime_ns, self.rdev, self.parent, self.flags,
        )  # fmt: skip

    @classmethod
    def _from_body(cls, body: memoryview) -> InodeRecord:
        record = cls(*unpack_exactly(cls._LAYOUT, body))
        # Written out, as `within` costs a microsecond.
        if record.size > MAX_FILE_BYTES or record.nlink > _MAX_LINKS:
            raise ValueError(f"size {record.size} or link count {record.nlink} is too large")
        FileType(record.mode >> 12)
        return record

    @property
    def file_type(self) -> FileType:
        return FileType(self.mode >> 12)

    @property
    def is_directory(self) -> bool:
        return self.mode >> 12 == FileType.DIRECTORY


@dataclass(frozen=True, slots=True)
class DirentRecord(Record):
    """A directory entry's value; its name is in the key."""

    KIND = 4
    _LAYOUT: ClassVar = struct.Struct("<QB")

    inode: int
    file_type: FileType

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.inode, self.file_type)

    @classmethod
    def _from_body(cls, body: memoryview) -> DirentRecord:
        inode, file_type = unpack_exactly(cls._LAYOUT, body)
        return cls(inode, FileType(file_type))


@dataclass(frozen=True, slots=True)
class ExtentRecord(Record):
    """A run of file bytes inside a block; its offset in the file is in the key."""

    KIND = 5
    _LAYOUT: ClassVar = struct.Struct("<QQQ")
    _WHOLE: ClassVar = struct.Struct("<BBQQQI")

    length: int
    block_id: int
    block_offset: int

    @classmethod
    def fields(cls, data: bytes) -> tuple[int, int, int]:
        """As `decode`, in a third of the time: files may have a million extents."""
        if len(data) == cls._WHOLE.size:
            kind, version, length, block_id, block_offset, checksum = cls._WHOLE.unpack(data)
            if kind == cls.KIND and version == cls.VERSION and crc32c(data[:-4]) == checksum:
                return length, block_id, block_offset
        record = cls.decode(data)
        return record.length, record.block_id, record.block_offset

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.length, self.block_id, self.block_offset)

    @classmethod
    def _from_body(cls, body: memoryview) -> ExtentRecord:
        return cls(*unpack_exactly(cls._LAYOUT, body))


class ChunkPlace(NamedTuple):
    """Where one chunk of a block lies: the store's id and the payload's stored length."""

    store_id: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class BlockRecord(Record):
    """A sealed block: `length` logical bytes, cut every `chunk_bytes`, one chunk per piece.

    `data_chunks` and `parity_chunks` describe the encoding (SINGLE: 1 and 0); `codec` is what the
    chunks may have been compressed with (each chunk's header says whether it was).
    """

    KIND = 6
    _LAYOUT: ClassVar = struct.Struct("<BBBBIQQH")
    _PLACE: ClassVar = struct.Struct("<HI")

    encoding: EncodingKind
    data_chunks: int
    parity_chunks: int
    codec: Codec
    chunk_bytes: int
    length: int
    created_ns: int
    places: tuple[ChunkPlace, ...]

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(
            self.encoding, self.data_chunks, self.parity_chunks, self.codec, self.chunk_bytes,
            self.length, self.created_ns, len(self.places),
        )  # fmt: skip
        return fixed + b"".join(self._PLACE.pack(*place) for place in self.places)

    @classmethod
    def _from_body(cls, body: memoryview) -> BlockRecord:
        cursor = Cursor(body)
        encoding, data, parity, codec, chunk, length, created, count = cursor.take(cls._LAYOUT)
        if count > MAX_CHUNKS_PER_BLOCK:
            raise ValueError(f"{count} chunks are more than a block may have")
        places = tuple(
            ChunkPlace(store_id, stored)
            for store_id, stored in (cursor.take(cls._PLACE) for _ in range(count))
        )
        cursor.done()
        within(MAX_CHUNK_BYTES, 1, chunk_bytes=chunk)
        return cls(
            EncodingKind(encoding), data, parity, Codec(codec), chunk, length, created, places
        )


@dataclass(frozen=True, slots=True)
class OwnerRecord(Record):
    """How many bytes of a block one inode still uses; block and inode are in the key."""

    KIND = 7

    live_bytes: int

    def _body(self) -> bytes:
        return _U64.pack(self.live_bytes)

    @classmethod
    def _from_body(cls, body: memoryview) -> OwnerRecord:
        (live_bytes,) = unpack_exactly(_U64, body)
        within(_MAX_COUNT, live_bytes=live_bytes)
        return cls(live_bytes)


@dataclass(frozen=True, slots=True)
class DeadBlockRecord(Record):
    """A block that no inode uses any more; its chunks are to be deleted, then this record."""

    KIND = 8
    _LAYOUT: ClassVar = struct.Struct("<QH")
    _PLACE: ClassVar = struct.Struct("<H")

    died_ns: int
    store_ids: tuple[int, ...]

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(self.died_ns, len(self.store_ids))
        return fixed + b"".join(self._PLACE.pack(store_id) for store_id in self.store_ids)

    @classmethod
    def _from_body(cls, body: memoryview) -> DeadBlockRecord:
        cursor = Cursor(body)
        died, count = cursor.take(cls._LAYOUT)
        store_ids = tuple(cursor.take(cls._PLACE)[0] for _ in range(count))
        cursor.done()
        return cls(died, store_ids)


@dataclass(frozen=True, slots=True)
class SessionRecord(Record):
    """A client and its last sign of life.

    `host` identifies the running machine (boot id and pid namespace), so that a client of the same
    host can see at once whether process `pid`, started at `pid_started_ticks`, still exists.
    """

    KIND = 9
    _LAYOUT: ClassVar = struct.Struct("<QQIQ")

    started_ns: int
    heartbeat_ns: int
    pid: int
    pid_started_ticks: int
    host: str
    hostname: str
    client: str

    def _body(self) -> bytes:
        fixed = self._LAYOUT.pack(
            self.started_ns, self.heartbeat_ns, self.pid, self.pid_started_ticks
        )
        return fixed + b"".join(pack_string(s) for s in (self.host, self.hostname, self.client))

    @classmethod
    def _from_body(cls, body: memoryview) -> SessionRecord:
        cursor = Cursor(body)
        started, heartbeat, pid, ticks = cursor.take(cls._LAYOUT)
        within(_MAX_PID, pid=pid)
        record = cls(
            started, heartbeat, pid, ticks, cursor.string(), cursor.string(), cursor.string()
        )
        cursor.done()
        return record


@dataclass(frozen=True, slots=True)
class CounterRecord(Record):
    """A number in a record of its own: the next lease, a session's id behind a lease, ..."""

    KIND = 10

    value: int

    def _body(self) -> bytes:
        return _U64.pack(self.value)

    @classmethod
    def _from_body(cls, body: memoryview) -> CounterRecord:
        return cls(*unpack_exactly(_U64, body))


@dataclass(frozen=True, slots=True)
class ParentTimesRecord(Record):
    """One lane of a directory's change times; the newest over all lanes and the inode counts."""

    KIND = 11

    changed_ns: int

    def _body(self) -> bytes:
        return _U64.pack(self.changed_ns)

    @classmethod
    def _from_body(cls, body: memoryview) -> ParentTimesRecord:
        (changed_ns,) = unpack_exactly(_U64, body)
        within(_MAX_TIME_NS, changed_ns=changed_ns)
        return cls(changed_ns)


@dataclass(frozen=True, slots=True)
class SubdirectoriesRecord(Record):
    """One lane of a directory's count of subdirectories; the sum over all lanes counts."""

    KIND = 12
    _LAYOUT: ClassVar = struct.Struct("<q")

    count: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.count)

    @classmethod
    def _from_body(cls, body: memoryview) -> SubdirectoriesRecord:
        (count,) = unpack_exactly(cls._LAYOUT, body)
        within(_MAX_COUNT, -_MAX_COUNT, count=count)
        return cls(count)


@dataclass(frozen=True, slots=True)
class SymlinkRecord(Record):
    """Target of a symbolic link, any bytes but NUL."""

    KIND = 13

    target: bytes

    def _body(self) -> bytes:
        return self.target

    @classmethod
    def _from_body(cls, body: memoryview) -> SymlinkRecord:
        target = bytes(body)
        within(MAX_SYMLINK_BYTES, 1, length=len(target))
        if b"\x00" in target:
            raise ValueError("the target of a symbolic link has a NUL")
        return cls(target)


@dataclass(frozen=True, slots=True)
class OrphanRecord(Record):
    """An inode without a name that is still to be reclaimed; `session` (or 0) has it open."""

    KIND = 14

    session: int

    def _body(self) -> bytes:
        return _U64.pack(self.session)

    @classmethod
    def _from_body(cls, body: memoryview) -> OrphanRecord:
        return cls(*unpack_exactly(_U64, body))


@dataclass(frozen=True, slots=True)
class XattrRecord(Record):
    """Value of an extended attribute; its name is in the key."""

    KIND = 15

    value: bytes

    def _body(self) -> bytes:
        return self.value

    @classmethod
    def _from_body(cls, body: memoryview) -> XattrRecord:
        return cls(bytes(body))


@dataclass(frozen=True, slots=True)
class QuotaRecord(Record):
    """How much may be below `directory`: the sum of the files' sizes, inodes; 0 is no limit."""

    KIND = 18
    _LAYOUT: ClassVar = struct.Struct("<QQQ")

    directory: int
    max_bytes: int
    max_inodes: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.directory, self.max_bytes, self.max_inodes)

    @classmethod
    def _from_body(cls, body: memoryview) -> QuotaRecord:
        return cls(*unpack_exactly(cls._LAYOUT, body))


@dataclass(frozen=True, slots=True)
class QuotaUsageRecord(Record):
    """One lane of what is used of a quota; the sum over all lanes counts."""

    KIND = 19
    _LAYOUT: ClassVar = struct.Struct("<qq")

    used_bytes: int
    used_inodes: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.used_bytes, self.used_inodes)

    @classmethod
    def _from_body(cls, body: memoryview) -> QuotaUsageRecord:
        record = cls(*unpack_exactly(cls._LAYOUT, body))
        within(
            _MAX_COUNT, -_MAX_COUNT, used_bytes=record.used_bytes, used_inodes=record.used_inodes
        )
        return record


@dataclass(frozen=True, slots=True)
class TailRecord(Record):
    """Extents of an inode that begin in start <= x < end were cut off and are to be reclaimed."""

    KIND = 20
    _LAYOUT: ClassVar = struct.Struct("<QQ")

    start: int
    end: int

    def _body(self) -> bytes:
        return self._LAYOUT.pack(self.start, self.end)

    @classmethod
    def _from_body(cls, body: memoryview) -> TailRecord:
        start, end = unpack_exactly(cls._LAYOUT, body)
        within(MAX_FILE_BYTES, start=start, end=end)
        return cls(start, end)


# Kinds 32 to 39 are the checkpoint protocol's records: tectonic_client/checkpoint/records.py.
