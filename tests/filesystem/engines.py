"""Volumes on the real engines and stores, for tests that use several clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.filesystem.faultrig import new_volume
from tests.postgres import PostgresServer

NewVolume = Callable[[], str]
"""Formats a volume and returns its metadata URL."""


@pytest.fixture(params=["sqlite", "postgresql"])
def any_engine(request: pytest.FixtureRequest, disk_path: Path) -> NewVolume:
    """New volumes in files of this test's own, their metadata in each engine in turn."""
    numbers = itertools.count()

    def make() -> str:
        base = disk_path / f"volume-{next(numbers)}"
        if request.param == "sqlite":
            return new_volume(f"{base}.db", f"{base}-store", stores=2)
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return new_volume(server.fresh_url(), f"{base}-store", stores=2)

    return make


@pytest.fixture
def sqlite_volume(disk_path: Path) -> str:
    """A volume on the embedded engine and flash stores."""
    return new_volume(str(disk_path / "meta.db"), str(disk_path / "store"), stores=2)
