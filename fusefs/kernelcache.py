"""What the kernel keeps of the file system, and making it forget what other clients changed.

The kernel's calls may block: dropping a name needs the lock of its directory, which a request of
this mount may hold, and dropping pages waits for those being read. So each runs in a thread, one
per inode at a time, and whoever waits for it stops doing so where a request that holds the lock
waits for other clients in turn (`Audience.wait_unless_held`); the kernel then forgets when that
request has ended.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from tectonic_client.limits import FORGETTING_DEADLINE_S, MAX_FUSE_TASKS
from tectonic_client.types import Change, ChangeKind

if TYPE_CHECKING:
    from tectonic_client.filesystem.core import FileSystem

_log = logging.getLogger(__name__)

_KNOWS_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN, errno.EBADF)
"""The kernel has nothing of the kind, or the mount is gone."""


@dataclass(slots=True)
class _Job:
    """What is to be forgotten of one inode."""

    names: set[bytes] = field(default_factory=set)
    pages: bool = False
    done: trio.Event = field(default_factory=trio.Event)


class KernelCache:
    """A `follower.Cache`: the kernel's, of one mount.

    `drop_entry(directory, name)` and `drop_inode(inode, attributes_only)` are the kernel's calls;
    they raise OSError and block.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        nursery: trio.Nursery,
        drop_entry: Callable[[int, bytes], None],
        drop_inode: Callable[[int, bool], None],
    ) -> None:
        self._filesystem = filesystem
        self._nursery = nursery
        self._drop_entry = drop_entry
        self._drop_inode = drop_inode
        self._next: dict[int, _Job] = {}
        """By inode; not begun yet."""
        self._working: set[int] = set()
        self._idle = trio.Event()
        # As many requests can hold a lock each; so no job waits for a thread for long.
        self._threads = trio.CapacityLimiter(MAX_FUSE_TASKS + 1)

    async def forget(self, found: Sequence[Change]) -> None:
        """Drop names, attributes and pages of what changed."""
        jobs = {}
        for change in found:
            job = jobs[change.inode] = self._job(change.inode)
            if change.kind is ChangeKind.ENTRY:
                job.names.add(change.name)
            else:
                job.pages = True
        await self._wait(jobs)

    async def forget_open_files(self) -> None:
        """Drop the pages of open files; what else is kept has run out (see `follower`)."""
        jobs = {}
        for inode in self._filesystem.files.following():
            job = jobs[inode] = self._job(inode)
            job.pages = True
        await self._wait(jobs)

    async def close(self) -> None:
        """Wait until the kernel's calls have ended: the session that they use is to go."""
        with trio.move_on_after(FORGETTING_DEADLINE_S, shield=True):
            while self._working:
                self._idle = trio.Event()
                await self._idle.wait()

    async def _wait(self, jobs: dict[int, _Job]) -> None:
        async with trio.open_nursery() as nursery:
            for inode, job in jobs.items():
                nursery.start_soon(self._filesystem.audience.wait_unless_held, inode, job.done)

    def _job(self, inode: int) -> _Job:
        """The inode's next job, which begins when the caller awaits something."""
        if inode not in self._next:
            self._next[inode] = _Job()
            if inode not in self._working:
                self._working.add(inode)
                self._nursery.start_soon(self._work, inode)
        return self._next[inode]

    async def _work(self, inode: int) -> None:
        try:
            while (job := self._next.pop(inode, None)) is not None:
                await trio.to_thread.run_sync(
                    self._carry_out, inode, job, limiter=self._threads, abandon_on_cancel=True
                )
                job.done.set()
        finally:
            self._working.discard(inode)
            self._idle.set()

    def _carry_out(self, inode: int, job: _Job) -> None:
        for name in job.names:
            self._attempt(partial(self._drop_entry, inode, name))
        self._attempt(partial(self._drop_inode, inode, not job.pages))

    @staticmethod
    def _attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in _KNOWS_NOTHING:
                _log.error("the kernel keeps something that changed: %s", error)
