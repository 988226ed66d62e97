"""Opening files that have no name any more.

Programs do so by way of /proc/PID/fd. The kernel also does, by a name that it still trusts and that
another mount has removed or given to another file, where this mount has the old file open: then the
program must get what the name stands for now. The request does not tell which it is. Answered with
StaleHandle the kernel walks the path again, asking for each name, and so comes back to the same
inode only where no name was involved.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tectonic_client.errors import StaleHandle
from tectonic_client.limits import MAX_FUSE_TASKS

_CAPACITY: Final = 4 * MAX_FUSE_TASKS
"""Opens that were sent back: no more than requests can be under way, with room for those that do
not return because their name led elsewhere."""


class OpensOfRemoved:
    """Which opens have been sent back once."""

    def __init__(self) -> None:
        self._sent_back: OrderedDict[tuple[int, int], None] = OrderedDict()

    def require_second_look(self, thread: int, inode: int) -> None:
        """Raise StaleHandle the first of each two times that a thread opens the inode."""
        key = (thread, inode)
        if key in self._sent_back:
            del self._sent_back[key]
            return
        self._sent_back[key] = None
        if len(self._sent_back) > _CAPACITY:
            self._sent_back.popitem(last=False)
        raise StaleHandle(f"inode {inode} has no name any more")
