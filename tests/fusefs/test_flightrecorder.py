"""Dumps of the flight recorder: when they are written, how many, and where to."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusefs.flightrecorder import FlightRecorder
from tectonic_client.limits import MAX_RECORDER_DUMPS, RECORDER_DUMP_INTERVAL_S
from tectonic_client.recorder import Recorder


async def _no_signals() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


def test_dumps_after_errors_are_rate_limited(tmp_path: Path) -> None:
    """A storm of errors writes one file per interval; errors in between are in the next one."""

    async def main() -> None:
        recorder = Recorder()
        flight = FlightRecorder(recorder, str(tmp_path / "new"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flight.run, _no_signals())
            for _ in range(10):
                for _ in range(3):
                    recorder.end(recorder.begin("read", 1), errno.EIO)
                await trio.sleep(RECORDER_DUMP_INTERVAL_S / 4.5)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.05))
    assert len(os.listdir(tmp_path / "new")) == 3


def test_a_daemon_writes_a_bounded_number_of_files(tmp_path: Path) -> None:
    """However often it is asked, the oldest file is replaced by the newest; each is whole and
    readable by its owner only."""

    async def main() -> None:
        recorder = Recorder()
        flight = FlightRecorder(recorder, str(tmp_path))
        paths = set()
        for number in range(2 * MAX_RECORDER_DUMPS):
            recorder.end(recorder.begin("getattr", number), 0)
            paths.add(await flight.dump("test"))
        assert len(paths) == MAX_RECORDER_DUMPS

    trio.run(main)
    files = sorted(tmp_path.iterdir())
    assert len(files) == MAX_RECORDER_DUMPS
    lengths = set()
    for path in files:
        about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert about["pid"] == os.getpid()
        assert len(lines) == about["ended"]
        assert path.stat().st_mode & 0o777 == 0o600
        lengths.add(len(lines))
    assert lengths == set(range(MAX_RECORDER_DUMPS + 1, 2 * MAX_RECORDER_DUMPS + 1))


def test_a_dump_does_not_follow_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link that somebody put in a dump's place is replaced, one in its part's place refused."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f"tectonicfs-flight-{os.getpid()}"
    (tmp_path / f"{name}-0.jsonl").symlink_to(victim)
    (tmp_path / f"{name}-1.jsonl.part").symlink_to(victim)

    async def main() -> None:
        flight = FlightRecorder(Recorder(), str(tmp_path))
        assert await flight.dump("test") == str(tmp_path / f"{name}-0.jsonl")
        assert await flight.dump("test") is None

    trio.run(main)
    assert "cannot write the flight recorder" in caplog.text
    assert victim.read_text() == "precious"
    assert not (tmp_path / f"{name}-0.jsonl").is_symlink()


def test_a_directory_that_cannot_be_written_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells, and the recorder goes on."""

    async def main() -> None:
        assert await FlightRecorder(Recorder(), "/proc/none").dump("test") is None

    trio.run(main)
    assert "cannot write the flight recorder to /proc/none" in caplog.text
