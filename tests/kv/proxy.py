"""A TCP proxy that a test can watch, cut and freeze: the network between client and server."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Forwards connections to `server_port` of the loopback, each by two threads."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._trigger: bytes | None = None
        self._forward_trigger = False
        self._freeze_trigger: bytes | None = None
        self._swallow_answer = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._client_spoke = False
        self.round_trips = 0
        """Answers of the server to something sent since its last answer."""

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # shutdown, not close: only it ends an accept() that is waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        self.thaw()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._listener.close()

    def cut(self) -> None:
        """End every connection now."""
        with self._lock:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def cut_at(self, trigger: bytes, *, forward: bool) -> None:
        """End every connection, once, when a client sends `trigger`.

        With `forward` the server gets it and answers, and the answer is lost.
        """
        self._forward_trigger = forward
        self._trigger = trigger

    def freeze(self) -> None:
        """Forward nothing until `thaw`."""
        self._flowing.clear()

    def freeze_at(self, trigger: bytes) -> None:
        """Freeze when a client sends `trigger`: the server gets it, its answer is held back."""
        self._freeze_trigger = trigger

    def thaw(self) -> None:
        """Forward again, on connections that are still open."""
        self._flowing.set()

    def _start(self, run: object, *arguments: socket.socket) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            self._start(self._pump_requests, client, server)

    def _pump_requests(self, client: socket.socket, server: socket.socket) -> None:
        """Client to server; starts the other direction and closes both ends after it."""
        answers = threading.Thread(target=self._pump_answers, args=(server, client))
        answers.start()
        while data := self._receive(client):
            self._client_spoke = True
            if self._freeze_trigger is not None and self._freeze_trigger in data:
                self._freeze_trigger = None
                self._flowing.clear()
            if self._trigger is not None and self._trigger in data:
                self._trigger = None
                if not self._forward_trigger:
                    break
                self._swallow_answer = True
            if not self._send(server, data):
                break
        self._end(client, server)
        answers.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump_answers(self, server: socket.socket, client: socket.socket) -> None:
        while data := self._receive(server):
            if self._client_spoke:
                self._client_spoke = False
                self.round_trips += 1
            if self._swallow_answer:
                self._swallow_answer = False
                break
            if not self._send(client, data):
                break
        self._end(client, server)

    def _receive(self, end: socket.socket) -> bytes:
        try:
            data = end.recv(1 << 16)
        except OSError:
            return b""
        self._flowing.wait()
        return data

    def _send(self, end: socket.socket, data: bytes) -> bool:
        try:
            end.sendall(data)
        except OSError:
            return False
        return True

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
