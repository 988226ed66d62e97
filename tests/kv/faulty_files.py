"""A layer below SQLite that fails writes: a full or broken disk, as the engine would see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

_NAME = "faulty"
_BELOW = "unix"


class FaultyFiles(apsw.VFS):
    """Fails writes to write-ahead logs on request."""

    def __init__(self) -> None:
        super().__init__(_NAME, _BELOW)
        self._error: apsw.Error | None = None
        self._writes_left = 0
        self._beyond = 0

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)

    @contextmanager
    def failing(
        self, error: apsw.Error, *, after_writes: int = 0, beyond: int = 0
    ) -> Iterator[None]:
        """Let `after_writes` writes pass, then fail those that end beyond the byte `beyond`."""
        self._error, self._writes_left, self._beyond = error, after_writes, beyond
        try:
            yield
        finally:
            self._error = None

    def before_write(self, end: int) -> None:
        if self._error is None:
            return
        if self._writes_left == 0 and end > self._beyond:
            raise self._error
        self._writes_left = max(0, self._writes_left - 1)


class _FaultyFile(apsw.VFSFile):
    def __init__(
        self, files: FaultyFiles, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self._files = files if path.endswith("-wal") else None
        super().__init__(_BELOW, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._files is not None:
            self._files.before_write(offset + len(data))
        super().xWrite(data, offset)


@contextmanager
def faulty_files() -> Iterator[FaultyFiles]:
    """Databases opened in this block are on faulty files."""
    files = FaultyFiles()
    apsw.set_default_vfs(_NAME)
    try:
        yield files
    finally:
        apsw.set_default_vfs(_BELOW)
        files.unregister()
