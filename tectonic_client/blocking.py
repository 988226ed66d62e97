"""A synchronous face of a volume: the trio core runs in a thread of its own.

For callers without an event loop: the checkpoint API and the command line. Any thread may call
`run`, except one that runs a trio loop itself (it should use `volume.open_volume`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from types import TracebackType
from typing import TypeVar

import trio

from tectonic_client.errors import MetadataUnavailable, TectonicError, UsedAfterFork
from tectonic_client.kv.urls import display_url
from tectonic_client.volume import Volume, VolumeOptions, open_volume

T = TypeVar("T")


class BlockingVolume:
    """An open volume for synchronous code; a context manager. Not usable after a fork."""

    def __init__(self, meta_url: str, options: VolumeOptions | None = None) -> None:
        """Open the volume. Raises what `open_volume` raises."""
        self._url = meta_url
        self._options = options
        self._pid = os.getpid()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, name=f"tectonicfs {display_url(meta_url)}", daemon=True
        )
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        # A program that forgets to close still leaves its session cleanly.
        atexit.register(self._close_at_exit)

    def _serve(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            self._failure = error
        finally:
            self._opened.set()

    async def _main(self) -> None:
        async with open_volume(self._url, self._options) as volume:
            self.volume: Volume = volume
            self._token = trio.lowlevel.current_trio_token()
            self._stop = trio.Event()
            self._opened.set()
            await self._stop.wait()

    @property
    def open(self) -> bool:
        """Whether `run` can be called."""
        return os.getpid() == self._pid and self._thread.is_alive()

    def run(self, work: Callable[[Volume], Awaitable[T]]) -> T:
        """Result of `await work(volume)`, run in the volume's event loop.

        A KeyboardInterrupt cancels the work and is raised once that has ended, so that nothing
        goes on to use the caller's memory. Raises UsedAfterFork, MetadataUnavailable where the
        volume is closed, and what `work` raises.
        """
        if os.getpid() != self._pid:
            raise UsedAfterFork(
                "this volume was opened before a fork: open it again in the child process"
            )
        outcome: Future[T] = Future()
        scope = trio.CancelScope()
        try:
            task = partial(self._carry_out, work, scope, outcome)
            self._token.run_sync_soon(self._start, task, outcome)
            return outcome.result()
        except trio.RunFinishedError:
            raise self._closed() from self._failure
        except BaseException:
            if not outcome.done():  # the caller was interrupted
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(scope.cancel)
                    wait((outcome,))
            raise

    def _start(self, task: Callable[[], Awaitable[None]], outcome: Future[T]) -> None:
        try:
            self.volume.nursery.start_soon(task)
        except RuntimeError:  # it has ended
            outcome.set_exception(self._closed())

    async def _carry_out(
        self, work: Callable[[Volume], Awaitable[T]], scope: trio.CancelScope, outcome: Future[T]
    ) -> None:
        try:
            with scope:
                outcome.set_result(await work(self.volume))
                return
            outcome.set_exception(CancelledError())
        except trio.Cancelled:
            outcome.set_exception(self._closed())
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            outcome.set_exception(error)

    def _closed(self) -> MetadataUnavailable:
        return MetadataUnavailable(f"volume {display_url(self._url)} is closed")

    def close(self) -> None:
        """Flush and leave the volume; idempotent. Raises the first error of the last flush."""
        atexit.unregister(self._close_at_exit)
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _close_at_exit(self) -> None:
        # The interpreter is ending: nobody can handle an error any more, and what could not be
        # finished is cleaned up by the next client, as after a crash.
        with contextlib.suppress(TectonicError, RuntimeError):
            self.close()

    def __enter__(self) -> BlockingVolume:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
