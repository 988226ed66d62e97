"""Waiting for calls in a trio task; whatever happens to the engine, a wait ends.

Calls are hints, so a listener that broke is replaced at the next wait, and where there is none a
wait is a short pause: those who wait look at the metadata after each one.
"""

from __future__ import annotations

import logging
from types import TracebackType

import trio

from tectonic_client.errors import TectonicError
from tectonic_client.kv.port import KV, Listener
from tectonic_client.limits import DEAF_PAUSE_S

_log = logging.getLogger(__name__)


class AsyncListener:
    """Hears `topic` while it is open: `async with listener:`. For one task at a time."""

    def __init__(self, kv: KV, topic: str) -> None:
        self._kv = kv
        self._topic = topic
        self._listener: Listener | None = None
        self._complained = False

    async def __aenter__(self) -> AsyncListener:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    async def wait(self, timeout_s: float) -> bool:
        """Return at a call, or after `timeout_s` seconds; maybe earlier, for no reason.

        False where contact with the engine was lost: a server that crashed may have forgotten the
        last of what it had acknowledged (`KV.transact`), and what was read of it.
        """
        if self._listener is None:
            await trio.sleep(min(DEAF_PAUSE_S, timeout_s))
            await self._open()
            return True
        with trio.move_on_after(timeout_s):
            await trio.lowlevel.wait_readable(self._listener.fileno())
        try:
            self._listener.drain()
        except TectonicError as error:
            self._complain(error)
            self._close()
            return False
        return True

    async def _open(self) -> None:
        try:
            self._listener = await trio.to_thread.run_sync(self._kv.listen, self._topic)
            self._complained = False
        except TectonicError as error:
            self._complain(error)

    def _complain(self, error: TectonicError) -> None:
        if not self._complained:
            _log.warning("no calls are heard, looking now and then: %s", error)
        self._complained = True

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
