"""The control socket answers those who may ask, and survives whatever anybody sends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs import control
from fusefs.control import ask, serving, text_of
from tectonic_client.errors import InvalidArgument, MountError
from tectonic_client.limits import MAX_CONTROL_CONNECTIONS, MAX_CONTROL_REQUEST_BYTES


def _echo(request: Mapping[str, Any]) -> str:
    return text_of(request, "text")


def _defect(request: Mapping[str, Any]) -> None:
    raise ZeroDivisionError("a defect in a command")


HANDLERS = {"echo": _echo, "defect": _defect}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the socket goes."""
    return str(tmp_path / "control.sock")


@asynccontextmanager
async def _asking(path: str) -> AsyncIterator[Callable[..., Any]]:
    """Served meanwhile; gives `ask`, for a task."""
    async with serving(path, HANDLERS):

        async def asked(command: str, **arguments: object) -> Any:
            return await trio.to_thread.run_sync(
                partial(ask, path, os.geteuid(), command, **arguments)
            )

        yield asked


async def _send(path: str, data: bytes, *, end: bool = True) -> bytes:
    """What comes back until the other side closes the connection."""
    stream = await trio.open_unix_socket(path)
    received = b""
    async with stream:
        try:
            await stream.send_all(data)
            if end:
                await stream.send_eof()
            async for part in stream:
                received += part
        except trio.BrokenResourceError:
            return received
    return received


def test_a_request_gets_its_answer(path: str) -> None:
    """Answers and errors arrive; the file is nobody else's; afterwards it is gone."""

    async def main() -> None:
        async with _asking(path) as asked:
            assert os.stat(path).st_mode & 0o777 == 0o600
            assert await asked("echo", text="é\n") == "é\n"
            with pytest.raises(MountError, match="needs a text 'text'"):
                await asked("echo", text=7)
            with pytest.raises(MountError, match="unknown command; known are defect, echo"):
                await asked("dance")
            with pytest.raises(MountError, match="log says why"):
                await asked("defect")
            assert await asked("echo", text="still there") == "still there"
        assert os.listdir(os.path.dirname(path)) == []

    trio.run(main)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", b"{}\n", b"[]\n", b"null\n", b'"echo"\n', b"\xff\xfe\n", b"\0" * 100 + b"\n",
        b"[" * 4000 + b"\n", b'{"command": ["echo"]}\n', b'{"command": {}}\n',
        b'{"command": "echo"', b"x" * (3 * MAX_CONTROL_REQUEST_BYTES), b'{"command": 1e999}\n',
        b'{"command": "__class__"}\n', b"1" * 4000 + b"\n",
    ],
)  # fmt: skip
def test_hostile_input_costs_its_sender_the_connection(path: str, data: bytes) -> None:
    """Whatever is sent gets an error or nothing, and others are served as before."""

    async def main() -> None:
        async with _asking(path) as asked:
            reply = await _send(path, data)
            assert reply == b"" or "error" in json.loads(reply)
            assert await asked("echo", text="x") == "x"

    trio.run(main)


def test_who_sends_nothing_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections, more than are served at once, hold up others for the timeout only."""
    monkeypatch.setattr(control, "CONTROL_TIMEOUT_S", 0.2)

    async def main() -> None:
        async with serving(path, HANDLERS):
            replies: list[bytes] = []

            async def stay_silent() -> None:
                replies.append(await _send(path, b'{"command"', end=False))

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    for _ in range(2 * MAX_CONTROL_CONNECTIONS):
                        nursery.start_soon(stay_silent)
                assert replies == [b""] * (2 * MAX_CONTROL_CONNECTIONS)
                good = json.dumps({"command": "echo", "text": "x"}).encode() + b"\n"
                assert json.loads(await _send(path, good)) == {"ok": "x"}

    trio.run(main)


def test_who_does_not_read_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that lets a long answer lie does not keep the daemon waiting."""
    monkeypatch.setattr(control, "CONTROL_TIMEOUT_S", 0.2)
    handlers = {"long": lambda request: "x" * 3_000_000}

    async def main() -> None:
        async with serving(path, handlers):
            stream = await trio.open_unix_socket(path)
            async with stream:
                await stream.send_all(b'{"command": "long"}\n')
                with trio.fail_after(30):
                    await trio.sleep(0.4)  # the limit itself is what is measured
                    received = b""
                    while part := await stream.receive_some():
                        received += part
            assert 0 < len(received) < 3_000_000

    trio.run(main)


def test_other_users_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says who connects; where file permissions failed, that still decides."""
    if os.geteuid() != 0:
        pytest.skip("only root can connect as somebody else")

    def connect_as_nobody() -> bytes:
        """In a child, whose credentials may change for good."""
        parent, child = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                os.chdir(directory)  # while it may: those above are closed to others
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(os.path.basename(path))
                    connection.sendall(b'{"command": "echo", "text": "x"}\n')
                    child.sendall(connection.recv(1000))
            finally:
                os._exit(0)
        child.close()
        os.waitpid(pid, 0)
        with parent:
            return parent.recv(1000)

    directory = os.path.dirname(path)
    os.chmod(directory, 0o755)

    async def main() -> None:
        async with serving(path, HANDLERS):
            os.chmod(path, 0o666)
            reply = json.loads(await trio.to_thread.run_sync(connect_as_nobody))
            assert "only the user who mounted it" in reply["error"]

    trio.run(main)


def test_the_socket_of_a_killed_daemon_is_replaced(path: str) -> None:
    """A socket file without a process, or anything else in its place, keeps nobody from serving."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(MountError, match="did not answer at"):
        ask(path, os.geteuid(), "echo")

    async def main() -> None:
        async with _asking(path) as asked:
            assert await asked("echo", text="x") == "x"

    trio.run(main)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "is ending: it hung up"),
        (b"nonsense\n", "did not answer at"),
        (b"[" * 100_000, "did not answer at"),
        (b"[]\n", "the daemon refused: None"),
        (b'{"error": "no"}\n', "the daemon refused: no"),
        (b"x" * 5_000_000, "too long"),
    ],
)
def test_a_bad_answer_is_one_clear_error(path: str, reply: bytes, said: str) -> None:
    """Who asks a daemon that answers nonsense gets an error, in bounded memory."""

    async def main() -> None:
        with trio.socket.socket(socket.AF_UNIX) as listener:
            await listener.bind(path)
            listener.listen()

            async def answer() -> None:
                connection, _ = await listener.accept()
                stream = trio.SocketStream(connection)
                async with stream:
                    await stream.receive_some(1000)
                    try:
                        await stream.send_all(reply)
                    except trio.BrokenResourceError:
                        return

            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                with pytest.raises(MountError, match=said):
                    await trio.to_thread.run_sync(ask, path, os.geteuid(), "echo")

    trio.run(main)


def test_a_daemon_that_hangs_is_told_from_one_that_is_gone(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer in time is an error that says so."""
    monkeypatch.setattr(control, "CONTROL_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(MountError, match="it hangs"):
            ask(path, os.geteuid(), "echo")


def test_a_socket_of_somebody_else_is_not_asked(path: str) -> None:
    """Where another user's process listens nothing is sent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(MountError, match="a process of another user than"):
            ask(path, os.geteuid() + 1, "echo")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == b""


def test_a_missing_text_is_named() -> None:
    """Handlers check what they are given."""
    with pytest.raises(InvalidArgument, match="needs a text 'level'"):
        text_of({"level": None}, "level")
