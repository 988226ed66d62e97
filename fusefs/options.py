"""Options of a mount, and the `-o` list that names them: one table, which the help shows too."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tectonic_client.cli.parameters import format_size, parse_size
from tectonic_client.errors import BadOption
from tectonic_client.limits import (
    CHUNK_CACHE_SHARE,
    DEFAULT_MEMORY_LIMIT_BYTES,
    METADATA_DEADLINE_S,
    POOL_SHARE,
    PUSH_TIMEOUT_S,
    STORE_DEADLINE_S,
)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How a volume is mounted. Times in seconds, sizes in bytes.

    The kernel trusts attributes for `attr_timeout_s` and names for `entry_timeout_s` before it
    asks again; opening a file always asks. `negative_timeout_s` is the same for names that do not
    exist: 0, because a file that another client made and closed must be found at once. Below
    directories with `coherence=push` all three are `push_timeout_s`: the kernel is told of changes.

    A store or the metadata that does not answer within `store_timeout_s` or `metadata_timeout_s`
    makes the call that waits for it fail.

    `uid`, `gid` and `umask` change how all files appear (as in mount.vfat), not what is stored.
    `metrics` is the address of the Prometheus endpoint. `kernel` are the options that the kernel
    carries out by itself. Without `access_times` reading changes none.
    """

    read_only: bool = False
    access_times: bool = True
    allow_other: bool = False
    nonempty: bool = False
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    read_cache_bytes: int | None = None
    attr_timeout_s: float = 1.0
    entry_timeout_s: float = 1.0
    negative_timeout_s: float = 0.0
    push_timeout_s: float = PUSH_TIMEOUT_S
    store_timeout_s: float = STORE_DEADLINE_S
    metadata_timeout_s: float = METADATA_DEADLINE_S
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    metrics: tuple[str, int] | None = None
    log_file: str | None = None
    log_level: int = logging.INFO
    kernel: frozenset[str] = frozenset()


# --- values -----------------------------------------------------------------------------------


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 86_400:
        raise ValueError(f"{text!r} is not between 0 and 86400 seconds")
    return value


def _push_seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= PUSH_TIMEOUT_S:
        raise ValueError(f"{text!r} is not between 0 and {PUSH_TIMEOUT_S:.0f} seconds")
    return value


def _timeout(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise ValueError(f"{text!r} is less than a second")
    return value


def parse_log_level(text: str) -> int:
    """Number of a level of the logging module. Raises ValueError."""
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is None:
        raise ValueError(f"{text!r} is none of debug, info, warning, error")
    return level


def _id_of(text: str, look_up: Callable[[str], int], what: str) -> int:
    try:
        number = int(text) if text.isdecimal() else look_up(text)
    except KeyError:
        raise ValueError(f"there is no {what} {text!r}") from None
    if number >= 2**32 - 1:  # -1 means "leave it" to chown(2)
        raise ValueError(f"{text} is too large")
    return number


def _user(text: str) -> int:
    return _id_of(text, lambda name: pwd.getpwnam(name).pw_uid, "user")


def _group(text: str) -> int:
    return _id_of(text, lambda name: grp.getgrnam(name).gr_gid, "group")


def _mask(text: str) -> int:
    try:
        value = int(text, 8)
    except ValueError:
        value = -1
    if not 0 <= value <= 0o777:
        raise ValueError(f"{text!r} is not an octal number from 0 to 777")
    return value


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not [ADDRESS:]PORT with a port from 1 to 65535")
    return host, int(port)


# --- the table --------------------------------------------------------------------------------


class _Option(NamedTuple):
    """`name` or, where it takes a value, `name=metavar`; sets `field` to `value` or to what
    `convert` makes of the text."""

    name: str
    field: str
    help: str
    metavar: str = ""
    convert: Callable[[str], object] = str
    value: object = True

    @property
    def usage(self) -> str:
        return f"{self.name}={self.metavar}" if self.metavar else self.name


_TABLE: Final = (
    _Option("ro", "read_only", "Refuse every change."),
    _Option("rw", "read_only", "Allow changes (default).", value=False),
    _Option("allow_other", "allow_other", "Let other users in too; permissions are checked."),
    _Option("nonempty", "nonempty", "Mount over a directory that has files or is a mount."),
    _Option(
        "memory_limit", "memory_limit_bytes",
        "Memory for data beyond the program's own"
        f" (default {format_size(DEFAULT_MEMORY_LIMIT_BYTES)}).",
        "SIZE", parse_size,
    ),
    _Option(
        "read_cache", "read_cache_bytes",
        f"Part of it that data read ahead may occupy (default {POOL_SHARE * CHUNK_CACHE_SHARE:.0%}"
        " of it, no more).", "SIZE", parse_size,
    ),
    _Option(
        "attr_timeout", "attr_timeout_s",
        "How long the kernel trusts attributes before it asks again (default 1).",
        "SECONDS", _seconds,
    ),
    _Option(
        "entry_timeout", "entry_timeout_s", "The same for names (default 1).", "SECONDS", _seconds
    ),
    _Option(
        "negative_timeout", "negative_timeout_s", "The same for names that do not exist (default"
        " 0: a file that another client made is found at once).", "SECONDS", _seconds,
    ),
    _Option(
        "push_timeout", "push_timeout_s", "The same for all three below directories with"
        f" coherence=push, which tell of changes at once (default {PUSH_TIMEOUT_S:.0f}).",
        "SECONDS", _push_seconds,
    ),
    _Option(
        "store_timeout", "store_timeout_s",
        f"How long a chunk store may take to answer (default {STORE_DEADLINE_S:.0f}).",
        "SECONDS", _timeout,
    ),
    _Option(
        "metadata_timeout", "metadata_timeout_s",
        f"The same for the metadata database (default {METADATA_DEADLINE_S:.0f}).",
        "SECONDS", _timeout,
    ),
    _Option("uid", "uid", "Owner that all files appear to have.", "USER", _user),
    _Option("gid", "gid", "Group that all files appear to have.", "GROUP", _group),
    _Option(
        "umask", "umask", "Permissions that all files appear to lack; they appear to have the"
        " others.", "OCTAL", _mask,
    ),
    _Option(
        "relatime", "access_times", "Reading changes the access time where it is older than the"
        " last change, or than a day (default).",
    ),
    _Option("noatime", "access_times", "Reading changes no access times.", value=False),
    _Option(
        "metrics", "metrics", "Serve metrics for Prometheus here (ADDRESS by default 127.0.0.1).",
        "[ADDRESS:]PORT", _address,
    ),
    _Option(
        "log_file", "log_file", "Where the daemon logs (default /var/log/tectonicfs.log, or below"
        " ~/.local/state when not root; in the foreground stderr).", "PATH", os.path.abspath,
    ),
    _Option(
        "log_level", "log_level", "debug, info, warning or error (default info); `tectonicfs"
        " log-level` changes it later.", "LEVEL", parse_log_level,
    ),
)  # fmt: skip

_BY_NAME: Final = {option.name: option for option in _TABLE}

_KERNEL_PAIRS: Final = {
    "nosuid": "suid", "nodev": "dev", "noexec": "exec", "sync": "async",
}  # fmt: skip
"""Opposites among what the kernel carries out; the later one wins. See mount(8)."""

_KERNEL_ALONE: Final = ("dirsync",)

_OPPOSITES: Final = _KERNEL_PAIRS | {off: on for on, off in _KERNEL_PAIRS.items()}

_IGNORED: Final = frozenset({
    "default_permissions",  # always on
    # For mount(8), umount(8) and systemd; some of their versions pass them on.
    "defaults", "auto", "noauto", "_netdev", "nofail", "silent", "loud",
    "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup",
})  # fmt: skip

_IGNORED_PREFIXES: Final = ("x-", "X-", "comment=", "user=", "helper=", "uhelper=")

KNOWN_OPTIONS: Final = ", ".join(
    f"{option.name}=..." if option.metavar else option.name for option in _TABLE
)


def options_help(width: int = 96) -> str:
    """The options of a mount, one a line with its meaning, for `--help`."""
    rows = [(option.usage, option.help) for option in _TABLE]
    rows.append((", ".join(_KERNEL_ALONE + tuple(_OPPOSITES)), "As in mount(8)."))
    indent = 2 + max(len(usage) for usage, _ in rows[:-1]) + 2
    lines = []
    for usage, text in rows:
        start = f"  {usage}  ".ljust(indent)
        lines.append(textwrap.fill(start + text, width, subsequent_indent=" " * indent))
    return "\n".join(lines)


# --- parsing ----------------------------------------------------------------------------------


def parse_options(lists: Iterable[str], *, sloppy: bool = False) -> MountOptions:
    """Options of comma-separated lists; later ones win. What is meant for mount(8) is accepted.

    Raises BadOption; with `sloppy` unknown names are passed over (mount(8), -s).
    """
    found: dict[str, Any] = {}
    kernel: set[str] = set()
    for text in filter(None, (part.strip() for part in ",".join(lists).split(","))):
        if text in _IGNORED or text.startswith(_IGNORED_PREFIXES):
            continue
        if text in _OPPOSITES or text in _KERNEL_ALONE:
            kernel.discard(_OPPOSITES.get(text, ""))
            kernel.add(text)
        elif text.partition("=")[0] in _BY_NAME:
            field, value = _parse(text)
            found[field] = value
        elif text == "strictatime":
            raise BadOption(
                "mount option strictatime cannot be had: access times are kept as by relatime"
                " (the default), or not at all with noatime"
            )
        elif text == "remount":
            raise BadOption(
                "options of a mount cannot be changed while it is mounted:"
                " unmount it, then mount it with the others"
            )
        elif not sloppy:
            raise BadOption(f"unknown mount option {text!r}; known are {KNOWN_OPTIONS}")
    return MountOptions(**found, kernel=frozenset(kernel))


def _parse(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    option = _BY_NAME[name]
    if not option.metavar:
        if equals:
            raise BadOption(f"mount option {name} takes no value")
        return option.field, option.value
    if not value:
        raise BadOption(f"mount option {name} needs a value: {option.usage}")
    try:
        return option.field, option.convert(value)
    except ValueError as error:
        raise BadOption(f"mount option {name}: {error}") from error
