"""Extended attributes (xattr(7)): names and values of an inode beside what stat tells.

A flag in the inode's record says whether it has any, so that asking one that has none reads nothing
more: the kernel asks for `security.capability` at every write through the page cache. Functions
over a transaction; what names mean is `filesystem.policies`.
"""

from __future__ import annotations

from dataclasses import replace

from tectonic_client.errors import (
    InvalidArgument,
    NameTooLong,
    NoSpace,
    NoSuchAttribute,
    NotSupported,
    ValueTooLarge,
)
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import MAX_XATTR_BYTES, MAX_XATTR_LIST_BYTES, MAX_XATTR_NAME_BYTES
from tectonic_client.metadata import keys
from tectonic_client.records import InodeFlag, InodeRecord, XattrRecord

_NAMESPACES = (b"user.", b"trusted.", b"security.")
"""Those of `system.` belong to the kernel; ACLs are not supported."""

_SELINUX = b"security.selinux"
"""SELinux labels FUSE mounts as a whole. That there are no labels is said so that programs like ls
ask once for the file system, and not for every file."""

CAPABILITY = b"security.capability"
"""What executing a file allows its process to do (capabilities(7))."""


def check_xattr_name(name: bytes) -> None:
    """Raise NameTooLong, NotSupported (a namespace that nobody knows), InvalidArgument."""
    if len(name) > MAX_XATTR_NAME_BYTES:
        raise NameTooLong(f"attribute name of {len(name)} bytes, at most {MAX_XATTR_NAME_BYTES}")
    if not name.startswith(_NAMESPACES) or name == _SELINUX:
        raise NotSupported(f"{name!r} is no user., trusted. or security. attribute that is kept")
    if name in _NAMESPACES or b"\x00" in name:
        raise InvalidArgument(f"{name!r} cannot be the name of an attribute")


def read_xattr(tx: ReadTransaction, inode: int, record: InodeRecord, name: bytes) -> bytes:
    """Value of an attribute. Raises NoSuchAttribute."""
    data = tx.get(keys.xattr(inode, name)) if record.flags & InodeFlag.XATTRS else None
    if data is None:
        raise NoSuchAttribute(f"inode {inode} has no attribute {name!r}")
    return XattrRecord.decode(data).value


def list_xattrs(tx: ReadTransaction, inode: int, record: InodeRecord) -> list[bytes]:
    """Names of all attributes, in bytewise order."""
    if not record.flags & InodeFlag.XATTRS:
        return []
    return [keys.parse_xattr(key) for key, _ in tx.scan(*keys.xattrs(inode))]


def write_xattr(
    tx: Transaction, inode: int, record: InodeRecord, name: bytes, value: bytes
) -> InodeRecord:
    """Set an attribute; returns the inode's record as it is to be written.

    Raises ValueTooLarge, NoSpace (more names than listxattr(2) can return).
    """
    check_xattr_name(name)
    if len(value) > MAX_XATTR_BYTES:
        raise ValueTooLarge(f"attribute of {len(value)} bytes, at most {MAX_XATTR_BYTES}")
    others = set(list_xattrs(tx, inode, record)) - {name}
    if sum(len(other) + 1 for other in (*others, name)) > MAX_XATTR_LIST_BYTES:
        raise NoSpace(f"inode {inode} has {len(others)} attributes, their names fill the list")
    tx.put(keys.xattr(inode, name), XattrRecord(value).encode())
    return replace(record, flags=record.flags | InodeFlag.XATTRS)


def remove_xattr(tx: Transaction, inode: int, record: InodeRecord, name: bytes) -> InodeRecord:
    """Remove an attribute; returns the record to write. Raises NoSuchAttribute."""
    read_xattr(tx, inode, record, name)
    tx.delete(keys.xattr(inode, name))
    if list_xattrs(tx, inode, record):
        return record
    return replace(record, flags=record.flags & ~InodeFlag.XATTRS)
