"""Key codec of the metadata layers. FORMAT.md, "Keys", is the table of it.

A key is `layer u8 | hash u16 | id u64 | rest`, big-endian, so that bytewise order is numeric order.
The hash of the id spreads the groups (a directory, an inode, a block) over a range-sharded engine
and keeps each group in one piece. What parses a key raises CorruptRecord unless it is one that is
made here: going by another, a client would look for its record where there is none. Pure.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

from tectonic_client.errors import CorruptRecord
from tectonic_client.limits import IDS_PER_LEASE, MAX_XATTR_NAME_BYTES

_GROUP: Final = struct.Struct(">cHQ")
_U64: Final = struct.Struct(">Q")
_IN_PART: Final = struct.Struct(">cHQcQ")
_SIGN_FREE: Final = (1 << 63) - 1

# Layers (first byte of a key).
GLOBAL: Final = b"\x00"
NAME: Final = b"N"
FILE: Final = b"F"
BLOCK: Final = b"B"
DEAD_BLOCK: Final = b"D"
ORPHAN: Final = b"O"
SESSION: Final = b"S"
LEASE: Final = b"L"
CHECKPOINT: Final = b"K"
QUOTA: Final = b"Q"
CHANGE: Final = b"C"
FOLLOWER: Final = b"W"
TAIL: Final = b"T"

# Parts of an inode's group.
ATTRIBUTES: Final = b"\x00"
PARENT_TIMES: Final = b"\x01"
SUBDIRECTORIES: Final = b"\x02"
SYMLINK: Final = b"\x03"
XATTR: Final = b"\x04"
EXTENT: Final = b"\x05"
QUOTA_MEMBER: Final = b"\x06"

# Parts of a quota's group.
QUOTA_LIMITS: Final = b"\x00"
QUOTA_USAGE: Final = b"\x01"

# Parts of a block's group.
BLOCK_RECORD: Final = b"\x00"
BLOCK_OWNER: Final = b"\x01"

# Parts of a stripe of the change feed.
CHANGE_HEAD: Final = b"\x00"
CHANGE_EVENT: Final = b"\x01"

VOLUME: Final = GLOBAL + b"volume"
STORES: Final = GLOBAL + b"store/"
NEXT_LEASE: Final = GLOBAL + b"next-lease"
LAST_CLEANING: Final = GLOBAL + b"last-cleaning"


def group(layer: bytes, group_id: int) -> bytes:
    """Prefix of everything that belongs to `group_id` in `layer`."""
    return _GROUP.pack(layer, (group_id * 0x9E3779B97F4A7C15 >> 48) & 0xFFFF, group_id)


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys that start with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,))


def store(store_id: int) -> bytes:
    """Key of a store's record."""
    return STORES + struct.pack(">H", store_id)


# --- name layer -------------------------------------------------------------------------------


def name_hash(name: bytes) -> int:
    """63-bit position of `name` in its directory.

    Entries are ordered by it, as in ext4's hashed directories, so that it serves as the readdir
    cookie: stable while entries come and go, with no state kept between pages.
    Values 0 to 3 are left for "start", "." and "..".
    """
    return max(int.from_bytes(blake2b(name, digest_size=8).digest()) & _SIGN_FREE, 4)


def entry(directory: int, name: bytes) -> bytes:
    """Key of the entry `name` of `directory`."""
    return group(NAME, directory) + _U64.pack(name_hash(name)) + name


def entries_after(directory: int, cookie: int) -> tuple[bytes, bytes]:
    """Range of the entries of `directory` whose hash is greater than `cookie`."""
    prefix = group(NAME, directory)
    return prefix + _U64.pack(cookie + 1), prefix_end(prefix)


def parse_entry(key: bytes) -> tuple[int, bytes]:
    """(cookie, name) of an entry's key. Raises CorruptRecord."""
    name = key[_GROUP.size + _U64.size :]
    cookie = name_hash(name)
    if key[_GROUP.size : _GROUP.size + _U64.size] != _U64.pack(cookie):
        raise malformed(key)
    return cookie, name


# --- file layer -------------------------------------------------------------------------------


def attributes(inode: int) -> bytes:
    """Key of an inode's record."""
    return group(FILE, inode) + ATTRIBUTES


def parent_times(inode: int, lane: int) -> bytes:
    """Key of one lane of a directory's change times."""
    return group(FILE, inode) + PARENT_TIMES + bytes((lane,))


def subdirectories(inode: int, lane: int) -> bytes:
    """Key of one lane of a directory's subdirectory count."""
    return group(FILE, inode) + SUBDIRECTORIES + bytes((lane,))


def symlink(inode: int) -> bytes:
    """Key of a symbolic link's target."""
    return group(FILE, inode) + SYMLINK


def xattr(inode: int, name: bytes) -> bytes:
    """Key of an extended attribute."""
    return group(FILE, inode) + XATTR + name


def xattrs(inode: int) -> tuple[bytes, bytes]:
    """Range of all extended attributes of `inode`."""
    prefix = group(FILE, inode) + XATTR
    return prefix, prefix_end(prefix)


def parse_xattr(key: bytes) -> bytes:
    """Name of an extended attribute's key. Raises CorruptRecord."""
    name = key[_GROUP.size + 1 :]
    if not 0 < len(name) <= MAX_XATTR_NAME_BYTES or b"\x00" in name:
        raise malformed(key)
    return name


def extent(inode: int, offset: int) -> bytes:
    """Key of the extent of `inode` that begins at file offset `offset`."""
    return group(FILE, inode) + EXTENT + _U64.pack(offset)


def extents(inode: int) -> tuple[bytes, bytes]:
    """Range of all extents of `inode`."""
    prefix = group(FILE, inode) + EXTENT
    return prefix, prefix_end(prefix)


def parse_extent(key: bytes) -> int:
    """File offset of an extent's key. Raises CorruptRecord."""
    return _parse_in_part(key)


def quota_member(inode: int) -> bytes:
    """Key of the record that says which quota an inode counts against."""
    return group(FILE, inode) + QUOTA_MEMBER


# --- quotas -----------------------------------------------------------------------------------


def quota(number: int) -> bytes:
    """Key of a quota's record."""
    return group(QUOTA, number) + QUOTA_LIMITS


def quota_usage(number: int, lane: int) -> bytes:
    """Key of one lane of what is used of a quota."""
    return group(QUOTA, number) + QUOTA_USAGE + bytes((lane,))


def quota_usages(number: int) -> tuple[bytes, bytes]:
    """Range of all lanes of a quota."""
    prefix = group(QUOTA, number) + QUOTA_USAGE
    return prefix, prefix_end(prefix)


# --- block layer ------------------------------------------------------------------------------


def block(block_id: int) -> bytes:
    """Key of a block's record."""
    return group(BLOCK, block_id) + BLOCK_RECORD


def block_owner(block_id: int, inode: int) -> bytes:
    """Key of the record that says how much of a block an inode uses."""
    return group(BLOCK, block_id) + BLOCK_OWNER + _U64.pack(inode)


def parse_block_owner(key: bytes) -> int:
    """The inode of an owner's key. Raises CorruptRecord."""
    return _parse_in_part(key)


def block_owners(block_id: int) -> tuple[bytes, bytes]:
    """Range of all owners of a block."""
    prefix = group(BLOCK, block_id) + BLOCK_OWNER
    return prefix, prefix_end(prefix)


def dead_block(block_id: int) -> bytes:
    """Key of a dead block's record."""
    return group(DEAD_BLOCK, block_id)


def orphan(inode: int) -> bytes:
    """Key of an orphaned inode's record."""
    return group(ORPHAN, inode)


def tail(inode: int) -> bytes:
    """Key of the record of an inode's tail."""
    return group(TAIL, inode)


def parse_group(key: bytes) -> int:
    """The id that a key is grouped by. Raises CorruptRecord."""
    if len(key) < _GROUP.size:
        raise malformed(key)
    layer, _, group_id = _GROUP.unpack_from(key)
    if not key.startswith(group(layer, group_id)):
        raise malformed(key)
    return int(group_id)


def parse_id(key: bytes) -> int:
    """The id of a key that is nothing else. Raises CorruptRecord."""
    if len(key) != _GROUP.size:
        raise malformed(key)
    return parse_group(key)


def _parse_in_part(key: bytes) -> int:
    """The number behind a group's part; that the key lies in it is known by where it was found."""
    if len(key) != _IN_PART.size:
        raise malformed(key)
    return int(_IN_PART.unpack(key)[4])


def malformed(key: bytes) -> CorruptRecord:
    """What is raised for a key that nobody writes."""
    return CorruptRecord(f"there is a record under the malformed key {key.hex()}")


MAX_LEASE: Final = 2**64 // IDS_PER_LEASE - 2
"""The last one whose ids, and the id behind them, are numbers of 64 bits."""

# --- sessions ---------------------------------------------------------------------------------


def session(session_id: int) -> bytes:
    """Key of a session's record."""
    return group(SESSION, session_id)


def lease(number: int) -> bytes:
    """Key of the record that says which session holds a lease."""
    return group(LEASE, number)


def parse_lease(key: bytes) -> int:
    """The number of a lease's key. Raises CorruptRecord, also where its ids could be no ids."""
    number = parse_id(key)
    if number > MAX_LEASE:
        raise malformed(key)
    return number


# --- change feed ------------------------------------------------------------------------------


def change_head(stripe: int) -> bytes:
    """Key of a stripe's head."""
    return group(CHANGE, stripe) + CHANGE_HEAD


def change(stripe: int, position: int) -> bytes:
    """Key of an event."""
    return group(CHANGE, stripe) + CHANGE_EVENT + _U64.pack(position)


def changes(stripe: int) -> tuple[bytes, bytes]:
    """Range of all events of a stripe."""
    prefix = group(CHANGE, stripe) + CHANGE_EVENT
    return prefix, prefix_end(prefix)


def parse_change(key: bytes) -> int:
    """Position of an event's key. Raises CorruptRecord."""
    return _parse_in_part(key)


def follower(session_id: int) -> bytes:
    """Key of the record of a session that follows the feed."""
    return group(FOLLOWER, session_id)
