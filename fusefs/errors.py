"""From the error tree to errno: one table, used by the one wrapper around every handler.

A class that is not in the table takes the entry of its nearest ancestor. What nobody expected
becomes EIO with a traceback in the log: a handler that raises anything but FUSEError would end
the mount.
"""

from __future__ import annotations

import errno
import logging
from typing import Final, NamedTuple

from tectonic_client import errors

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What the caller of the system call gets, and whether the log tells about it."""

    errno: int
    log_level: int = logging.DEBUG


ANSWERS: Final[dict[type[BaseException], Answer]] = {
    errors.NotFound: Answer(errno.ENOENT),
    errors.Exists: Answer(errno.EEXIST),
    errors.NotDirectory: Answer(errno.ENOTDIR),
    errors.IsDirectory: Answer(errno.EISDIR),
    errors.NotEmpty: Answer(errno.ENOTEMPTY),
    errors.InvalidArgument: Answer(errno.EINVAL),
    errors.NameTooLong: Answer(errno.ENAMETOOLONG),
    errors.NotPermitted: Answer(errno.EPERM),
    errors.TooManyLinks: Answer(errno.EMLINK),
    errors.TooManySymlinks: Answer(errno.ELOOP),
    errors.FileTooLarge: Answer(errno.EFBIG),
    errors.ReadOnly: Answer(errno.EROFS),
    errors.NoSpace: Answer(errno.ENOSPC, logging.WARNING),
    errors.NoSuchAttribute: Answer(errno.ENODATA),
    errors.ValueTooLarge: Answer(errno.E2BIG),
    errors.NotSupported: Answer(errno.EOPNOTSUPP),
    errors.QuotaExceeded: Answer(errno.EDQUOT, logging.INFO),
    errors.CrossQuota: Answer(errno.EXDEV),
    errors.StaleHandle: Answer(errno.ESTALE),
    errors.BadHandle: Answer(errno.EBADF),
    # Nothing is wrong with the data: programs that retry may try again.
    errors.DeadlineExceeded: Answer(errno.ETIMEDOUT, logging.WARNING),
    errors.TransactionConflict: Answer(errno.ETIMEDOUT, logging.WARNING),
    errors.TransientError: Answer(errno.EIO, logging.WARNING),
    errors.UnknownOutcome: Answer(errno.EIO, logging.ERROR),
    errors.CorruptionError: Answer(errno.EIO, logging.ERROR),
    errors.SessionLost: Answer(errno.EIO, logging.ERROR),
    errors.PermanentError: Answer(errno.EIO, logging.ERROR),
    MemoryError: Answer(errno.ENOMEM, logging.ERROR),
}


def root_cause(error: BaseException) -> BaseException:
    """The error itself, or the first one of an exception group (trio's nurseries make them)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def errno_of(error: Exception, operation: str) -> int:
    """The errno that answers `operation`; logs what an administrator must know."""
    cause = root_cause(error)
    for kind in type(cause).__mro__:
        answer = ANSWERS.get(kind)
        if answer is not None:
            _log.log(answer.log_level, "%s: %s: %s", operation, type(cause).__name__, cause)
            return answer.errno
    _log.error("%s failed unexpectedly", operation, exc_info=error)
    return errno.EIO
