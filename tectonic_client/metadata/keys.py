"""Key codec of the metadata layers. FORMAT.md, "Keys", is the table of it.

A key is `layer u8 | hash u16 | id u64 | rest`, big-endian, so that bytewise order is numeric order.
The hash of the id spreads the groups (a directory, an inode, a block) over a range-sharded engine
and keeps each group in one piece. Pure.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

_GROUP: Final = struct.Struct(">cHQ")
_U64: Final = struct.Struct(">Q")
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
    """(cookie, name) of an entry's key."""
    return _U64.unpack_from(key, _GROUP.size)[0], key[_GROUP.size + 8 :]


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
    """Name of an extended attribute's key."""
    return key[_GROUP.size + 1 :]


def extent(inode: int, offset: int) -> bytes:
    """Key of the extent of `inode` that begins at file offset `offset`."""
    return group(FILE, inode) + EXTENT + _U64.pack(offset)


def extents(inode: int) -> tuple[bytes, bytes]:
    """Range of all extents of `inode`."""
    prefix = group(FILE, inode) + EXTENT
    return prefix, prefix_end(prefix)


def parse_extent(key: bytes) -> int:
    """File offset of an extent's key."""
    return int(_U64.unpack_from(key, _GROUP.size + 1)[0])


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
    """The id that a key is grouped by."""
    return int(_GROUP.unpack_from(key)[2])


# --- sessions ---------------------------------------------------------------------------------


def session(session_id: int) -> bytes:
    """Key of a session's record."""
    return group(SESSION, session_id)


def lease(number: int) -> bytes:
    """Key of the record that says which session holds a lease."""
    return group(LEASE, number)


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
    """Position of an event's key."""
    return int(_U64.unpack_from(key, _GROUP.size + 1)[0])


def follower(session_id: int) -> bytes:
    """Key of the record of a session that follows the feed."""
    return group(FOLLOWER, session_id)
