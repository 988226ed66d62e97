"""The synchronous face of a volume: interrupts, closing, forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tectonic_client.blocking import BlockingVolume
from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.errors import MetadataUnavailable, SessionLost, UsedAfterFork
from tectonic_client.volume import FormatOptions, Volume, format_volume, volume_status


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "meta.db")
    format_volume(url, FormatOptions("test", (str(tmp_path / "store"),)))
    return url


@pytest.fixture
def blocking(url: str) -> Iterator[BlockingVolume]:
    with BlockingVolume(url) as volume:
        yield volume


def test_an_interrupt_ends_the_work_first(blocking: BlockingVolume) -> None:
    """Ctrl-C during a save returns only when nothing reads the caller's arrays any more."""
    events: list[str] = []
    main = threading.main_thread().ident
    assert main is not None

    async def work(volume: Volume) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(lambda: events.append("a thread ended"))
            events.append("ended")

    with pytest.raises(KeyboardInterrupt):
        blocking.run(work)
    assert events == ["a thread ended", "ended"]

    async def name(volume: Volume) -> str:
        return volume.record.name

    assert blocking.run(name) == "test"


def test_closing_ends_work_of_other_threads(blocking: BlockingVolume) -> None:
    """Whoever waits for work while another thread closes the volume gets an error of ours."""
    begun, errors = threading.Event(), []

    async def work(volume: Volume) -> None:
        begun.set()
        await trio.sleep_forever()

    def wait() -> None:
        with pytest.raises(MetadataUnavailable, match="is closed") as caught:
            blocking.run(work)
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    blocking.close()
    thread.join(30)
    assert len(errors) == 1
    with pytest.raises(MetadataUnavailable, match="is closed"):
        blocking.run(work)


def test_a_forked_child_is_refused(blocking: BlockingVolume) -> None:
    """A child shares no thread with its parent: it is told to open the volume again."""

    async def work(volume: Volume) -> None:
        raise AssertionError("ran in a child")

    pid = os.fork()
    if pid == 0:
        try:
            blocking.run(work)
        except UsedAfterFork:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_manager_that_cannot_leave_its_run_still_closes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that was ended meanwhile keeps no thread, store or database open."""

    def leave(*_: object) -> None:
        raise SessionLost("planned")

    manager = CheckpointManager(url, "/run", run_id="r")
    monkeypatch.setattr("tectonic_client.checkpoint.manager.leave", leave)
    manager.close()
    assert volume_status(url).sessions == []
