"""Value types of the file-system interface, shared by the core and its doors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

ROOT_INODE: Final = 1


class Owner(NamedTuple):
    """Who a new inode belongs to."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) tells of an inode. Sizes in bytes, times in nanoseconds since the epoch.

    `pushes` is no part of it: changes of the inode, and of a directory's entries, are told at once
    (`coherence=push`).
    """

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    pushes: bool = False


@dataclass(frozen=True, slots=True)
class AttributeChanges:
    """What setattr is to change; None leaves a field as it is. `mode` holds permission bits."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class DirectoryEntry(NamedTuple):
    """An entry of a listing; reading on from `cookie` gives the entries after this one."""

    cookie: int
    name: bytes
    attributes: Attributes


class RenameFlag(IntFlag):
    """Flags of renameat2(2)."""

    NONE = 0
    NOREPLACE = 1
    EXCHANGE = 2


@dataclass(frozen=True, slots=True)
class FileSystemUsage:
    """What statfs(2) tells: space of the active stores in bytes."""

    total_bytes: int
    free_bytes: int
    block_bytes: int


class ChangeKind(IntEnum):
    """What a change is about."""

    ENTRY = 1
    """A name of directory `inode` was made, removed or given to something else."""
    INODE = 2
    """Attributes or data of `inode`."""


class Change(NamedTuple):
    """One change; `name` is empty unless it is about an entry."""

    kind: ChangeKind
    inode: int
    name: bytes
