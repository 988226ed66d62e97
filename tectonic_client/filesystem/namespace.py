"""What the operations on names mean, each a function over one transaction.

Invariants: every entry names an existing inode; a directory has one entry, its record's `parent` is
where; `nlink` of others counts their entries; an inode without a name has an orphan record until
its extents and records are reclaimed. Times come from the caller (`now_ns`), as a local file system
takes them from the machine that makes the change. `actor` is the session on whose behalf it is.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tectonic_client.errors import (
    Exists,
    InvalidArgument,
    IsDirectory,
    NameTooLong,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_LINKS, MAX_PATH_DEPTH, MAX_SYMLINK_BYTES
from tectonic_client.metadata import keys, quotas
from tectonic_client.metadata.changes import Changes
from tectonic_client.metadata.inodes import (
    attributes_of,
    count_subdirectory,
    decode_directory,
    forget_directory_times,
    read_attributes,
    read_directory,
    read_inode,
    touch_directory,
    write_inode,
    write_symlink,
)
from tectonic_client.metadata.names import (
    Entry,
    check_name,
    delete_entry,
    is_empty,
    list_entries,
    read_entry,
    write_entry,
)
from tectonic_client.metadata.orphans import drop_name, erase, is_last_name
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import DirentRecord, FileType, InodeFlag, InodeRecord
from tectonic_client.types import (
    ROOT_INODE,
    AttributeChanges,
    Attributes,
    DirectoryEntry,
    Owner,
    RenameFlag,
)


def _may_be_open(tx: ReadTransaction, inode: int) -> bool:
    return False


class Actor(NamedTuple):
    """Who changes the namespace, and when; `changes` notes what must be told to others.

    `is_nobodys` says whether surely nobody has an inode open.
    """

    session_id: int
    now_ns: int
    changes: Changes
    is_nobodys: Callable[[ReadTransaction, int], bool] = _may_be_open


class Place(NamedTuple):
    """A name in a directory."""

    parent: int
    name: bytes


def make_root(tx: Transaction, owner: Owner, now_ns: int) -> None:
    """The root directory of a new volume."""
    record = InodeRecord(
        mode=stat.S_IFDIR | 0o755, uid=owner.uid, gid=owner.gid, nlink=2, size=0, atime_ns=now_ns,
        mtime_ns=now_ns, ctime_ns=now_ns, rdev=0, parent=ROOT_INODE,
    )  # fmt: skip
    write_inode(tx, ROOT_INODE, record)


# --- looking ----------------------------------------------------------------------------------


def lookup(tx: ReadTransaction, parent: int, name: bytes) -> Attributes:
    """The inode behind a name. Raises NotFound, NotDirectory, StaleHandle."""
    if name == b".":
        read_directory(tx, parent)
        return read_attributes(tx, parent)
    if name == b"..":
        return read_attributes(tx, read_directory(tx, parent).parent)
    check_name(name)
    return read_attributes(tx, _existing(tx, parent, name)[1].inode)


class Found(NamedTuple):
    """What a name stands for, if anything, and whether its directory tells of changes (push)."""

    attributes: Attributes | None
    directory_pushes: bool


def find(tx: ReadTransaction, parent: int, name: bytes) -> Found:
    """As `lookup`, for a caller that remembers also absence. Raises NotDirectory, StaleHandle."""
    if name in (b".", b".."):
        return Found(lookup(tx, parent, name), False)
    check_name(name)
    directory, entry = _look(tx, parent, name)
    attributes = None if entry is None else read_attributes(tx, entry.inode)
    return Found(attributes, bool(directory.flags & InodeFlag.PUSH))


def list_directory(
    tx: ReadTransaction, directory: int, cookie: int, limit: int
) -> list[DirectoryEntry]:
    """A page of the directory's entries with their attributes."""
    entries = list_entries(tx, directory, cookie, limit)
    rows = tx.get_many([keys.attributes(entry.record.inode) for entry in entries])
    return [
        DirectoryEntry(entry.cookie, entry.name, _listed(tx, entry, row))
        for entry, row in zip(entries, rows, strict=True)
        if row is not None
    ]


def _listed(tx: ReadTransaction, entry: Entry, row: bytes) -> Attributes:
    if entry.record.file_type is FileType.DIRECTORY:
        return read_attributes(tx, entry.record.inode)
    return attributes_of(entry.record.inode, InodeRecord.decode(row))


def _living_directory(tx: ReadTransaction, inode: int) -> InodeRecord:
    """The directory that is to get an entry. Raises NotFound when it was removed."""
    record = read_directory(tx, inode)
    if not record.nlink:
        raise NotFound(f"directory {inode} was removed")
    return record


# --- making -----------------------------------------------------------------------------------


def check_new_place(tx: ReadTransaction, parent: int, name: bytes) -> None:
    """Raise Exists, NotFound, NotDirectory, ... where no entry can be made."""
    check_name(name)
    _living_directory(tx, parent)
    if read_entry(tx, parent, name) is not None:
        raise Exists(f"{name!r} exists in directory {parent}")


def new_inode(
    tx: Transaction, inode: int, parent: int, mode: int, owner: Owner, actor: Actor, rdev: int = 0
) -> tuple[InodeRecord, InodeRecord]:
    """Write the record of a new inode that is about to be linked into `parent`; returns both.

    It inherits the directory's coherence. In a directory with the setgid bit the group is the
    directory's, and a new directory inherits the bit (inode(7)).
    """
    directory = _living_directory(tx, parent)
    gid = owner.gid
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
    record = InodeRecord(
        mode=mode, uid=owner.uid, gid=gid, nlink=2 if stat.S_ISDIR(mode) else 1, size=0,
        atime_ns=actor.now_ns, mtime_ns=actor.now_ns, ctime_ns=actor.now_ns, rdev=rdev,
        parent=parent, flags=directory.flags & InodeFlag.PUSH,
    )  # fmt: skip
    record = quotas.inherit(tx, parent, directory, inode, record)
    write_inode(tx, inode, record)
    return record, directory


def create(
    tx: Transaction, parent: int, name: bytes, inode: int, mode: int, owner: Owner, actor: Actor,
    rdev: int = 0,
) -> InodeRecord:  # fmt: skip
    """A new inode of the type in `mode` under a new name. Raises Exists, NotFound, ..."""
    check_name(name)
    require_session(tx, actor.session_id)
    if read_entry(tx, parent, name) is not None:
        raise Exists(f"{name!r} exists in directory {parent}")
    record, directory = new_inode(tx, inode, parent, mode, owner, actor, rdev)
    write_entry(tx, parent, name, DirentRecord(inode, record.file_type))
    if record.is_directory:
        count_subdirectory(tx, parent, actor.session_id, +1)
    _note_entry(tx, Place(parent, name), directory, actor)
    return record


def symlink(
    tx: Transaction, parent: int, name: bytes, inode: int, target: bytes, owner: Owner, actor: Actor
) -> InodeRecord:
    """A new symbolic link."""
    if len(target) > MAX_SYMLINK_BYTES:
        raise NameTooLong(f"symbolic link of {len(target)} bytes, at most {MAX_SYMLINK_BYTES}")
    if not target or b"\x00" in target:
        raise InvalidArgument("a symbolic link needs a target without NUL bytes")
    record = create(tx, parent, name, inode, stat.S_IFLNK | 0o777, owner, actor)
    write_symlink(tx, inode, target)
    record = replace(record, size=len(target))
    write_inode(tx, inode, record)
    return record


def link(tx: Transaction, inode: int, parent: int, name: bytes, actor: Actor) -> Attributes:
    """One more name of a file. Raises NotPermitted for directories, Exists, TooManyLinks."""
    check_name(name)
    record = read_inode(tx, inode)
    directory = _living_directory(tx, parent)
    if read_entry(tx, parent, name) is not None:
        raise Exists(f"{name!r} exists in directory {parent}")
    if record.is_directory:
        raise NotPermitted("a directory cannot have a second name")
    quotas.check_border(tx, inode, record, parent, directory)
    if not record.nlink:
        raise NotFound(f"inode {inode} was removed")
    if record.nlink >= MAX_LINKS:
        raise TooManyLinks(f"inode {inode} has {record.nlink} names already")
    record = replace(record, nlink=record.nlink + 1, ctime_ns=actor.now_ns)
    write_inode(tx, inode, record)
    write_entry(tx, parent, name, DirentRecord(inode, record.file_type))
    actor.changes.inode(inode, record)
    _note_entry(tx, Place(parent, name), directory, actor)
    return attributes_of(inode, record)


# --- removing ---------------------------------------------------------------------------------


def unlink(tx: Transaction, parent: int, name: bytes, actor: Actor) -> int | None:
    """Remove a name; returns the inode if it is an orphan now."""
    directory, entry = _existing(tx, parent, name)
    if entry.file_type is FileType.DIRECTORY:
        raise IsDirectory(f"{name!r} is a directory")
    delete_entry(tx, parent, name)
    _note_entry(tx, Place(parent, name), directory, actor)
    return _drop_name(tx, entry.inode, actor)


def rmdir(tx: Transaction, parent: int, name: bytes, actor: Actor) -> int | None:
    """Remove an empty directory; returns its inode if it is an orphan now."""
    directory, entry = _existing(tx, parent, name)
    if entry.file_type is not FileType.DIRECTORY:
        raise NotDirectory(f"{name!r} is not a directory")
    if not is_empty(tx, entry.inode):
        raise NotEmpty(f"directory {name!r} is not empty")
    return _remove_directory(tx, Place(parent, name), directory, entry.inode, actor)


def _look(tx: ReadTransaction, parent: int, name: bytes) -> tuple[InodeRecord, DirentRecord | None]:
    """A directory and its entry, if that is there, in one round trip."""
    row, entry = tx.get_many([keys.attributes(parent), keys.entry(parent, name)])
    directory = decode_directory(parent, row)
    return directory, None if entry is None else DirentRecord.decode(entry)


def _existing(tx: ReadTransaction, parent: int, name: bytes) -> tuple[InodeRecord, DirentRecord]:
    directory, entry = _look(tx, parent, name)
    if entry is None:
        raise NotFound(f"no entry {name!r} in directory {parent}")
    return directory, entry


def _note_entry(tx: Transaction, place: Place, directory: InodeRecord, actor: Actor) -> None:
    """An entry was made, removed or given to another inode."""
    touch_directory(tx, place.parent, actor.session_id, actor.now_ns)
    actor.changes.entry(place.parent, directory, place.name)


def _drop_name(tx: Transaction, inode: int, actor: Actor) -> int | None:
    """The inode lost a name; returns it if it is an orphan now."""
    record = read_inode(tx, inode)
    if is_last_name(record) and actor.is_nobodys(tx, inode) and erase(tx, inode, record):
        actor.changes.inode(inode, record)
        return None
    record = drop_name(tx, inode, record, actor.session_id, actor.now_ns)
    actor.changes.inode(inode, record)
    return None if record.nlink else inode


def detach_tree(tx: Transaction, parent: int, name: bytes, actor: Actor) -> int:
    """Remove a directory with all that is in it from the namespace, at once.

    Returns its inode, an orphan from now on; what was in it is reclaimed with it.
    """
    directory, entry = _existing(tx, parent, name)
    if entry.file_type is not FileType.DIRECTORY:
        raise NotDirectory(f"{name!r} is not a directory")
    _remove_directory(tx, Place(parent, name), directory, entry.inode, actor)
    return entry.inode


def _remove_directory(
    tx: Transaction, place: Place, directory: InodeRecord, inode: int, actor: Actor
) -> int | None:
    delete_entry(tx, *place)
    count_subdirectory(tx, place.parent, actor.session_id, -1)
    _note_entry(tx, place, directory, actor)
    return _drop_name(tx, inode, actor)


# --- renaming ---------------------------------------------------------------------------------


def rename(tx: Transaction, old: Place, new: Place, flags: RenameFlag, actor: Actor) -> int | None:
    """rename(2) with the flags of renameat2(2); returns the inode that lost its last name."""
    check_name(new.name)
    new_directory = _living_directory(tx, new.parent)
    old_directory, source = _existing(tx, *old)
    target = read_entry(tx, *new)
    _check_rename(tx, old, new, source, target, flags)
    if target is not None and target.inode == source.inode:
        return None
    if old.parent != new.parent:
        _check_border(tx, source, new.parent, new_directory)
        if flags & RenameFlag.EXCHANGE and target is not None:
            _check_border(tx, target, old.parent, old_directory)
    lost = None
    if flags & RenameFlag.EXCHANGE:
        assert target is not None
        _move(tx, target, new, old, actor)
    else:
        lost = None if target is None else _replace(tx, new, target, actor)
        delete_entry(tx, *old)
    _move(tx, source, old, new, actor)
    _note_entry(tx, old, old_directory, actor)
    _note_entry(tx, new, new_directory, actor)
    return lost


def _check_border(
    tx: ReadTransaction, entry: DirentRecord, parent: int, directory: InodeRecord
) -> None:
    quotas.check_border(tx, entry.inode, read_inode(tx, entry.inode), parent, directory)


def _check_rename(
    tx: ReadTransaction, old: Place, new: Place, source: DirentRecord,
    target: DirentRecord | None, flags: RenameFlag,
) -> None:  # fmt: skip
    if int(flags) not in (0, RenameFlag.NOREPLACE, RenameFlag.EXCHANGE):
        raise InvalidArgument(f"rename flags {int(flags)} are not supported")
    if flags & RenameFlag.NOREPLACE and target is not None:
        raise Exists(f"{new.name!r} exists in directory {new.parent}")
    if flags & RenameFlag.EXCHANGE and target is None:
        raise NotFound(f"no entry {new.name!r} in directory {new.parent}")
    if source.file_type is FileType.DIRECTORY and old.parent != new.parent:
        forbid_inside(tx, new.parent, source.inode)
    if target is None or target.inode == source.inode:
        return
    if flags & RenameFlag.EXCHANGE:
        if target.file_type is FileType.DIRECTORY and old.parent != new.parent:
            forbid_inside(tx, old.parent, target.inode)
        return
    _check_replace(tx, new, source, target)


def _check_replace(
    tx: ReadTransaction, new: Place, source: DirentRecord, target: DirentRecord
) -> None:
    if target.file_type is FileType.DIRECTORY:
        if source.file_type is not FileType.DIRECTORY:
            raise IsDirectory(f"{new.name!r} is a directory")
        if not is_empty(tx, target.inode):
            raise NotEmpty(f"directory {new.name!r} is not empty")
    elif source.file_type is FileType.DIRECTORY:
        raise NotDirectory(f"{new.name!r} is not a directory")


def forbid_inside(tx: ReadTransaction, directory: int, ancestor: int) -> None:
    """Raise InvalidArgument when `directory` lies in `ancestor`: no directory inside itself."""
    for _ in range(MAX_PATH_DEPTH):
        if directory == ancestor:
            raise InvalidArgument("a directory cannot be moved or cloned into itself")
        if directory == ROOT_INODE:
            return
        directory = read_directory(tx, directory).parent
    raise InvalidArgument(f"directories are nested deeper than {MAX_PATH_DEPTH}")


def _replace(tx: Transaction, place: Place, target: DirentRecord, actor: Actor) -> int | None:
    if target.file_type is FileType.DIRECTORY:
        count_subdirectory(tx, place.parent, actor.session_id, -1)
    return _drop_name(tx, target.inode, actor)


def _move(tx: Transaction, entry: DirentRecord, old: Place, new: Place, actor: Actor) -> None:
    """Write the entry at its new place; the old one is the caller's to remove or overwrite."""
    write_entry(tx, new.parent, new.name, entry)
    record = replace(read_inode(tx, entry.inode), parent=new.parent, ctime_ns=actor.now_ns)
    write_inode(tx, entry.inode, record)
    actor.changes.inode(entry.inode, record)
    if entry.file_type is FileType.DIRECTORY and old.parent != new.parent:
        count_subdirectory(tx, old.parent, actor.session_id, -1)
        count_subdirectory(tx, new.parent, actor.session_id, +1)


# --- attributes -------------------------------------------------------------------------------


def change_attributes(
    tx: Transaction, inode: int, changes: AttributeChanges, actor: Actor
) -> Attributes:
    """chmod, chown and utimens; the size is not changed here (`FileWriter.truncate`)."""
    record = read_inode(tx, inode)
    if record.is_directory and changes.mtime_ns is not None:
        forget_directory_times(tx, inode)
    mode = record.mode if changes.mode is None else record.mode & ~0o7777 | changes.mode & 0o7777
    record = replace(
        record,
        mode=mode,
        uid=record.uid if changes.uid is None else changes.uid,
        gid=record.gid if changes.gid is None else changes.gid,
        atime_ns=record.atime_ns if changes.atime_ns is None else changes.atime_ns,
        mtime_ns=record.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
        ctime_ns=actor.now_ns,
    )
    write_inode(tx, inode, record)
    actor.changes.inode(inode, record)
    return read_attributes(tx, inode)
