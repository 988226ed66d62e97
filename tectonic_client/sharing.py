"""Who else may use the files that a volume consists of: the group of a setgid directory.

The files of stores and of the embedded database are private, because their bytes are those of
everybody's files: whoever could read a chunk would need no permission on the mount. Where several
users are to open a volume directly (a mount by root and trainers of other users), its directories
are made setgid before `format`: `chgrp GROUP DIR; chmod 2770 DIR`. Their files then belong to that
group (chmod(2), inode(7)), which may read and write them, whatever the umask; others never.
"""

from __future__ import annotations

import os
import stat
from typing import Final

_FILE: Final = 0o660
_DIRECTORY: Final = 0o2770


def is_shared(directory: str | int) -> bool:
    """Whether the files of a directory (its path or descriptor) are its group's, too.

    Raises OSError.
    """
    return bool(os.stat(directory).st_mode & stat.S_ISGID)


def share_file(descriptor: int) -> None:
    """Give a file to its group, where it is ours to give. Raises OSError."""
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, _FILE)


def open_beside(path: str, flags: int, private_mode: int) -> int:
    """Open a file, or make it with `private_mode` or for the group. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, private_mode)
    try:
        if is_shared(os.path.dirname(path)):
            share_file(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_directory(name: str, parent: int, *, shared: bool) -> None:
    """Make a directory in `parent` (a descriptor), for the group if `shared`. Raises OSError."""
    os.mkdir(name, dir_fd=parent)
    if shared:
        os.chmod(name, _DIRECTORY, dir_fd=parent)
