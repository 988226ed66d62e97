"""One value of each persisted format, and the files that hold its bytes.

The files are what releases have written: they are never changed. After a new format was added,
`python -m tests.golden.samples` writes the files that are missing.
"""

from __future__ import annotations

from pathlib import Path

from crc32c import crc32c

from tectonic_client.encoding.chunk import ChunkHeader
from tectonic_client.limits import CHUNK_HEADER_BYTES, KiB, MiB
from tectonic_client.metadata.changerecords import ChangeHeadRecord, ChangeRecord, FollowerRecord
from tectonic_client.records import (
    BlockRecord,
    ChunkPlace,
    Codec,
    CounterRecord,
    DeadBlockRecord,
    DirentRecord,
    EncodingKind,
    ExtentRecord,
    FileType,
    InodeRecord,
    OrphanRecord,
    OwnerRecord,
    ParentTimesRecord,
    QuotaRecord,
    QuotaUsageRecord,
    Record,
    SessionRecord,
    StoreRecord,
    StoreState,
    SubdirectoriesRecord,
    SymlinkRecord,
    TailRecord,
    VolumeRecord,
    XattrRecord,
)
from tectonic_client.types import Change, ChangeKind

DIRECTORY = Path(__file__).parent

_UUID = bytes(range(16))
_TIME_NS = 1_700_000_000_123_456_789

RECORDS: dict[str, Record] = {
    "volume": VolumeRecord(
        1, _UUID, _TIME_NS, 64 * MiB, 8 * MiB, Codec.AUTO, -3, EncodingKind.SINGLE, "träining"
    ),
    "store": StoreRecord(513, StoreState.DRAINING, 100, "/flash/a\udcff", "rack-7"),
    "inode": InodeRecord(
        0o100644, 1000, 1001, 2, 5 * 2**40, _TIME_NS, -1, _TIME_NS + 2, 0x801, 0x1234567890, 0
    ),
    "dirent": DirentRecord(0x0102030405060708, FileType.SYMLINK),
    "extent": ExtentRecord(123_456, 0x0A0B0C0D0E0F, 64 * KiB),
    "block": BlockRecord(
        EncodingKind.SINGLE,
        1,
        0,
        Codec.ZSTD,
        8 * MiB,
        20 * MiB,
        _TIME_NS,
        (ChunkPlace(0, 8 * MiB), ChunkPlace(1, 1_234_567), ChunkPlace(513, 4 * MiB)),
    ),
    "owner": OwnerRecord(20 * MiB),
    "dead-block": DeadBlockRecord(_TIME_NS, (0, 1, 513)),
    "session": SessionRecord(
        _TIME_NS, _TIME_NS + 5, 4321, 987_654, "boot/4026531836", "node-12", "mount /mnt/data"
    ),
    "counter": CounterRecord(2**63 + 1),
    "parent-times": ParentTimesRecord(_TIME_NS),
    "subdirectories": SubdirectoriesRecord(-2),
    "symlink": SymlinkRecord(b"../else\xffwhere"),
    "orphan": OrphanRecord(77),
    "xattr": XattrRecord(b"value\x00\xff"),
    "quota": QuotaRecord(0x1234567890, 5 * 2**40, 0),
    "quota-usage": QuotaUsageRecord(-3 * 2**30, 1001),
    "tail": TailRecord(5 * 2**40, 2**63 - 1),
    "change-head": ChangeHeadRecord(2**40 + 3, 2**40),
    "change": ChangeRecord(
        _TIME_NS,
        77,
        (Change(ChangeKind.ENTRY, 1, b"na\xffme"), Change(ChangeKind.INODE, 2**41, b"")),
    ),
    "follower": FollowerRecord(tuple(range(2**40, 2**40 + 16))),
}

CHUNK_HEADERS: dict[str, ChunkHeader] = {
    "plain": ChunkHeader(
        _UUID, 0x0102030405060708, 3, content_bytes=130 * KiB, payload_bytes=130 * KiB,
        compressed=False, checksums=bytes(range(12)),
    ),
    "compressed": ChunkHeader(
        _UUID, 0x1122334455667788, 1023, content_bytes=8 * MiB, payload_bytes=70 * KiB,
        compressed=True, checksums=bytes(range(100, 108)),
    ),
}  # fmt: skip


def record_file(name: str) -> Path:
    """File of a record."""
    return DIRECTORY / f"record-{name}.bin"


def header_file(name: str) -> Path:
    """File of a chunk header."""
    return DIRECTORY / f"chunk-header-{name}.bin"


def encoded_header(header: ChunkHeader) -> bytes:
    """The header's page."""
    page = bytearray(CHUNK_HEADER_BYTES)
    header.encode_into(memoryview(page))
    return bytes(page)


def with_field(page: bytes, offset: int, value: bytes) -> bytes:
    """A chunk header's page with other bytes at `offset`, under a checksum that matches."""
    copy = bytearray(page)
    copy[offset : offset + len(value)] = value
    copy[52:56] = bytes(4)
    copy[52:56] = crc32c(copy).to_bytes(4, "little")
    return bytes(copy)


def write_missing() -> None:
    """Write the files that are not there yet."""
    wanted = {record_file(name): record.encode() for name, record in RECORDS.items()}
    wanted |= {header_file(name): encoded_header(h) for name, h in CHUNK_HEADERS.items()}
    for path, data in wanted.items():
        if not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    write_missing()
