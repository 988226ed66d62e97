"""Directories: listings page by page, times and counts that many clients change at once."""

from __future__ import annotations

import stat
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.errors import (
    InvalidArgument,
    NameTooLong,
    NotDirectory,
    NotFound,
    TooManyLinks,
    TooManySymlinks,
)
from tectonic_client.filesystem import namespace
from tectonic_client.filesystem.namespace import Actor, Place
from tectonic_client.filesystem.paths import path_of, resolve
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import MAX_NAME_BYTES, MAX_SYMLINK_BYTES, PARENT_TIME_LANES
from tectonic_client.metadata import keys, names, sessions
from tectonic_client.metadata.changes import Changes
from tectonic_client.metadata.inodes import read_attributes
from tectonic_client.records import DirentRecord, FileType
from tectonic_client.types import ROOT_INODE, AttributeChanges, Owner, RenameFlag

OWNER = Owner(0, 0)
_FILE = stat.S_IFREG | 0o644
_DIRECTORY = stat.S_IFDIR | 0o755


class Tree:
    """A namespace in memory, with a session and fresh inode numbers."""

    def __init__(self) -> None:
        self.kv = MemoryKV()
        self.kv.transact(lambda tx: namespace.make_root(tx, OWNER, 1))
        self.session = self.new_session()
        self._last = 100

    def new_session(self) -> int:
        return self.kv.transact(lambda tx: sessions.open_session(tx, "test"))

    def actor(self, now_ns: int = 10, session: int | None = None) -> Actor:
        return Actor(session or self.session, now_ns, Changes())

    def make(self, parent: int, name: bytes, mode: int = _DIRECTORY, **actor: int) -> int:
        self._last += 1
        inode = self._last
        self.kv.transact(
            lambda tx: namespace.create(tx, parent, name, inode, mode, OWNER, self.actor(**actor))
        )
        return inode

    def symlink(self, parent: int, name: bytes, target: bytes) -> int:
        self._last += 1
        inode = self._last
        self.kv.transact(
            lambda tx: namespace.symlink(tx, parent, name, inode, target, OWNER, self.actor())
        )
        return inode


def _list(tx: ReadTransaction, page: int) -> list[bytes]:
    found: list[bytes] = []
    cookie = 0
    while entries := names.list_entries(tx, ROOT_INODE, cookie, page):
        found += [entry.name for entry in entries]
        cookie = entries[-1].cookie
    return found


@given(
    present=st.sets(st.integers(0, 40), max_size=30),
    page=st.integers(1, 9),
    hashes=st.integers(1, 12),
)
def test_every_entry_is_listed_once_whatever_its_hash(
    present: set[int], page: int, hashes: int
) -> None:
    """Names of one hash never fall apart over two pages, whatever the page size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "name_hash", lambda name: 4 + int(name) % hashes)
        kv = MemoryKV()
        for number in present:
            record = DirentRecord(number, FileType.REGULAR)
            kv.transact(
                lambda tx, n=number, r=record: names.write_entry(tx, ROOT_INODE, b"%d" % n, r)
            )
        listed = kv.read(lambda tx: _list(tx, page))
        assert sorted(map(int, listed)) == sorted(present)


@given(changes=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=20))
def test_entries_that_stay_are_listed_once_while_others_come_and_go(
    changes: list[tuple[bool, int]],
) -> None:
    """A listing goes on behind its cookie, which stays good however the directory changes."""
    kv, staying = MemoryKV(), {b"stays-%d" % number for number in range(12)}
    record = DirentRecord(5, FileType.REGULAR)

    def add(name: bytes) -> None:
        kv.transact(lambda tx: names.write_entry(tx, ROOT_INODE, name, record))

    for name in staying:
        add(name)
    listed: list[bytes] = []
    cookie, todo = 0, list(changes)
    while entries := kv.read(partial(names.list_entries, directory=1, cookie=cookie, limit=2)):
        listed += [entry.name for entry in entries]
        cookie = entries[-1].cookie
        if todo:
            adding, number = todo.pop()
            if adding:
                add(b"%d" % number)
            else:
                kv.transact(lambda tx, n=number: names.delete_entry(tx, ROOT_INODE, b"%d" % n))
    assert sorted(name for name in listed if name in staying) == sorted(staying)


def test_a_directory_shows_the_newest_time_of_all_sessions() -> None:
    """Creations by many sessions, in lanes that they share; utimens sets back, a change forward."""
    tree = Tree()
    top = tree.make(ROOT_INODE, b"d", now_ns=100)
    for number in range(3 * PARENT_TIME_LANES):
        tree.make(top, b"%d" % number, now_ns=1000 + number, session=tree.new_session())
        found = tree.kv.read(lambda tx: read_attributes(tx, top))
        assert found.mtime_ns == found.ctime_ns == 1000 + number
        assert found.nlink == 3 + number
    changes = AttributeChanges(mtime_ns=7)
    found = tree.kv.transact(
        lambda tx: namespace.change_attributes(tx, top, changes, tree.actor(now_ns=5000))
    )
    assert (found.mtime_ns, found.ctime_ns) == (7, 5000)
    tree.make(top, b"later", _FILE, now_ns=6000)
    found = tree.kv.read(lambda tx: read_attributes(tx, top))
    assert (found.mtime_ns, found.ctime_ns) == (6000, 6000)


def test_subdirectories_are_counted_over_all_sessions() -> None:
    """Made by one session, removed by another, moved by a third: the sum is right."""
    tree = Tree()
    one, two = tree.make(ROOT_INODE, b"one"), tree.make(ROOT_INODE, b"two")
    for number in range(10):
        tree.make(one, b"%d" % number, session=tree.new_session())
    for number in range(4):
        actor = tree.actor(session=tree.new_session())
        tree.kv.transact(lambda tx, n=number, a=actor: namespace.rmdir(tx, one, b"%d" % n, a))
    for number in range(4, 7):
        actor = tree.actor(session=tree.new_session())
        old, new = Place(one, b"%d" % number), Place(two, b"%d" % number)
        tree.kv.transact(
            lambda tx, o=old, n=new, a=actor: namespace.rename(tx, o, n, RenameFlag.NONE, a)
        )
    nlinks = [
        tree.kv.read(lambda tx, d=directory: read_attributes(tx, d)).nlink
        for directory in (ROOT_INODE, one, two)
    ]
    assert nlinks == [4, 5, 5]


def test_a_file_has_no_more_than_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """TooManyLinks at MAX_LINKS, and room again when one goes."""
    monkeypatch.setattr(namespace, "MAX_LINKS", 3)
    tree = Tree()
    inode = tree.make(ROOT_INODE, b"0", _FILE)

    def link(name: bytes) -> None:
        tree.kv.transact(lambda tx: namespace.link(tx, inode, ROOT_INODE, name, tree.actor()))

    link(b"1")
    link(b"2")
    with pytest.raises(TooManyLinks):
        link(b"3")
    tree.kv.transact(lambda tx: namespace.unlink(tx, ROOT_INODE, b"0", tree.actor()))
    link(b"3")


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_what_cannot_be_a_name(name: bytes) -> None:
    """InvalidArgument for every way to make an entry."""
    tree = Tree()
    file = tree.make(ROOT_INODE, b"f", _FILE)
    with pytest.raises(InvalidArgument):
        tree.make(ROOT_INODE, name)
    with pytest.raises(InvalidArgument):
        tree.symlink(ROOT_INODE, name, b"x")
    for change in (
        lambda tx: namespace.link(tx, file, ROOT_INODE, name, tree.actor()),
        lambda tx: namespace.rename(
            tx, Place(ROOT_INODE, b"f"), Place(ROOT_INODE, name), RenameFlag.NONE, tree.actor()
        ),
    ):
        with pytest.raises(InvalidArgument):
            tree.kv.transact(change)


def test_the_longest_names_and_targets() -> None:
    """255 bytes of a name and 4095 of a target fit, one more does not."""
    tree = Tree()
    tree.make(ROOT_INODE, b"n" * MAX_NAME_BYTES)
    tree.symlink(ROOT_INODE, b"l", b"t" * MAX_SYMLINK_BYTES)
    with pytest.raises(NameTooLong):
        tree.make(ROOT_INODE, b"n" * (MAX_NAME_BYTES + 1))
    with pytest.raises(NameTooLong):
        tree.symlink(ROOT_INODE, b"m", b"t" * (MAX_SYMLINK_BYTES + 1))
    with pytest.raises(InvalidArgument):
        tree.symlink(ROOT_INODE, b"m", b"")


def test_paths_are_walked_as_a_kernel_does() -> None:
    """Links relative, absolute, in the middle and at the end; `..` above the root is the root."""
    tree = Tree()
    a = tree.make(ROOT_INODE, b"a")
    b = tree.make(a, b"b")
    file = tree.make(b, b"f", _FILE)
    tree.symlink(a, b"up", b"../a/b")
    tree.symlink(ROOT_INODE, b"abs", b"/a/b")
    end = tree.symlink(b, b"end", b"f")
    tree.symlink(ROOT_INODE, b"loop", b"loop")
    tree.symlink(ROOT_INODE, b"dangling", b"nowhere")
    for path, inode in (
        ("/", ROOT_INODE), ("/../..//./", ROOT_INODE), ("/a/b/f", file), ("/a/up/f", file),
        ("/abs/f", file), ("/abs/../b/end", file), ("/a/b/..", a),
    ):  # fmt: skip
        assert tree.kv.read(lambda tx, p=path: resolve(tx, p)) == inode, path
    assert tree.kv.read(lambda tx: resolve(tx, "/a/b/end", follow=False)) == end
    assert tree.kv.read(lambda tx: path_of(tx, file)) == "/a/b/f"
    for path, error in (
        ("/loop", TooManySymlinks), ("/loop/x", TooManySymlinks), ("/dangling", NotFound),
        ("/a/x", NotFound), ("/a/b/f/x", NotDirectory), ("a", InvalidArgument),
    ):  # fmt: skip
        with pytest.raises(error):
            tree.kv.read(lambda tx, p=path: resolve(tx, p))
