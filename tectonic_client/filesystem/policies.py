"""Extended attributes and the policies among them.

Names that begin with `user.tectonicfs.` are policies: each is kept in the inode's record, or in
records of its own, and not as an attribute. A new policy gets an entry in `_POLICIES`: what its
value is in a record, and what a record becomes by a value. All other names of `user.`, `trusted.`
and `security.` are kept as they are given. Functions over a transaction.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from tectonic_client.errors import InvalidArgument, NoSuchAttribute
from tectonic_client.filesystem.namespace import Actor
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.metadata import xattrs
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.metadata.sessions import require_session
from tectonic_client.records import InodeFlag, InodeRecord

POLICY_PREFIX: Final = b"user.tectonicfs."


class _Policy(NamedTuple):
    """`read` returns None where the inode does not have it; `write` gets None to take it away."""

    read: Callable[[InodeRecord], bytes | None]
    write: Callable[[InodeRecord, bytes | None], InodeRecord]


# --- coherence --------------------------------------------------------------------------------


def _read_coherence(record: InodeRecord) -> bytes | None:
    return b"push" if record.flags & InodeFlag.PUSH else None


def _write_coherence(record: InodeRecord, value: bytes | None) -> InodeRecord:
    if value == b"push":
        return replace(record, flags=record.flags | InodeFlag.PUSH)
    if value in (b"ttl", None):
        return replace(record, flags=record.flags & ~InodeFlag.PUSH)
    raise InvalidArgument(f"coherence {value!r} is neither push nor ttl")


_POLICIES: Final = {POLICY_PREFIX + b"coherence": _Policy(_read_coherence, _write_coherence)}


def _policy(name: bytes) -> _Policy | None:
    """The policy of a name; None for other attributes. Raises InvalidArgument."""
    if not name.startswith(POLICY_PREFIX):
        return None
    if name not in _POLICIES:
        known = b", ".join(_POLICIES).decode()
        raise InvalidArgument(f"{name!r} is no policy; known are {known}")
    return _POLICIES[name]


# --- all attributes ---------------------------------------------------------------------------


def get(tx: ReadTransaction, inode: int, name: bytes) -> bytes:
    """As getxattr(2). Raises NoSuchAttribute, NotSupported, StaleHandle."""
    policy = _POLICIES.get(name)
    if policy is None:
        xattrs.check_xattr_name(name)
        return xattrs.read_xattr(tx, inode, read_inode(tx, inode), name)
    value = policy.read(read_inode(tx, inode))
    if value is None:
        raise NoSuchAttribute(f"inode {inode} has no policy {name!r}")
    return value


def names(tx: ReadTransaction, inode: int) -> list[bytes]:
    """As listxattr(2)."""
    record = read_inode(tx, inode)
    found = xattrs.list_xattrs(tx, inode, record)
    if stat.S_ISREG(record.mode) or stat.S_ISDIR(record.mode):
        # Others inherit policies too, but Linux lets nobody read a `user.` attribute of theirs:
        # a name that is listed and not there makes programs that copy attributes complain.
        found[:0] = [name for name, policy in _POLICIES.items() if policy.read(record) is not None]
    return found


def put(tx: Transaction, inode: int, name: bytes, value: bytes, actor: Actor) -> InodeRecord:
    """As setxattr(2); returns the inode's new record.

    Raises InvalidArgument, NotSupported, ValueTooLarge, NoSpace, NameTooLong.
    """
    require_session(tx, actor.session_id)
    record = read_inode(tx, inode)
    policy = _policy(name)
    if policy is None:
        changed = xattrs.write_xattr(tx, inode, record, name, value)
    else:
        changed = policy.write(record, value)
    return _write(tx, inode, record, changed, actor)


def remove(tx: Transaction, inode: int, name: bytes, actor: Actor) -> InodeRecord:
    """As removexattr(2); returns the inode's new record.

    Raises NoSuchAttribute, InvalidArgument, NotSupported.
    """
    require_session(tx, actor.session_id)
    record = read_inode(tx, inode)
    policy = _policy(name)
    if policy is None:
        xattrs.check_xattr_name(name)
        changed = xattrs.remove_xattr(tx, inode, record, name)
    else:
        get(tx, inode, name)
        changed = policy.write(record, None)
    return _write(tx, inode, record, changed, actor)


def _write(
    tx: Transaction, inode: int, before: InodeRecord, changed: InodeRecord, actor: Actor
) -> InodeRecord:
    changed = replace(changed, ctime_ns=actor.now_ns)
    write_inode(tx, inode, changed)
    # Who takes the policy away is told of by what it was.
    actor.changes.inode(inode, before if before.flags & InodeFlag.PUSH else changed)
    return changed
