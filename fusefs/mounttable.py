"""What the kernel knows about mounts: which there are, who holds them, taking them off."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tectonic_client.errors import MountError

FSTYPE: Final = "fuse.tectonicfs"

_HOLDERS_SHOWN: Final = 5

_HELPER_TIMEOUT_S: Final = 30.0
"""The kernel's part of unmounting takes milliseconds; a daemon that hangs may block it."""

_BUSY_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
"""Between looks at a mount that is busy with nobody in sight: another umount that is under way
holds it for a moment, and so does who looks a path up."""

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo; `device` is major:minor, `user_id` who mounted it."""

    directory: str
    fstype: str
    source: str
    device: str
    user_id: int


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts of a mountinfo file, those on top of others last (proc(5))."""
    return [_parse_line(line) for line in text.splitlines()]


def _parse_line(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields = before.split(" ")
    fstype, source, options = after.split(" ")[:3]
    user = re.search(r"\buser_id=(\d+)", options)
    return Mount(
        _unescape(fields[4]), fstype, _unescape(source), fields[2], int(user[1]) if user else 0
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mounts() -> list[Mount]:
    """All mounts that this process sees, those on top of others last."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def find_mount(directory: str) -> Mount | None:
    """The topmost mount exactly on `directory`, a normalised path."""
    found = [mount for mount in mounts() if mount.directory == directory]
    return found[-1] if found else None


def mount_point(directory: str) -> str:
    """Normalised path of a directory that may be a mount whose daemon is dead or hangs.

    Nothing is asked of the directory itself unless its path, taken literally, is no mount.
    Raises MountError for "", which an unset variable of a script leaves.
    """
    if not directory:
        raise MountError("the directory is named '': give its path")
    parent, name = os.path.split(os.path.abspath(directory))
    literal = os.path.join(os.path.realpath(parent), name)
    return literal if find_mount(literal) else os.path.realpath(literal)


# --- who holds it -----------------------------------------------------------------------------


def holders(directory: str) -> Iterator[str]:
    """Processes that use something below `directory`, as far as /proc lets this user see."""
    for process in Path("/proc").glob("[0-9]*"):
        use = next(_uses(process, directory), None)
        if use is not None:
            yield f"pid {process.name} ({_command(process)}): {use}"


def _uses(process: Path, directory: str) -> Iterator[str]:
    links = {"working directory": "cwd", "root directory": "root", "program": "exe"}
    for meaning, name in links.items():
        if target := _target_below(process / name, directory):
            yield f"{meaning} {target}"
    try:
        open_files = list((process / "fd").iterdir())
        maps = (process / "maps").read_text(errors="surrogateescape")
    except OSError:
        return  # It ended, or belongs to somebody else.
    for descriptor in open_files:
        if target := _target_below(descriptor, directory):
            yield f"open file {target}"
    if f" {directory}/" in maps:
        yield "mapped file"


def _target_below(link: Path, directory: str) -> str | None:
    """Where the link points if that is in `directory`. Reading it asks nothing of the mount."""
    try:
        target = os.readlink(link)
    except OSError:
        return None
    return target if target == directory or target.startswith(directory + "/") else None


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "ended"


# --- taking it off ----------------------------------------------------------------------------


def detach(place: str, *, lazy: bool) -> None:
    """Take a mount off its directory with the system's program for it.

    Raises MountError: busy, naming by whom; not mounted; not permitted; the daemon does not answer.
    """
    if os.geteuid() == 0:
        command = ["umount", *(["--lazy"] if lazy else []), "--", place]
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", place]
    for pause_s in (*_BUSY_PAUSES_S, None):
        reason = _run_helper(command, place)
        if reason is None:
            return
        if "busy" not in reason:
            raise MountError(f"cannot unmount {place}: {reason}")
        found = list(itertools.islice(holders(place), _HOLDERS_SHOWN + 1))
        if found or pause_s is None:
            raise MountError(f"{place} is busy: {_describe(found)}")
        time.sleep(pause_s)


def _run_helper(command: list[str], place: str) -> str | None:
    """What the program complains of; None where it succeeded."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            env={**os.environ, "LC_ALL": "C"}, timeout=_HELPER_TIMEOUT_S,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise MountError(f"{command[0]} is missing: apt install fuse3 mount") from error
    except subprocess.TimeoutExpired as error:
        raise MountError(
            f"{command[0]} of {place} hangs: its daemon does not answer; --force ends it"
        ) from error
    if result.returncode == 0:
        return None
    return result.stderr.strip() or f"exit status {result.returncode}"


def _describe(found: list[str]) -> str:
    shown = "; ".join(found[:_HOLDERS_SHOWN]) or "by a process that /proc does not show"
    more = " and more" if len(found) > _HOLDERS_SHOWN else ""
    return f"{shown}{more}. End them, or use --lazy or --force"
