"""Workloads of many files: empty ones, small ones, and a real source tree under its usual tools."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.errors import BenchError
from bench.fs.places import RATE, SECONDS, Recorder

_TOOL_TIMEOUT_S: Final = 600.0

_GIT: Final = (
    "git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0",
    "-c", "safe.directory=*", "-c", "commit.gpgsign=false",
)  # fmt: skip

_ENVIRONMENT: Final = {"LC_ALL": "C", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}

_PREFIX: Final = "tree"
"""Directory of everything in the archive."""


def empty_files(recorder: Recorder) -> None:
    """Create, list, stat and unlink files in one directory."""
    directory, count = recorder.place.directory / "empty", recorder.tools.sizes.empty_files
    directory.mkdir()
    paths = [str(directory / f"file-{number:06d}") for number in range(count)]
    with recorder.phase("create", RATE, count):
        for path in paths:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with recorder.phase("ls-l", SECONDS):
        listed = _tool("ls", "-l", str(directory))
    # The first line is the total.
    if (found := len(listed.splitlines()) - 1) != count:
        raise BenchError(f"ls lists {found} of {count} files in {directory}")
    with recorder.phase("stat", RATE, count):
        for path in paths:
            os.stat(path)
    with recorder.phase("unlink", RATE, count):
        for path in paths:
            os.unlink(path)
    directory.rmdir()


def small_files(recorder: Recorder) -> None:
    """The shape of many data sets: each file written at once, and read back cold."""
    sizes = recorder.tools.sizes
    directory, count = recorder.place.directory / "small", sizes.small_files
    directory.mkdir()
    paths = [directory / f"sample-{number:06d}" for number in range(count)]
    contents = os.urandom(sizes.small_file_bytes)
    with recorder.phase("small-write", RATE, count):
        for path in paths:
            path.write_bytes(contents)
    with recorder.phase("small-read", RATE, count):
        for path in paths:
            if len(path.read_bytes()) != len(contents):
                raise BenchError(f"{path} reads back too short")
    for path in paths:
        path.unlink()
    directory.rmdir()


# --- a source tree ----------------------------------------------------------------------------


def source_tree(recorder: Recorder) -> None:
    """Unpack, ask git what changed, add up and remove a tree of several thousand files."""
    directory = recorder.place.directory
    tree = str(directory / _PREFIX)
    with recorder.phase("untar", SECONDS):
        _tool("tar", "-xf", str(recorder.tools.archive), "-C", str(directory), "--no-same-owner")
    # The index has other inode numbers and times: git would read every file.
    _tool(*_GIT, "-C", tree, "update-index", "-q", "--refresh")
    with recorder.phase("git-status", SECONDS):
        changed = _tool(*_GIT, "-C", tree, "status", "--porcelain")
    if changed:
        raise BenchError(f"git finds changes where there are none: {changed.splitlines()[0]}")
    with recorder.phase("du", SECONDS):
        _tool("du", "-s", tree)
    with recorder.phase("rm-r", SECONDS):
        _tool("rm", "-r", tree)


def make_archive(path: Path, count: int) -> int:
    """Pack a git repository of the first files of Python's library; returns how many there were.

    Works in a directory beside `path`.
    """
    root, tree = Path(sysconfig.get_paths()["stdlib"]), path.with_name(_PREFIX)
    packed = 0
    for source in itertools.islice(_sources(root), count):
        target = tree / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        packed += 1
    _tool(*_GIT, "-C", str(tree), "init", "-q")
    _tool(*_GIT, "-C", str(tree), "add", "--all", "--force")
    _tool(*_GIT, "-C", str(tree), "commit", "-q", "-m", "All files")
    _tool(*_GIT, "-C", str(tree), "repack", "-a", "-d", "-q")
    _tool("tar", "-cf", str(path), "-C", str(tree.parent), tree.name)
    shutil.rmtree(tree)
    return packed


def _sources(directory: Path) -> Iterator[Path]:
    """Regular files below a directory in the order of their names, without what Python makes."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir() and path.name != "__pycache__":
            yield from _sources(path)
        elif path.is_file():
            yield path


def _tool(*command: str) -> str:
    """Run a program; returns what it printed. Raises BenchError with its first complaint."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=_TOOL_TIMEOUT_S, env={**os.environ, **_ENVIRONMENT},
        )  # fmt: skip
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise BenchError(f"{command[0]}: {said}")
    return done.stdout
