"""Which version of a file this mount's kernel has pages of: decides about `keep_cache`."""

from __future__ import annotations

from collections import OrderedDict

from tectonic_client.limits import MAX_REMEMBERED_OPENS
from tectonic_client.types import Attributes


class OpenedVersions:
    """Remembers (mtime, ctime, size) of the last open of each of the latest files."""

    def __init__(self, capacity: int = MAX_REMEMBERED_OPENS) -> None:
        self._capacity = capacity
        self._versions: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        self.kept = 0
        self.dropped = 0
        """Opens that did, and did not, find the version that the kernel has."""

    def note_open(self, attributes: Attributes) -> bool:
        """Note an open of the file; whether it is unchanged since the last one.

        The attributes must be from before the file was opened: were they newer than what the open
        handle reads, pages of the older version would later pass for the newer one.
        """
        version = (attributes.mtime_ns, attributes.ctime_ns, attributes.size)
        unchanged = self._versions.pop(attributes.inode, None) == version
        self._versions[attributes.inode] = version
        if len(self._versions) > self._capacity:
            self._versions.popitem(last=False)
        self.kept += unchanged
        self.dropped += not unchanged
        return unchanged

    def forget(self, inode: int) -> None:
        """The open that was noted last failed: what pages the kernel has is not known."""
        self._versions.pop(inode, None)
