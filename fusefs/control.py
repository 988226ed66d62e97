"""The control socket of a daemon: one request and one reply per connection, each a line of JSON.

It works while the mount itself is stuck, because it shares nothing with it but the event loop. The
socket's file has mode 0600 and lies in a directory of mode 0700; besides, the kernel tells who
connects (SO_PEERCRED, unix(7)): only the daemon's user and root are served. Whatever a peer sends
or omits costs it its connection and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

from tectonic_client.errors import InvalidArgument, MountError, TectonicError
from tectonic_client.limits import (
    CONTROL_TIMEOUT_S,
    MAX_CONTROL_CONNECTIONS,
    MAX_CONTROL_REPLY_BYTES,
    MAX_CONTROL_REQUEST_BYTES,
    KiB,
)

_log = logging.getLogger(__name__)

Handler = Callable[[Mapping[str, Any]], Any]
"""Answers a command: gets the request, returns JSON values. Raises TectonicError."""

_RECEIVE_BYTES: Final = 64 * KiB

_CREDENTIALS: Final = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


# --- the daemon's side ------------------------------------------------------------------------


@asynccontextmanager
async def serving(path: str, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    """Answer requests at `path` meanwhile.

    The caller is the only daemon that may use this path: what a killed one left there is replaced.
    Raises OSError where no socket can be made there.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # From its first moment on nobody else may connect; nothing is connected before `listen`.
        await listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CONTROL_CONNECTIONS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_accept, listener, handlers)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                with suppress(FileNotFoundError):
                    os.unlink(path)


async def _accept(listener: trio.socket.SocketType, handlers: Mapping[str, Handler]) -> None:
    slots = trio.Semaphore(MAX_CONTROL_CONNECTIONS)

    async def serve(connection: trio.socket.SocketType) -> None:
        with connection:
            try:
                with trio.move_on_after(CONTROL_TIMEOUT_S):
                    await _serve(connection, handlers)
            except OSError as error:
                _log.debug("control socket: %s", error)
            finally:
                slots.release()

    async with trio.open_nursery() as nursery:
        while True:
            await slots.acquire()
            try:
                connection, _ = await listener.accept()
            except OSError as error:  # out of descriptors, or the peer is gone already
                _log.warning("control socket: %s", error)
                slots.release()
                await trio.sleep(CONTROL_TIMEOUT_S)
                continue
            nursery.start_soon(serve, connection)


async def _serve(connection: trio.socket.SocketType, handlers: Mapping[str, Handler]) -> None:
    # Received in any case: who is still sending would not hear why it is refused.
    request = await _receive_line(connection)
    if request is None:
        return
    if _user_of(connection) in (0, os.geteuid()):
        reply = _answer(request, handlers)
    else:
        reply = {"error": "only the user who mounted it, and root, may ask"}
    await trio.SocketStream(connection).send_all(json.dumps(reply).encode() + b"\n")


def _user_of(connection: trio.socket.SocketType | socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(raw)
    return int(user_id)


async def _receive_line(connection: trio.socket.SocketType) -> bytes | None:
    """The request without its newline; None where it is too long or the peer stops before."""
    received = bytearray()
    while len(received) <= MAX_CONTROL_REQUEST_BYTES:
        data = await connection.recv(MAX_CONTROL_REQUEST_BYTES)
        if not data:
            return None
        received += data
        line, newline, _ = received.partition(b"\n")
        if newline:
            return bytes(line)
    return None


def _answer(line: bytes, handlers: Mapping[str, Handler]) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {"error": "the request is not JSON"}
    command = request.get("command") if isinstance(request, dict) else None
    handler = handlers.get(command) if isinstance(command, str) else None
    if handler is None:
        return {"error": f"unknown command; known are {', '.join(sorted(handlers))}"}
    try:
        return {"ok": handler(request)}
    except TectonicError as error:
        return {"error": str(error)}
    except Exception:  # noqa: BLE001 - whatever it is, the mount must live on
        _log.exception("control command %s failed", command)
        return {"error": "the command failed; the daemon's log says why"}


def text_of(request: Mapping[str, Any], name: str) -> str:
    """A text that a request must have. Raises InvalidArgument."""
    value = request.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"the request needs a text {name!r}")
    return value


# --- everybody else's side --------------------------------------------------------------------


def ask(path: str, user_id: int, command: str, **arguments: object) -> Any:
    """Ask the daemon of a user at `path`; returns what its handler did.

    Raises MountError: nobody answers there in CONTROL_TIMEOUT_S, somebody else's process does (the
    path may lie where others can put links), it ends meanwhile, or what the daemon said.
    """
    line = json.dumps({"command": command, **arguments}).encode() + b"\n"
    try:
        answer = _exchange(path, user_id, line)
        if not answer:
            raise MountError("the daemon is ending: it hung up without an answer")
        reply = json.loads(answer)
    except TimeoutError as error:
        raise MountError(
            f"the daemon did not answer in {CONTROL_TIMEOUT_S:.0f} s: it hangs; see its log"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise MountError(f"the daemon did not answer at {path}: {error}") from error
    if not isinstance(reply, dict) or "ok" not in reply:
        said = reply.get("error") if isinstance(reply, dict) else None
        raise MountError(f"the daemon refused: {said}")
    return reply["ok"]


def _exchange(path: str, user_id: int, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(CONTROL_TIMEOUT_S)
        connection.connect(path)
        if _user_of(connection) != user_id:
            raise ValueError(f"a process of another user than {user_id} listens there")
        connection.sendall(line)
        received = bytearray()
        while data := connection.recv(_RECEIVE_BYTES):
            received += data
            if len(received) > MAX_CONTROL_REPLY_BYTES:
                raise ValueError("its answer is too long")
    return bytes(received)
