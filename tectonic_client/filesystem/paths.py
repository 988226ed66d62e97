"""Walking path names, for callers without a kernel in front of them. Functions over a transaction.

A path is absolute in the volume. Permissions are not checked: whoever opens a volume has its stores
and its database in hand.
"""

from __future__ import annotations

import os
import stat

from tectonic_client.errors import (
    InvalidArgument,
    NotDirectory,
    NotFound,
    TooManySymlinks,
)
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import MAX_PATH_DEPTH, MAX_SYMLINKS_FOLLOWED, SCAN_PAGE_ROWS
from tectonic_client.metadata.inodes import read_directory, read_inode, read_symlink
from tectonic_client.metadata.names import list_entries, read_entry
from tectonic_client.records import FileType
from tectonic_client.types import ROOT_INODE


def parts_of(path: str | bytes) -> list[bytes]:
    """Names of an absolute path, `.` and empty ones left out."""
    raw = os.fsencode(path)
    if not raw.startswith(b"/"):
        raise InvalidArgument(f"{path!r} is not an absolute path in the volume")
    return [name for name in raw.split(b"/") if name not in (b"", b".")]


def resolve(tx: ReadTransaction, path: str | bytes, *, follow: bool = True) -> int:
    """The inode that a path names; `follow` also follows a symbolic link at its end.

    Raises NotFound, NotDirectory, TooManySymlinks, InvalidArgument.
    """
    todo = parts_of(path)[::-1]
    inode, links = ROOT_INODE, 0
    while todo:
        name = todo.pop()
        if name == b"..":
            inode = read_directory(tx, inode).parent
            continue
        entry = read_entry(tx, inode, name)
        if entry is None:
            _refuse_non_directory(tx, inode, path)
            raise NotFound(f"{os.fsdecode(path)}: no such file or directory")
        if entry.file_type is not FileType.SYMLINK or not (todo or follow):
            inode = entry.inode
            continue
        links += 1
        if links > MAX_SYMLINKS_FOLLOWED:
            raise TooManySymlinks(f"{os.fsdecode(path)}: too many symbolic links")
        target = read_symlink(tx, entry.inode)
        if target.startswith(b"/"):
            inode = ROOT_INODE
        todo += [step for step in target.split(b"/") if step not in (b"", b".")][::-1]
    return inode


def _refuse_non_directory(tx: ReadTransaction, inode: int, path: str | bytes) -> None:
    if not read_inode(tx, inode).is_directory:
        raise NotDirectory(f"{os.fsdecode(path)}: a part of the path is not a directory")


def path_of(tx: ReadTransaction, inode: int) -> str:
    """A path of the inode for messages; `<inode N>` where it has no name any more.

    Costs a listing of its directory: only for errors and reports.
    """
    names: list[str] = []
    child = inode
    for _ in range(MAX_PATH_DEPTH):
        if child == ROOT_INODE:
            return "/" + "/".join(reversed(names))
        name = _name_in_parent(tx, child)
        if name is None:
            break
        names.append(os.fsdecode(name))
        child = read_inode(tx, child).parent
    return f"<inode {inode}>"


def _name_in_parent(tx: ReadTransaction, inode: int) -> bytes | None:
    record = read_inode(tx, inode)
    if not record.nlink or not stat.S_IFMT(record.mode):
        return None
    cookie = 0
    while page := list_entries(tx, record.parent, cookie, SCAN_PAGE_ROWS):
        for entry in page:
            if entry.record.inode == inode:
                return entry.name
        cookie = page[-1].cookie
    return None
