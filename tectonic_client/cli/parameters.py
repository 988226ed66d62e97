"""Parameter types and output that several commands share."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import click
from rich.console import Console

from tectonic_client.errors import NotFound
from tectonic_client.limits import GiB, KiB, MiB
from tectonic_client.records import Codec

_PIPE_COLUMNS: Final = 4096
"""Width of what is printed into a pipe: nothing is cut off or wrapped for a reader by machine."""

_UNITS = {
    "": 1, "b": 1, "k": KiB, "kib": KiB, "m": MiB, "mib": MiB, "g": GiB, "gib": GiB,
    "t": 1024 * GiB, "tib": 1024 * GiB, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `1.5G`, `4096`, ... Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write for example 4096, 64MiB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size_bytes: float) -> str:
    """A size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024 or unit == "TiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


class Size(click.ParamType[int]):
    """A number of bytes with an optional unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of the text."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Compression(click.ParamType[tuple[Codec, int]]):
    """`none`, `auto[:level]` or `zstd[:level]`."""

    name = "none|auto[:level]|zstd[:level]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Codec, int]:
        """Codec and level."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(none|auto|zstd)(?::(\d+))?", value)
        if match is None or (match[1] == "none" and match[2]):
            self.fail(f"{value!r} is not one of {self.name}", param, ctx)
        return Codec[match[1].upper()], int(match[2] or 1)


def plain_console() -> Console:
    """Prints names and messages as they are, whatever rich would read into [brackets] or :colons:.

    Into a pipe or file every row of a table goes whole, on one line.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    return console


def counted(number: int, one: str, several: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def no_directory(path: str) -> NotFound:
    """What to raise where DIR is not there: most often it was written as a mount shows it."""
    return NotFound(
        f"there is no directory {path} in the volume; a path begins at the volume's root, not at a"
        " mount"
    )


def print_json(value: object) -> None:
    """Machine-readable output of a command."""
    click.echo(json.dumps(value, indent=2))
