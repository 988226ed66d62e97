"""Random operations on one file against a bytearray, many thousands: what fsx does."""

from __future__ import annotations

import mmap
import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.fuse

_LENGTH = 600_000
"""Longest file: a few blocks of the test volume."""

_FLAGS = (os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDONLY, os.O_RDWR | os.O_APPEND)


class _Exerciser:
    """Three descriptors of one file, and what it must hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._content = bytearray()
        self._done: deque[str] = deque(maxlen=20)
        path.touch()
        self._open = [(os.open(path, flags), flags) for flags in _FLAGS[:3]]
        self._operations: list[Callable[[], str]] = [
            self._write, self._write, self._append, self._truncate, self._read, self._read,
            self._map_read, self._map_write, self._map_write, self._reopen, self._sync, self._size,
        ]  # fmt: skip

    def run(self, count: int) -> None:
        """Do so many operations; what fails tells the last ones."""
        try:
            for _ in range(count):
                self._done.append(self._random.choice(self._operations)())
            assert self._path.read_bytes() == self._content
        except (AssertionError, OSError) as error:
            raise AssertionError(f"after {', '.join(self._done)}") from error
        finally:
            for descriptor, _ in self._open:
                os.close(descriptor)

    def _range(self) -> tuple[int, int]:
        """Somewhere, mostly small, now and then across blocks."""
        start = self._random.randrange(_LENGTH)
        longest = self._random.choice([1, 100, 5_000, 70_000, 300_000])
        return start, min(self._random.randint(1, longest), _LENGTH - start)

    def _descriptor(self, *access: int) -> tuple[int, int]:
        """One that allows what is to be done; opened if there is none."""
        fitting = [item for item in self._open if item[1] & os.O_ACCMODE in access]
        if not fitting:
            self._open[0] = self._replaced(self._open[0][0], os.O_RDWR)
            return self._open[0]
        return self._random.choice(fitting)

    def _replaced(self, descriptor: int, flags: int) -> tuple[int, int]:
        os.close(descriptor)
        return os.open(self._path, flags), flags

    def _put(self, start: int, data: bytes) -> None:
        self._content.extend(bytes(max(0, start - len(self._content))))
        self._content[start : start + len(data)] = data

    def _write(self) -> str:
        start, length = self._range()
        descriptor, flags = self._descriptor(os.O_RDWR, os.O_WRONLY)
        data = self._random.randbytes(length)
        if flags & os.O_APPEND:
            start = len(self._content)
            data = data[: max(0, _LENGTH - start)]
        assert os.pwrite(descriptor, data, start) == len(data)
        self._put(start, data)
        return f"write {start}+{len(data)} by {flags:#x}"

    def _append(self) -> str:
        flags = os.O_WRONLY | os.O_APPEND
        data = self._random.randbytes(min(self._range()[1], _LENGTH - len(self._content)))
        descriptor = os.open(self._path, flags)
        try:
            assert os.write(descriptor, data) == len(data)
        finally:
            os.close(descriptor)
        self._put(len(self._content), data)
        return f"append {len(data)}"

    def _truncate(self) -> str:
        size = self._random.choice([0, self._random.randrange(_LENGTH), len(self._content) // 2])
        if self._random.random() < 0.5:
            os.truncate(self._path, size)
        else:
            os.ftruncate(self._descriptor(os.O_RDWR, os.O_WRONLY)[0], size)
        del self._content[size:]
        self._content.extend(bytes(size - len(self._content)))
        return f"truncate {size}"

    def _read(self) -> str:
        start, length = self._range()
        descriptor, flags = self._descriptor(os.O_RDWR, os.O_RDONLY)
        found = os.pread(descriptor, length, start)
        assert found == self._content[start : start + length], f"read {start}+{length} {flags:#x}"
        return f"read {start}+{length} by {flags:#x}"

    def _mapping(self) -> mmap.mmap | None:
        if not self._content:
            return None
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, len(self._content))
        finally:
            os.close(descriptor)

    def _map_read(self) -> str:
        start, length = self._range()
        view = self._mapping()
        if view is not None:
            with view:
                found = view[start : start + length]
            assert found == self._content[start : start + length], f"map read {start}+{length}"
        return f"map read {start}+{length}"

    def _map_write(self) -> str:
        start, length = self._range()
        view = self._mapping()
        data = self._random.randbytes(max(0, min(start + length, len(self._content)) - start))
        if view is not None:
            with view:
                view[start : start + len(data)] = data
                if self._random.random() < 0.5:
                    view.flush()
            self._content[start : start + len(data)] = data
        return f"map write {start}+{len(data)}"

    def _reopen(self) -> str:
        index = self._random.randrange(len(self._open))
        flags = self._random.choice(_FLAGS)
        self._open[index] = self._replaced(self._open[index][0], flags)
        return f"reopen {flags:#x}"

    def _sync(self) -> str:
        os.fsync(self._random.choice(self._open)[0])
        return "sync"

    def _size(self) -> str:
        assert self._path.stat().st_size == len(self._content)
        assert os.fstat(self._open[0][0]).st_size == len(self._content)
        return "size"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_file_is_what_was_done_to_it(here: Path, seed: int) -> None:
    """1,000 operations of each kind that programs have, through descriptors and mappings."""
    _Exerciser(here / "f", seed).run(1_000)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_file_is_what_was_done_to_it_for_long(here: Path) -> None:
    """100,000 operations, by another seed each time."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    _Exerciser(here / "f", seed).run(100_000)
