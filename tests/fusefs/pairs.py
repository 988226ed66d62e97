"""Two mounts of one volume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fusefs.mounts import MountedVolume, mounted

Pair = tuple[MountedVolume, MountedVolume]

PLAIN, PUSH = "plain", "push"
"""Directories of a pair's volume: without and with the policy that tells of changes."""

POLICY = "user.tectonicfs.coherence"


@contextmanager
def mounted_pair(url: str, base: Path) -> Iterator[Pair]:
    """Both mounted, for the duration of a test."""
    with ExitStack() as stack:
        one = stack.enter_context(mounted(url, base / "one"))
        two = stack.enter_context(mounted(url, base / "two"))
        for name in (PLAIN, PUSH):
            (one.path / name).mkdir()
        os.setxattr(one.path / PUSH, POLICY, b"push")
        yield one, two
