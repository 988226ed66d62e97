"""The one error tree of tectonicfs. The type carries the verdict: what may the caller do about it?

    TectonicError
    +-- TransientError        the operation did not happen; trying again later may work
    |   +-- StoreUnavailable, MetadataUnavailable, TransactionConflict, DeadlineExceeded
    +-- UnknownOutcome        a write that may or may not have happened; look before trying again
    +-- CorruptionError       stored bytes are wrong or gone; never returned as data
    |   +-- CorruptRecord, CorruptChunk, ChunkMissing, CorruptCheckpoint
    +-- PermanentError        trying again gives the same answer
        +-- FileSystemError   POSIX answers: NotFound, Exists, NotEmpty, NoSpace, ...
        +-- VolumeError       VolumeNotFound, VolumeExists, FormatTooNew, StoreMismatch, BadURL, ...
        +-- MetadataRefused   the metadata engine does not take a request of ours
        +-- MountError        a directory cannot be mounted or unmounted as asked
        +-- SessionLost       this client was declared dead; what it had not published is gone
        +-- CheckpointError   StepExists, StepNotFound, RanksMissing, StateMismatch, ...

Messages are one line, name the thing (file, block, store, step, rank) and say what to do where
that is not obvious. Foreign exceptions (apsw, psycopg, OSError) are turned into these at the
boundary by table-driven maps and never travel further.
"""

from __future__ import annotations


class TectonicError(Exception):
    """Root of every error that this package raises on purpose."""


# --- verdicts ---------------------------------------------------------------------------------


class TransientError(TectonicError):
    """The operation did not happen; the same call may succeed later."""


class PermanentError(TectonicError):
    """The same call will give the same answer until something else changes."""


class CorruptionError(TectonicError):
    """Stored bytes failed their check or are gone. Wrong bytes are never returned."""


class UnknownOutcome(TectonicError):
    """A write may or may not have taken effect (connection lost during commit, I/O error)."""


# --- transient --------------------------------------------------------------------------------


class StoreUnavailable(TransientError):
    """A chunk store does not answer, or its device fails requests."""


class MetadataUnavailable(TransientError):
    """The metadata engine does not answer."""


class TransactionConflict(TransientError):
    """A transaction lost against concurrent ones until its deadline."""


class DeadlineExceeded(TransientError):
    """The operation's deadline passed before it could start."""


# --- corruption -------------------------------------------------------------------------------


class CorruptRecord(CorruptionError):
    """A persisted metadata record failed its checksum or breaks its format."""


class CorruptChunk(CorruptionError):
    """A chunk failed its checksum, is truncated, or belongs elsewhere."""


class ChunkMissing(CorruptionError):
    """A chunk that metadata names is not in its store."""


class CorruptCheckpoint(CorruptionError):
    """A checkpoint file's header, tree or index breaks its format."""


# --- POSIX answers ----------------------------------------------------------------------------


class FileSystemError(PermanentError):
    """An answer that POSIX defines; the doors map each class to its errno or nfsstat."""


class NotFound(FileSystemError):
    """ENOENT"""


class Exists(FileSystemError):
    """EEXIST"""


class NotDirectory(FileSystemError):
    """ENOTDIR"""


class IsDirectory(FileSystemError):
    """EISDIR"""


class NotEmpty(FileSystemError):
    """ENOTEMPTY"""


class InvalidArgument(FileSystemError):
    """EINVAL"""


class NameTooLong(FileSystemError):
    """ENAMETOOLONG"""


class NotPermitted(FileSystemError):
    """EPERM"""


class TooManyLinks(FileSystemError):
    """EMLINK"""


class TooManySymlinks(FileSystemError):
    """ELOOP"""


class FileTooLarge(FileSystemError):
    """EFBIG"""


class ReadOnly(FileSystemError):
    """EROFS: the volume was opened read-only, or the store's device is."""


class NoSpace(FileSystemError):
    """ENOSPC: a chunk store or the metadata engine is full."""


class NoSuchAttribute(FileSystemError):
    """The inode has no extended attribute of that name (ENODATA)."""


class ValueTooLarge(FileSystemError):
    """The value of an extended attribute is longer than one may be (E2BIG)."""


class NotSupported(FileSystemError):
    """This file system has no such thing (EOPNOTSUPP)."""


class QuotaExceeded(FileSystemError):
    """A directory's quota has no room left (EDQUOT)."""


class CrossQuota(FileSystemError):
    """A name would lead from one quota into another (EXDEV): copying is possible."""


class StaleHandle(FileSystemError):
    """ESTALE: the inode is gone."""


class BadHandle(FileSystemError):
    """EBADF: no such open file, or not open for this."""


# --- volumes and configuration ----------------------------------------------------------------


class VolumeError(PermanentError):
    """The volume cannot be formatted or opened as asked."""


class VolumeNotFound(VolumeError):
    """There is no volume at this metadata URL."""


class VolumeExists(VolumeError):
    """Formatting would destroy a volume."""


class FormatTooNew(VolumeError):
    """Written by a newer release than this one understands."""


class BadURL(VolumeError):
    """A metadata or store URL that cannot be understood."""


class StoreMismatch(VolumeError):
    """A store directory is missing, not initialised, or belongs to another volume or store."""


class BadOption(VolumeError):
    """An option's value is outside its range."""


class UsedAfterFork(VolumeError):
    """Opened before a fork and used in the child; open it again there."""


class MetadataRefused(PermanentError):
    """The metadata engine refuses what it should take: not the software, or schema, we expect."""


class MountError(PermanentError):
    """A directory cannot be mounted or unmounted as asked."""


class SessionLost(PermanentError):
    """The session was declared dead and cleaned up; reopen the volume."""


# --- checkpoints ------------------------------------------------------------------------------


class CheckpointError(PermanentError):
    """A checkpoint operation cannot be done as asked."""


class StepExists(CheckpointError):
    """The step is already committed."""


class StepNotFound(CheckpointError):
    """No such committed step."""


class StepInProgress(CheckpointError):
    """Another live run is saving this step."""


class RanksMissing(CheckpointError):
    """Some ranks did not arrive; `ranks` names them. Nothing became visible."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks)
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])


class RankMismatch(CheckpointError):
    """The ranks disagree about the save: step, world_size, or who holds a rank."""


class StateMismatch(CheckpointError):
    """The state to load into differs from the checkpoint; `problems` lists every difference."""

    def __init__(self, message: str, problems: tuple[str, ...]) -> None:
        super().__init__(message, problems)
        self.problems = problems

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedLeaf(CheckpointError):
    """The state holds values that cannot be stored; the message names each path."""
