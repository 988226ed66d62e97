"""What ends a benchmark early."""

from __future__ import annotations

from tectonic_client.errors import PermanentError


class BenchError(PermanentError):
    """The benchmark cannot be run as asked, or its figures would not mean what they say."""


class RankFailed(BenchError):
    """A rank process raised or died; `trace` is its traceback, if there is one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace
