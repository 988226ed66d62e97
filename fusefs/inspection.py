"""What a running mount tells about itself, and what can be changed about it: the commands of the
control socket."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import trio

from fusefs.control import Handler, serving, text_of
from fusefs.flightrecorder import FlightRecorder
from fusefs.options import MountOptions, parse_log_level
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.errors import InvalidArgument, MountError
from tectonic_client.limits import OLDEST_SHOWN
from tectonic_client.recorder import Recorder
from tectonic_client.stats import client_stats
from tectonic_client.volume import Volume

if TYPE_CHECKING:
    from fusefs.operations import FuseOperations

_log = logging.getLogger(__name__)


@asynccontextmanager
async def observable(
    inspection: Inspection, options: MountOptions, socket_path: str, log_directory: str,
    dump_signals: AsyncIterator[int],
) -> AsyncIterator[None]:  # fmt: skip
    """Meanwhile the mount answers at its control socket, writes its flight recorder at signals and
    failures and, where that is wanted, serves metrics.

    Raises MountError where a socket cannot be had.
    """
    recorder = FlightRecorder(inspection.recorder, log_directory)
    with unwrapped_groups():
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(serving(socket_path, inspection.handlers))
            except OSError as error:
                raise MountError(f"no control socket at {socket_path}: {error.strerror}") from error
            if options.metrics is not None:
                from fusefs.exporter import exporting  # its library need not be there

                await stack.enter_async_context(exporting(*options.metrics, inspection.stats))
            nursery.start_soon(recorder.run, dump_signals)
            yield
            nursery.cancel_scope.cancel()


class Inspection:
    """The commands of one mount. Used from the event loop only."""

    def __init__(self, directory: str, volume: Volume, operations: FuseOperations) -> None:
        self._directory = directory
        self._volume = volume
        self._operations = operations
        self._started = time.monotonic()
        self._version = version("tectonicfs")

    @property
    def recorder(self) -> Recorder:
        """The recorder of the mount's operations."""
        return self._operations.recorder

    @property
    def handlers(self) -> dict[str, Handler]:
        """By the names of their commands."""
        return {"stats": lambda request: self.stats(), "log-level": self._set_log_level}

    def stats(self) -> dict[str, Any]:
        """Everything measured since the mount, as JSON values."""
        recorder, versions = self.recorder, self._operations.versions
        return {
            "time": time.time(),
            "uptime_s": time.monotonic() - self._started,
            "version": self._version,
            "pid": os.getpid(),
            "directory": self._directory,
            "log_level": logging.getLevelName(logging.getLogger().level),
            "operations": {name: m.to_json() for name, m in recorder.measured().items()},
            "errors": recorder.errors(),
            "under_way": recorder.under_way(OLDEST_SHOWN),
            "opens": {"pages_kept": versions.kept, "pages_dropped": versions.dropped},
            **client_stats(self._volume),
        }

    def _set_log_level(self, request: Mapping[str, Any]) -> str:
        """Returns the name of the level from before."""
        try:
            level = parse_log_level(text_of(request, "level"))
        except ValueError as error:
            raise InvalidArgument(f"log level {error}") from error
        root = logging.getLogger()
        before = logging.getLevelName(root.level)
        root.setLevel(level)
        _log.info("log level is now %s, was %s", logging.getLevelName(level), before)
        return str(before)
