"""The kernel session: attaches a file system to a directory, serves it, detaches it.

pyfuse3 has one session per process. The session ends when somebody unmounts the directory or a
signal arrives; in both cases the requests in flight are answered first.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyfuse3
import trio

from fusefs.kernelcache import KernelCache
from fusefs.mounttable import FSTYPE, detach, find_mount
from fusefs.operations import FuseOperations
from fusefs.options import MountOptions
from tectonic_client.errors import MountError
from tectonic_client.limits import (
    FUSE_READ_AHEAD_BYTES,
    FUSE_TASK_BYTES,
    FUSE_TASK_SHARE,
    MAX_FUSE_TASKS,
    MIN_FUSE_TASKS,
    MOUNT_READY_S,
    KiB,
)

if TYPE_CHECKING:
    from tectonic_client.filesystem.core import FileSystem

_log = logging.getLogger(__name__)


def worker_tasks(memory_limit_bytes: int) -> int:
    """How many requests may be in flight under a memory limit."""
    affordable = int(memory_limit_bytes * FUSE_TASK_SHARE) // FUSE_TASK_BYTES
    return max(MIN_FUSE_TASKS, min(MAX_FUSE_TASKS, affordable))


async def serve(
    operations: FuseOperations, volume_name: str, directory: str, options: MountOptions,
    *, signals: AsyncIterator[int], on_ready: Callable[[], None],
) -> None:  # fmt: skip
    """Mount and serve until the directory is unmounted or the first of `signals`.

    Calls `on_ready` once the mount has answered a stat. Raises MountError if it cannot be mounted
    or does not answer.
    """
    _attach(operations, volume_name, directory, options)
    tasks = worker_tasks(options.memory_limit_bytes)
    problems: list[str] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_at_signal, signals)
            nursery.start_soon(_announce, directory, on_ready, problems)
            with _following(operations.filesystem, nursery) as cache:
                await pyfuse3.main(min_tasks=tasks, max_tasks=tasks)
            await cache.close()
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.close(unmount=True)
        _detach_leftover(directory)
    if problems:
        raise MountError(f"{directory} was mounted but {problems[0]}")


@contextmanager
def _following(filesystem: FileSystem, nursery: trio.Nursery) -> Iterator[KernelCache]:
    """Let the kernel forget what other clients change, while it is served."""
    cache = KernelCache(filesystem, nursery, pyfuse3.invalidate_entry, pyfuse3.invalidate_inode)
    filesystem.follower.caches.append(cache)
    try:
        yield cache
    finally:
        filesystem.follower.caches.remove(cache)


async def _stop_at_signal(signals: AsyncIterator[int]) -> None:
    async for number in signals:
        _log.info("signal %d: unmounting", number)
        pyfuse3.terminate()
        return


async def _announce(directory: str, on_ready: Callable[[], None], problems: list[str]) -> None:
    """Ask the mount like any program would, from a thread, while the loop serves it."""
    try:
        with trio.fail_after(MOUNT_READY_S):
            found = await trio.to_thread.run_sync(os.stat, directory, abandon_on_cancel=True)
    except trio.TooSlowError:
        problems.append(f"did not answer in {MOUNT_READY_S:.0f} s")
        pyfuse3.terminate()
    except OSError as error:
        problems.append(f"its root cannot be read: {error.strerror}")
        pyfuse3.terminate()
    else:
        _raise_read_ahead(found.st_dev)
        _log.info("mounted at %s", directory)
        on_ready()


def _raise_read_ahead(device: int) -> None:
    """By default the kernel reads 128 KiB ahead; only root may ask for more."""
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        Path(f"/sys/class/bdi/{name}/read_ahead_kb").write_text(str(FUSE_READ_AHEAD_BYTES // KiB))
    except OSError as error:
        _log.debug("read-ahead of the kernel stays as it is: %s", error)


def _detach_leftover(directory: str) -> None:
    """After an aborted connection (`umount -f`) libfuse leaves the directory mounted."""
    found = find_mount(directory)
    if found is not None and found.fstype == FSTYPE:
        detach(directory, lazy=True)


# --- attaching --------------------------------------------------------------------------------


def _attach(
    operations: FuseOperations, volume_name: str, directory: str, options: MountOptions
) -> None:
    said: list[str] = []
    try:
        with _captured_stderr(said):
            pyfuse3.init(operations, directory, _kernel_options(volume_name, options))
    except RuntimeError as error:
        # libfuse prints the reason and returns none.
        reason = "; ".join(said) or str(error)
        raise MountError(f"cannot mount {directory}: {reason}") from error


def _kernel_options(volume_name: str, options: MountOptions) -> set[str]:
    # What libfuse's option parser or pyfuse3's encoder would trip over is replaced.
    source = re.sub(r"[^A-Za-z0-9._:-]", "_", volume_name)
    found = {"default_permissions", "subtype=tectonicfs", f"fsname={source}", *options.kernel}
    if options.read_only:
        found.add("ro")
    if not options.access_times:
        found.add("noatime")
    if options.allow_other:
        found.add("allow_other")
    return found


@contextmanager
def _captured_stderr(lines: list[str]) -> Iterator[None]:
    """Collect what C code and child processes write to descriptor 2."""
    with tempfile.TemporaryFile() as captured:
        saved = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            captured.seek(0)
            lines += captured.read().decode(errors="replace").split("\n")[:-1]
