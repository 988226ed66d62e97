"""The mount against a host directory: the same calls must give the same answers and errno."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fusefs.posixcalls import Call, Runner

pytestmark = pytest.mark.fuse

# --- what is called ---------------------------------------------------------------------------

_BLOCK = 256 * 1024
"""The test volume's block: four chunks of 64 KiB."""

_CREATE = os.O_CREAT | os.O_RDWR

_D = Call("mkdir", ("d", 0o755))

_FURNITURE = [
    Call("open", (0, "a", _CREATE)),
    Call("write", (0, _BLOCK + 1000)),
    _D,
    Call("open", (1, "d/a", _CREATE)),
    Call("write", (1, 100)),
    Call("mkdir", ("d/d", 0o755)),
    Call("symlink", ("d", "b")),
]
"""Each sequence starts with these, so that most calls find something to work on."""

paths = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/d", "d/d/a", "b/a", "a/b", "c"])

slots = st.sampled_from([0, 0, 1, 1, 2])

offsets = st.one_of(
    st.integers(0, 100),
    st.sampled_from([4096, 65_536, 65_537, _BLOCK - 1, _BLOCK, 2 * _BLOCK + 7]),
    st.integers(0, 3 * _BLOCK),
)

lengths = st.one_of(
    st.integers(0, 100), st.sampled_from([4096, 65_535, 65_536, _BLOCK]), st.integers(0, _BLOCK + 9)
)

flags = st.builds(
    lambda access, extra: access | sum(extra),
    st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]),
    st.sets(st.sampled_from([os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND])),
).filter(
    # POSIX leaves O_RDONLY|O_TRUNC open, and O_EXCL without O_CREAT.
    lambda value: (
        not (value & os.O_TRUNC and value & os.O_ACCMODE == os.O_RDONLY)
        and not (value & os.O_EXCL and not value & os.O_CREAT)
    )
)

times = st.integers(0, 2**31 * 10**9)

_NULL = (1, 3)
"""What /dev/null is."""

_NOBODYS = (241, 7)
"""A device number that no driver has; opening it fails."""

nodes = st.sampled_from([
    (stat.S_IFIFO, 0, 0), (stat.S_IFSOCK, 0, 0), (stat.S_IFREG, 0, 0), (0, 0, 0),
    (stat.S_IFCHR, *_NULL), (stat.S_IFCHR, *_NOBODYS), (stat.S_IFBLK, *_NOBODYS),
    (stat.S_IFDIR, 0, 0), (stat.S_IFLNK, 0, 0),
])  # fmt: skip

xattr_names = st.sampled_from([
    "user.a", "user.a", "user.a", "user.b", "trusted.a", "security.a", "user." + "n" * 250,
    "user." + "n" * 251, "user.", "nothing.a", "a", "",
])  # fmt: skip

xattr_lengths = st.sampled_from([0, 1, 20, 700, 65_537])
"""All names together must fit a block of the host's file system. 65,537 is too long anywhere."""

buffer_sizes = st.sampled_from([0, 5, 300, 65_536])


def _call(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Call]:
    return st.tuples(*arguments).map(lambda values: Call(name, values))


calls = st.one_of(
    _call("open", slots, paths, flags),
    _call("open", slots, paths, st.just(_CREATE)),
    _call("pwrite", slots, offsets, lengths),
    _call("write", slots, lengths),
    _call("pread", slots, offsets, lengths),
    _call("seek_end", slots),
    _call("ftruncate", slots, offsets),
    _call("fsync", slots),
    _call("fstat", slots),
    _call("fchmod", slots, st.sampled_from([0o600, 0o4755])),
    _call("close", slots),
    _call("mkdir", paths, st.sampled_from([0o777, 0o2755])),
    _call("rmdir", paths),
    _call("unlink", paths),
    _call("link", paths, paths),
    _call("symlink", st.one_of(paths, st.just("../a"), st.just("")), paths),
    _call("readlink", paths),
    _call("mkfifo", paths),
    _call("rename", paths, paths, st.sampled_from([0, 0, 0, 1, 2])),
    _call("listdir", paths),
    _call("stat", paths),
    _call("lstat", paths),
    _call("truncate", paths, offsets),
    _call("chmod", paths, st.sampled_from([0o644, 0o4711, 0o1777])),
    _call("chown", paths, st.sampled_from([0, 1000]), st.sampled_from([0, 1000])),
    _call("utime", paths, times, times),
)

_APPEND = _CREATE | os.O_APPEND

mapping_calls = st.one_of(
    _call("map", slots),
    _call("map_write", offsets, lengths),
    _call("map_read", offsets, lengths),
    _call("map_sync"),
    _call("unmap"),
)

append_calls = st.one_of(
    _call("open", slots, st.sampled_from(["a", "d/a"]), st.just(_APPEND)),
    _call("open", slots, st.sampled_from(["a", "d/a"]), st.just(os.O_WRONLY | os.O_APPEND)),
    _call("write", slots, lengths),
)

node_calls = _call("mknod", paths, nodes).map(
    lambda call: Call(
        "mknod", (call.arguments[0], call.arguments[1][0] | 0o640, *call.arguments[1][1:])
    )
)

xattr_calls = st.one_of(
    _call("setxattr", paths, xattr_names, xattr_lengths,
          st.sampled_from([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE]), st.booleans()),
    _call("fsetxattr", slots, xattr_names, xattr_lengths),
    _call("getxattr", paths, xattr_names, buffer_sizes),
    _call("listxattr", paths, buffer_sizes),
    _call("removexattr", paths, xattr_names, st.booleans()),
)  # fmt: skip

# --- comparing --------------------------------------------------------------------------------

_numbers = itertools.count()


@pytest.fixture(scope="module")
def two_roots(
    shared_mount: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A directory on the mount and one on the host."""
    roots = shared_mount / "oracle", tmp_path_factory.mktemp("host")
    roots[0].mkdir()
    umask = os.umask(0o022)
    yield roots
    os.umask(umask)


def _compare(roots: tuple[Path, Path], sequence: list[Call]) -> None:
    example_roots = [root / f"{next(_numbers)}" for root in roots]
    for root in example_roots:
        root.mkdir()
    runners = [Runner(str(root)) for root in example_roots]
    try:
        for call in sequence:
            ours, theirs = (runner.run(call) for runner in runners)
            assert ours == theirs, f"{call}: mount {ours!r:.200}, host {theirs!r:.200}"
        for runner in runners:
            runner.close_all()
        ours_tree, theirs_tree = (runner.snapshot() for runner in runners)
        assert ours_tree == theirs_tree
    finally:
        for runner, root in zip(runners, example_roots, strict=True):
            runner.close_all()
            shutil.rmtree(root)


@settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(st.lists(calls, min_size=5, max_size=40))
def test_random_calls_answer_as_on_the_host(
    two_roots: tuple[Path, Path], sequence: list[Call]
) -> None:
    """Any sequence of calls gives the host's results and errno, and leaves the same tree."""
    _compare(two_roots, [*_FURNITURE, *sequence])


_LABELS = [
    Call("setxattr", (path, name, 20, 0, True))
    for path in ("a", "d")
    for name in ("user.a", "user.b")
]

_SOMETIMES = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@_SOMETIMES
@given(st.lists(st.one_of(mapping_calls, mapping_calls, append_calls, calls), max_size=40))
def test_mappings_and_appending_answer_as_on_the_host(
    two_roots: tuple[Path, Path], sequence: list[Call]
) -> None:
    """A mapping shows what any descriptor writes and the other way round, whatever happens to
    the file meanwhile; appends of several descriptors land at the end."""
    _compare(two_roots, [*_FURNITURE, Call("map", (0,)), *sequence])


@_SOMETIMES
@given(st.lists(st.one_of(xattr_calls, xattr_calls, node_calls, calls), max_size=40))
def test_extended_attributes_and_nodes_answer_as_on_the_host(
    two_roots: tuple[Path, Path], sequence: list[Call]
) -> None:
    """Extended attributes of every kind of file, with the host's limits and errno."""
    _compare(two_roots, [*_FURNITURE, *_LABELS, *sequence])


# --- all cases of rename ----------------------------------------------------------------------

_KINDS = ["missing", "file", "link to file", "symlink", "empty", "full", "fifo"]


def _make(kind: str, path: str) -> list[Call]:
    return {
        "missing": [],
        "file": [Call("open", (0, path, _CREATE)), Call("write", (0, 10))],
        "link to file": [Call("open", (1, "f", _CREATE)), Call("link", ("f", path))],
        "symlink": [Call("symlink", ("f", path))],
        "empty": [Call("mkdir", (path, 0o755))],
        "full": [Call("mkdir", (path, 0o755)), Call("mkdir", (f"{path}/x", 0o755))],
        "fifo": [Call("mkfifo", (path,))],
    }[kind]


@pytest.mark.parametrize("flag", [0, 1, 2, 3], ids=["plain", "noreplace", "exchange", "both"])
@pytest.mark.parametrize("new", _KINDS)
@pytest.mark.parametrize("old", _KINDS)
def test_every_rename_case_is_as_on_the_host(
    two_roots: tuple[Path, Path], old: str, new: str, flag: int
) -> None:
    """rename of each kind onto each kind, in one directory, across two, onto itself."""
    for place in ("b", "d/b"):
        sequence = [_D, *_make(old, "a"), *_make(new, place)]
        moved = Call("rename", ("a", place, flag))
        _compare(two_roots, [*sequence, moved, Call("listdir", (".",)), Call("listdir", ("d",))])
    _compare(two_roots, [*_make(old, "a"), Call("rename", ("a", "a", flag))])
