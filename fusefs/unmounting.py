"""`umount`: detach a mount, and wait until its daemon has flushed everything and is gone."""

from __future__ import annotations

import os
from collections.abc import Callable

from fusefs import registry
from fusefs.mounttable import FSTYPE, Mount, detach, find_mount, mount_point
from fusefs.registry import Daemon
from tectonic_client.errors import MountError
from tectonic_client.limits import UMOUNT_WAIT_S


def unmount(
    directory: str, *, lazy: bool = False, force: bool = False, timeout_s: float = UMOUNT_WAIT_S,
    on_second: Callable[[float], None] = lambda waited_s: None,
) -> str:  # fmt: skip
    """Unmount; returns one line about what was done, after the daemon has ended.

    `lazy` detaches the directory at once and does not wait for programs that still use it. `force`
    tells the daemon to end although programs use it; they get errors, what they wrote is flushed.
    Mounts whose daemon has died are cleaned up. `on_second` is called while waiting.

    Raises MountError: no mount, busy (naming by whom), not permitted, the flush failed, the daemon
    died, or it still runs after `timeout_s`.
    """
    place = mount_point(directory)
    found = find_mount(place)
    if found is not None and found.fstype != FSTYPE:
        raise MountError(f"{place} is a mount of type {found.fstype}, not of tectonicfs")
    user_id = os.getuid() if found is None else found.user_id
    if os.geteuid() not in (0, user_id):
        raise MountError(f"{place} was mounted by user {user_id}: only they or root may unmount it")
    with registry.living_daemon(place, user_id) as daemon:
        if daemon is None:
            return _clean_up(place)
        if found is not None:
            _detach_living(found, daemon, lazy=lazy, force=force)
        elif not daemon.state.mounted:
            raise MountError(
                f"{place} is just being mounted (pid {daemon.state.pid}): try again when it is, or"
                " end that process"
            )
        if lazy:
            return f"{place} is detached; its daemon flushes and ends when its last file is closed"
        return _await_end(place, daemon, timeout_s, on_second)


def _clean_up(place: str) -> str:
    # Looked for again: a daemon that has ended in order meanwhile had detached it before.
    if find_mount(place) is None:
        raise MountError(f"{place} is not mounted")
    detach(place, lazy=True)
    return f"{place} is unmounted; its daemon was gone already, without flushing"


def _detach_living(found: Mount, daemon: Daemon, *, lazy: bool, force: bool) -> None:
    if force:
        # It detaches the directory itself, in use or not, and then flushes.
        daemon.terminate(found.user_id)
        return
    try:
        detach(found.directory, lazy=lazy)
    except MountError:
        now = find_mount(found.directory)
        if now is not None and now.device == found.device:
            raise
        # Another umount was quicker: the daemon is waited for all the same.


def _await_end(
    place: str, daemon: Daemon, timeout_s: float, on_second: Callable[[float], None]
) -> str:
    outcome = daemon.wait(timeout_s, on_second)
    if outcome == registry.CLEAN:
        return f"{place} is unmounted and everything is flushed"
    log = f"; see {daemon.state.log_file}" if daemon.state.log_file else ""
    if outcome is None:
        raise MountError(
            f"{place} is unmounted, but its daemon (pid {daemon.state.pid}) died before it had"
            f" flushed: writes that were not followed by fsync or close may be lost{log}"
        )
    raise MountError(f"{place} is unmounted, but its daemon ended with an error: {outcome}{log}")
