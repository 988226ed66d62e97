"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tectonic_client.limits import KiB
from tectonic_client.volume import FormatOptions, format_volume


@pytest.fixture
def url(disk_path: Path) -> str:
    """A volume on two stores whose blocks are small, so that a state has several."""
    meta = str(disk_path / "meta.db")
    format_volume(
        meta,
        FormatOptions(
            name="ranks",
            stores=(str(disk_path / "store-0"), str(disk_path / "store-1")),
            chunk_bytes=64 * KiB,
            block_bytes=128 * KiB,
        ),
    )
    return meta
