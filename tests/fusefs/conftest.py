"""Fixtures of the mount tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.filesystem.faultrig import new_volume
from tests.fusefs.mounts import format_volume, mounted, tectonicfs
from tests.fusefs.pairs import Pair, mounted_pair
from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def fuse() -> None:
    """Skips where the kernel gives no FUSE; everything else that is missing is a failure."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("this machine has no usable /dev/fuse")


@pytest.fixture
def volume(tmp_path: Path) -> str:
    """Metadata URL of a new volume."""
    return format_volume(tmp_path)


@pytest.fixture(scope="session")
def shared_mount(fuse: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One mounted volume for all tests that only use it; it must unmount cleanly at the end."""
    base = tmp_path_factory.mktemp("shared")
    # Device nodes open as on the host, others may use it; only root may ask for that.
    options = () if os.getuid() else ("dev", "allow_other")
    with mounted(format_volume(base), base / "mnt", *options) as mount:
        yield mount.path
        tectonicfs("umount", mount.path)


@pytest.fixture
def here(shared_mount: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of its own in the shared mount."""
    path = shared_mount / request.node.name.replace("/", "_")[:200]
    path.mkdir()
    return path


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_pair(
    fuse: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two mounts over each engine for tests that only use them; both must unmount cleanly."""
    base = tmp_path_factory.mktemp("pair")
    url = str(base / "meta.db")
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh_url()
    new_volume(url, str(base / "store"))
    with mounted_pair(url, base) as pair:
        yield pair
        for mount in pair:
            tectonicfs("umount", mount.path)
