"""Life of a mount: check, open the volume, serve, flush. In the foreground or as a daemon.

Order at the end, whatever ends it: requests in flight are answered, the directory is detached, the
volume flushes everything dirty and closes, the outcome is written for a waiting `umount`, the
process ends. `umount` reports success only after that.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import trio

from fusefs import daemon, registry
from fusefs.allocator import keep_freed_memory
from fusefs.checks import check
from fusefs.errors import root_cause
from fusefs.inspection import Inspection, observable
from fusefs.mounttable import FSTYPE, find_mount, mount_point
from fusefs.notify import notify
from fusefs.options import MountOptions
from tectonic_client.errors import BadOption
from tectonic_client.kv.urls import absolute_url, display_url
from tectonic_client.limits import FUSE_TASK_SHARE, THREAD_SWITCH_S
from tectonic_client.recorder import Recorder
from tectonic_client.volume import VolumeOptions, open_volume

_log = logging.getLogger(__name__)

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_DUMP_SIGNAL: Final = signal.SIGUSR1
"""Writes the flight recorder out."""

_LOG_FORMAT: Final = "%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"


def mount(meta_url: str, directory: str, options: MountOptions) -> int:
    """Mount a volume; returns the daemon's pid once the mount answers.

    Raises MountError, BadOption, and what opening the volume raises, as MountError of the daemon.
    """
    place = check(directory, options)
    log_file = options.log_file or default_log_file()
    url = absolute_url(meta_url)

    def serve(on_ready: Callable[[], None]) -> None:
        _serve(url, place, options, log_file, on_ready)

    return daemon.start(serve, lambda: _log_to(log_file, options.log_level))


def mount_foreground(meta_url: str, directory: str, options: MountOptions) -> None:
    """Mount a volume and serve it until it is unmounted or a signal asks to end.

    Logs to stderr unless the options name a file. Raises as `mount`, and what the last flush
    raises.
    """
    place = check(directory, options)
    _log_to(options.log_file, options.log_level)

    def on_ready() -> None:
        notify("READY=1")

    _serve(absolute_url(meta_url), place, options, options.log_file, on_ready)


def is_mounted(meta_url: str, directory: str) -> bool:
    """Whether a living daemon serves this volume on this directory, named by the same URL."""
    place = mount_point(directory)
    found = find_mount(place)
    if found is None or found.fstype != FSTYPE:
        return False
    with registry.living_daemon(place, found.user_id) as living:
        return living is not None and living.state.volume == display_url(absolute_url(meta_url))


def _serve(
    meta_url: str, directory: str, options: MountOptions, log_file: str | None,
    on_ready: Callable[[], None],
) -> None:  # fmt: skip
    keep_freed_memory(int(options.memory_limit_bytes * FUSE_TASK_SHARE))
    # The event loop holds the GIL most of the time; threads that end a transaction or a put get it
    # within this time instead of the default 5 ms (measured: 5 times the metadata rate under load).
    sys.setswitchinterval(THREAD_SWITCH_S)
    claim = registry.claim(directory, display_url(meta_url), log_file)

    def on_mounted() -> None:
        claim.mounted()
        on_ready()

    try:
        trio.run(
            _serve_volume, meta_url, directory, options, claim.socket_path,
            os.path.dirname(log_file or default_log_file()), on_mounted,
        )  # fmt: skip
    except BaseException as error:
        claim.finish(f"{root_cause(error)}")
        raise
    claim.finish(registry.CLEAN)
    _log.info("%s is unmounted and flushed", directory)


async def _serve_volume(
    meta_url: str, directory: str, options: MountOptions, socket_path: str, log_directory: str,
    on_ready: Callable[[], None],
) -> None:  # fmt: skip
    # Loading pyfuse3 may fail; `check` has told the user what to do then.
    from fusefs.operations import FuseOperations
    from fusefs.session import serve

    volume_options = VolumeOptions(
        memory_limit_bytes=options.memory_limit_bytes, read_only=options.read_only, client="mount",
        read_cache_bytes=options.read_cache_bytes, access_times=options.access_times,
        metadata_deadline_s=options.metadata_timeout_s, store_deadline_s=options.store_timeout_s,
    )  # fmt: skip
    # Signals stay caught until the volume is flushed: a second one must not cut that short.
    with (
        trio.open_signal_receiver(*_STOP_SIGNALS) as signals,
        trio.open_signal_receiver(_DUMP_SIGNAL) as dump_signals,
    ):
        async with open_volume(meta_url, volume_options) as volume:
            operations = FuseOperations(volume.filesystem, options, Recorder())
            inspection = Inspection(directory, volume, operations)
            async with observable(inspection, options, socket_path, log_directory, dump_signals):
                await serve(
                    operations, volume.record.name, directory, options,
                    signals=signals, on_ready=on_ready,
                )  # fmt: skip
            notify("STOPPING=1")
            _log.info("flushing")


# --- logging ----------------------------------------------------------------------------------


def default_log_file() -> str:
    """Where a daemon logs unless told otherwise."""
    if os.geteuid() == 0:
        return "/var/log/tectonicfs.log"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "tectonicfs", "tectonicfs.log")


def _log_to(log_file: str | None, level: int) -> None:
    """Send the log to a file (kept open by name, for logrotate), or to stderr."""
    handler: logging.Handler = logging.StreamHandler()
    if log_file is not None:
        try:
            os.makedirs(os.path.dirname(log_file), exist_ok=True)
            handler = logging.handlers.WatchedFileHandler(log_file)
        except OSError as error:
            raise BadOption(
                f"cannot write the log file {log_file}: {error.strerror};"
                " -o log_file=... names another one"
            ) from error
    logging.basicConfig(level=level, format=_LOG_FORMAT, handlers=[handler], force=True)
