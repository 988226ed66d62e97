"""The flight recorder: what operations waited for, those under way, bounded memory."""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import Any

import pytest
import trio

from tectonic_client.activity import MEMORY, METADATA, STORE, Waiting, current, detach
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import Fault, FaultyStore, Hold
from tectonic_client.errors import NoSpace, NotFound, StoreUnavailable
from tectonic_client.limits import MiB
from tectonic_client.metrics import Meter
from tectonic_client.recorder import Recorder
from tectonic_client.stats import client_stats
from tectonic_client.types import ROOT_INODE, Owner
from tectonic_client.volume import FormatOptions, VolumeOptions, format_volume, open_volume

LIMIT_S = 60.0


def _lines(recorder: Recorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recorder.look().lines(reason="test")]


def test_an_operation_is_recorded_with_its_outcome() -> None:
    """Name, place, size, outcome and duration of ended operations, and a first line about them."""
    recorder = Recorder()
    recorder.end(recorder.begin("read", 7, 4096, 100), 0, 100)
    recorder.end(recorder.begin("lookup", 1), errno.ENOENT)
    about, read, lookup = _lines(recorder)
    assert (about["reason"], about["under_way"], about["ended"]) == ("test", 0, 2)
    assert (read["operation"], read["inode"], read["offset"], read["size"]) == (
        "read", 7, 4096, 100,
    )  # fmt: skip
    assert (read["outcome"], lookup["outcome"]) == ("OK", "ENOENT")
    assert 0 < read["seconds"] < LIMIT_S
    assert about["time"] > lookup["time"] > read["time"]
    assert recorder.errors() == {"lookup": {"ENOENT": 1}}
    measured = recorder.measured()
    assert (measured["read"].calls, measured["read"].transferred_bytes) == (1, 100)
    assert measured["lookup"].errors == 1


def test_only_the_latest_are_kept() -> None:
    """However many operations there are, so many are remembered; all are counted."""
    recorder = Recorder(capacity=3)
    for inode in range(10):
        recorder.end(recorder.begin("getattr", inode), 0)
    assert [line["inode"] for line in _lines(recorder)[1:]] == [7, 8, 9]
    assert recorder.measured()["getattr"].calls == 10


def test_waits_belong_to_the_operation_of_their_task() -> None:
    """Child tasks wait for the operation that began them, and those that detach for nobody."""
    recorder = Recorder()
    began, release = trio.Event(), trio.Event()

    async def child(kind: int) -> None:
        with Waiting(kind, store="s" if kind == STORE else None):
            began.set()
            await release.wait()

    async def apart() -> None:
        detach()
        with Waiting(MEMORY):
            await release.wait()

    async def operation() -> None:
        activity = recorder.begin("read", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, STORE)
            nursery.start_soon(child, METADATA)
            nursery.start_soon(apart)
        recorder.end(activity, 0)
        assert current.get() is None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(operation)
            await began.wait()
            await trio.testing.wait_all_tasks_blocked()
            (seen,) = recorder.under_way()
            assert seen["outcome"] is None
            assert seen["waiting_for"] == ["metadata", "store"]
            assert seen["store"] == "s"
            release.set()
        _, line = _lines(recorder)
        assert line["waited_s"].keys() == {"metadata", "store"}
        assert line["waiting_for"] == []

    trio.run(main)


@pytest.mark.parametrize(
    ("error", "failures"),
    [(NotFound("x"), 0), (NoSpace("full"), 1), (StoreUnavailable("gone"), 1), (KeyError("x"), 1)],
)
def test_an_answer_is_no_failure(error: Exception, failures: int) -> None:
    """A meter's errors are those that something is wrong with: a missing name is not."""
    meter = Meter()
    with pytest.raises(type(error)), Waiting(METADATA, meter):
        raise error
    assert (meter.calls, meter.errors) == (1, failures)


def test_eio_is_told_at_once() -> None:
    """`on_failure` hears of EIO and of nothing else."""
    recorder = Recorder()
    heard: list[int] = []
    for outcome in (0, errno.ENOENT, errno.EIO):
        recorder.on_failure = lambda seen=outcome: heard.append(seen)  # type: ignore[misc]
        recorder.end(recorder.begin("read", 1), outcome)
    assert heard == [errno.EIO]


def test_an_operation_that_a_store_holds_up_is_seen() -> None:
    """While a store does not answer, the stats tell at once: who waits, for which store, and that
    its slot is taken; afterwards the time is in the record."""
    entered, released = threading.Event(), threading.Event()
    url = "memory://recorder"
    format_volume(url, FormatOptions("recorder", ("memory://recorder-store",), force=True))

    def hold(store: ChunkStore) -> ChunkStore:
        return FaultyStore(store, [Fault("put", Hold(entered, released, LIMIT_S))])

    async def main() -> None:
        recorder = Recorder()
        async with open_volume(url, VolumeOptions(wrap_store=hold)) as volume:
            files = volume.filesystem
            attributes, handle = await files.create(
                ROOT_INODE, b"f", 0o644, Owner(0, 0), os.O_WRONLY
            )
            assert files.inode_of(handle) == attributes.inode
            assert files.inode_of(handle + 1) == 0
            await files.write(handle, 0, bytes(MiB))

            async def flush() -> None:
                activity = recorder.begin("flush", attributes.inode)
                await files.flush(handle)
                recorder.end(activity, 0)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(flush)
                await trio.to_thread.run_sync(entered.wait)
                (seen,) = recorder.under_way()
                assert (seen["operation"], seen["waiting_for"]) == ("flush", ["store"])
                stats = client_stats(volume)
                assert stats["stores"]["0"]["writes"]["running"] == 1
                assert stats["files"] == {"open": 1, "dirty": 1, "dirty_bytes": MiB}
                assert stats["memory"]["used_bytes"] >= MiB
                released.set()
            stats = client_stats(volume)
            assert stats["files"]["dirty_bytes"] == 0
            assert stats["stores"]["0"]["put"]["transferred_bytes"] > MiB
            assert stats["metadata"]["transaction"]["calls"] >= 2
            json.dumps(stats)
            await files.release(handle)
        (line,) = _lines(recorder)[1:]
        assert line["waited_s"]["store"] > 0

    trio.run(main)
