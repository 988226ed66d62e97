"""Asking mounts about themselves: finds their daemons, shows what they tell."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live

from fusefs import registry
from fusefs.control import ask
from fusefs.mounttable import FSTYPE, Mount, find_mount, mount_point, mounts
from fusefs.statsview import view
from tectonic_client.cli.parameters import plain_console
from tectonic_client.errors import MountError
from tectonic_client.kv.urls import absolute_url, display_url


def ask_mount(directory: str, command: str, **arguments: object) -> Any:
    """Ask the daemon of the mount on `directory`. Raises MountError."""
    place = mount_point(directory)
    found = find_mount(place)
    if found is None or found.fstype != FSTYPE:
        raise MountError(f"{place} is {_what_instead(place)}")
    return _ask(found, command, **arguments)


def _what_instead(place: str) -> str:
    """What a directory is that is no mount (any more)."""
    with registry.living_daemon(place, os.getuid()) as daemon:
        if daemon is None:
            return "not a mount of tectonicfs"
        if not daemon.state.mounted:
            return f"just being mounted (pid {daemon.state.pid})"
        return (
            f"unmounted already; its daemon (pid {daemon.state.pid}) ends when its last file is"
            " closed and everything is flushed"
        )


def _ask(mount: Mount, command: str, **arguments: object) -> Any:
    if os.geteuid() not in (0, mount.user_id):
        raise MountError(
            f"{mount.directory} was mounted by user {mount.user_id}: only they or root may ask"
        )
    with registry.living_daemon(mount.directory, mount.user_id) as daemon:
        if daemon is None:
            raise MountError(
                f"{mount.directory} is a stale mount whose daemon is gone:"
                f" run tectonicfs umount {mount.directory}"
            )
        return ask(daemon.socket_path, mount.user_id, command, **arguments)


def _look(target: str) -> list[dict[str, Any]]:
    """The stats of the mount on a directory, or of all mounts of a volume on this machine."""
    if "://" not in target and _is_directory(target):
        return [ask_mount(target, "stats")]
    found = [_ask(mount, "stats") for mount in _mounts_of(target)]
    if not found:
        raise MountError(f"no mount of {display_url(target)} on this machine")
    return found


def _is_directory(path: str) -> bool:
    """Asks nothing of a mount, which may hang."""
    return find_mount(mount_point(path)) is not None or os.path.isdir(path)


def _mounts_of(meta_url: str) -> Iterator[Mount]:
    volume = display_url(absolute_url(meta_url))
    for mount in mounts():
        if mount.fstype == FSTYPE and os.geteuid() in (0, mount.user_id):
            with registry.living_daemon(mount.directory, mount.user_id) as daemon:
                if daemon is not None and daemon.state.volume == volume:
                    yield mount


def print_lines(target: str, interval_s: float | None) -> None:
    """JSON, one mount a line; again and again where there is an interval."""
    while True:
        for stats in _look(target):
            click.echo(json.dumps(stats))
        if interval_s is None:
            return
        time.sleep(interval_s)


def show_once(target: str) -> None:
    """The figures since the mount."""
    plain_console().print(_page(_look(target), {}))


def show_live(target: str, interval_s: float) -> None:
    """Tables that are refreshed until interrupted; into a pipe, those of `show_once`."""
    console = plain_console()
    if not console.is_terminal:
        show_once(target)
        return
    found = _look(target)
    with Live(_page(found, {}), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            earlier = {stats["pid"]: stats for stats in found}
            found = _look(target)
            live.update(_page(found, earlier), refresh=True)


def _page(found: list[dict[str, Any]], earlier: dict[int, dict[str, Any]]) -> RenderableType:
    """`earlier` is by process: a mount that was made anew begins at zero.

    Raises MountError where a daemon tells something else: it may be of another version, or lie.
    """
    try:
        return Group(*(view(stats, earlier.get(stats["pid"])) for stats in found))
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise MountError(
            f"the daemon tells what this version does not understand: {error!r}"
        ) from error
