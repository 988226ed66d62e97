"""Options of a mount, and the `-o` list that names them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from tectonic_client.cli.parameters import parse_size
from tectonic_client.errors import BadOption
from tectonic_client.limits import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    METADATA_DEADLINE_S,
    STORE_DEADLINE_S,
)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How a volume is mounted. Times in seconds, sizes in bytes.

    The kernel trusts attributes for `attr_timeout_s` and names for `entry_timeout_s` before it
    asks again; opening a file always asks. `negative_timeout_s` is the same for names that do not
    exist: 0, because a file that another client made and closed must be found at once.

    A store or the metadata that does not answer within `store_timeout_s` or `metadata_timeout_s`
    makes the call that waits for it fail.
    """

    read_only: bool = False
    allow_other: bool = False
    nonempty: bool = False
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    attr_timeout_s: float = 1.0
    entry_timeout_s: float = 1.0
    negative_timeout_s: float = 0.0
    store_timeout_s: float = STORE_DEADLINE_S
    metadata_timeout_s: float = METADATA_DEADLINE_S
    log_file: str | None = None
    log_level: int = logging.INFO


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise ValueError(f"{text!r} is not between 0 and 86400 seconds")
    return value


def _timeout(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise ValueError(f"{text!r} is less than a second")
    return value


def _log_level(text: str) -> int:
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is None:
        raise ValueError(f"{text!r} is none of debug, info, warning, error")
    return level


_FLAGS: Final[dict[str, tuple[str, bool]]] = {
    "ro": ("read_only", True),
    "rw": ("read_only", False),
    "allow_other": ("allow_other", True),
    "nonempty": ("nonempty", True),
}

_ALWAYS_ON: Final = ("default_permissions",)

_VALUES: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "memory_limit": ("memory_limit_bytes", parse_size),
    "attr_timeout": ("attr_timeout_s", _seconds),
    "entry_timeout": ("entry_timeout_s", _seconds),
    "negative_timeout": ("negative_timeout_s", _seconds),
    "store_timeout": ("store_timeout_s", _timeout),
    "metadata_timeout": ("metadata_timeout_s", _timeout),
    "log_file": ("log_file", os.path.abspath),
    "log_level": ("log_level", _log_level),
}

KNOWN_OPTIONS: Final = ", ".join([*_FLAGS, *_ALWAYS_ON, *(f"{name}=..." for name in _VALUES)])


def parse_options(lists: Iterable[str]) -> MountOptions:
    """Options of comma-separated lists; later ones win. Raises BadOption."""
    found: dict[str, Any] = {}
    for text in filter(None, (part.strip() for part in ",".join(lists).split(","))):
        if text not in _ALWAYS_ON:
            field, value = _parse(text)
            found[field] = value
    return MountOptions(**found)


def _parse(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if name in _FLAGS and not equals:
        return _FLAGS[name]
    if name in _VALUES and value:
        field, convert = _VALUES[name]
        try:
            return field, convert(value)
        except ValueError as error:
            raise BadOption(f"mount option {name}: {error}") from error
    if name in _VALUES:
        raise BadOption(f"mount option {name} needs a value: {name}=...")
    if name in _FLAGS:
        raise BadOption(f"mount option {name} takes no value")
    raise BadOption(f"unknown mount option {name!r}; known are {KNOWN_OPTIONS}")
