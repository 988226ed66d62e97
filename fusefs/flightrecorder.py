"""Writes the flight recorder of a mount out: at SIGUSR1, and when a request fails with EIO.

JSON lines in a file of the log's directory: first one about the dump, then the operations under
way, the oldest first, then those that have ended. A daemon writes a bounded number of files and,
after errors, not more often than once in RECORDER_DUMP_INTERVAL_S.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from typing import Final

import trio

from tectonic_client.limits import MAX_RECORDER_DUMPS, RECORDER_DUMP_INTERVAL_S
from tectonic_client.recorder import Look, Recorder

_log = logging.getLogger(__name__)

_PRIVATE: Final = 0o600


class FlightRecorder:
    """Writes what `recorder` has into `directory`, which is made if need be."""

    def __init__(self, recorder: Recorder, directory: str) -> None:
        self._recorder = recorder
        self._directory = directory
        self._dumps = 0
        self._failed = trio.Event()
        recorder.on_failure = self._note_failure

    def _note_failure(self) -> None:
        self._failed.set()

    async def run(self, signals: AsyncIterator[int]) -> None:
        """Write a dump at each of `signals` and after failures, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dump_after_failures)
            async for _ in signals:
                await self.dump("signal")

    async def _dump_after_failures(self) -> None:
        while True:
            await self._failed.wait()
            # From here on failures are for the next dump, which comes when it may.
            self._failed = trio.Event()
            await self.dump("a request failed with EIO")
            await trio.sleep(RECORDER_DUMP_INTERVAL_S)

    async def dump(self, reason: str) -> str | None:
        """Write a dump; returns its path, None where that failed (the log says why)."""
        name = f"tectonicfs-flight-{os.getpid()}-{self._dumps % MAX_RECORDER_DUMPS}.jsonl"
        self._dumps += 1
        path = os.path.join(self._directory, name)
        look = self._recorder.look()
        try:
            await trio.to_thread.run_sync(_write, path, look, reason)
        except OSError as error:
            _log.error("cannot write the flight recorder to %s: %s", path, error)
            return None
        _log.warning("flight recorder written to %s: %s", path, reason)
        return path


def _write(path: str, look: Look, reason: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # A new file each time: never through a link that somebody may have put there.
    part = f"{path}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, _PRIVATE)
    with os.fdopen(descriptor, "w") as file:
        for line in look.lines(reason=reason, pid=os.getpid()):
            file.write(line + "\n")
    os.replace(part, path)
