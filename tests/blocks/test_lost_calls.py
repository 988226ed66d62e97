"""Stores that do not answer: who waits how long, and what a thread that comes back may touch."""

from __future__ import annotations

import pytest
import trio

from tectonic_client.blocks import calls
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.errors import StoreUnavailable
from tectonic_client.limits import STORE_READ_THREADS, STORE_WRITE_THREADS
from tectonic_client.records import Codec
from tests.blocks.rig import BLOCK, CHUNK_BYTES, Rig, noise, run, text, until

PATIENCE_S = 0.1


@pytest.fixture(autouse=True)
def _probe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STORE_PROBE_INTERVAL_S", 0.0)


def _lost(rig: Rig) -> int:
    """Calls whose threads have not come back yet."""
    return sum(load.reads.lost + load.writes.lost for load in rig.stores.load().values())


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_get_that_hangs_fails_and_never_touches_the_callers_memory(codec: Codec) -> None:
    """The reader is told by the deadline; its memory stays as it was when the bytes come at last,
    and the pool's memory is not used again before that."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(text(CHUNK_BYTES))
        used_before = rig.pool.used_bytes
        store.open.clear()
        target = bytearray(CHUNK_BYTES)
        with pytest.raises(StoreUnavailable, match="store0 has not answered"):
            await rig.reader.read_into(BLOCK, record, 0, memoryview(target))
        assert rig.pool.used_bytes > used_before
        store.open.set()
        await until(lambda: rig.pool.used_bytes == used_before and not _lost(rig))
        assert target == bytes(CHUNK_BYTES)
        assert await rig.read(record, 0, CHUNK_BYTES) == text(CHUNK_BYTES)

    run(test, Rig(codec, store_deadline_s=PATIENCE_S))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_put_that_hangs_fails_and_leaves_nothing_behind(codec: Codec) -> None:
    """The writer is told by the deadline and may give its buffer back, which nobody gets before
    the thread is done; the chunk that it stored too late is deleted, its block noted as debris."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.open.clear()
        with pytest.raises(StoreUnavailable, match="store0 has not answered"):
            await rig.write(text(CHUNK_BYTES))
        assert rig.debris == {BLOCK}
        assert rig.pool.used_bytes >= CHUNK_BYTES
        store.open.set()
        await until(lambda: not rig.pool.used_bytes and not _lost(rig))
        assert store.puts == [ChunkKey(BLOCK, 0)]
        assert store.keys() == []
        record = await rig.write(text(CHUNK_BYTES), BLOCK + 1)
        assert await rig.read(record, 0, CHUNK_BYTES, BLOCK + 1) == text(CHUNK_BYTES)

    run(test, Rig(codec, store_deadline_s=PATIENCE_S))


def test_those_in_line_fail_with_the_first_and_no_more_than_the_slots_are_lost() -> None:
    """Many writers to a store that hangs: each fails within about one deadline, and never more
    threads wait for the store than it has slots, however often it is tried again."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.open.clear()
        failed = []

        async def put(index: int) -> None:
            with pytest.raises(StoreUnavailable):
                await rig.write(noise(1000), BLOCK + index)
            failed.append(index)

        with trio.fail_after(20 * PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for index in range(3 * STORE_WRITE_THREADS):
                    nursery.start_soon(put, index)
        for index in range(100, 100 + STORE_WRITE_THREADS):
            await put(index)
        assert len(store.puts) == STORE_WRITE_THREADS
        store.open.set()
        await until(lambda: not rig.pool.used_bytes and not _lost(rig))
        await rig.write(noise(1000), BLOCK + 200)

    run(test, Rig(store_deadline_s=PATIENCE_S, buffers=32))


def test_between_two_probes_calls_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is known not to answer is asked once per interval; others do not wait for it."""
    monkeypatch.setattr(calls, "STORE_PROBE_INTERVAL_S", 3600.0)

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(noise(1000))
        store.open.clear()
        for _ in range(20):
            with pytest.raises(StoreUnavailable):
                await rig.read(record, 0, 1000)
        assert len(store.gets) == 1
        # What came back says that the store answers, long before the next probe.
        store.open.set()
        await until(lambda: not _lost(rig))
        assert await rig.read(record, 0, 1000) == noise(1000)

    run(test, Rig(store_deadline_s=PATIENCE_S))


def test_a_store_whose_reads_hang_is_still_written() -> None:
    """Reads and writes are judged apart: what works goes on."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(noise(1000))
        store.open.clear()
        for _ in range(STORE_READ_THREADS + 3):
            with pytest.raises(StoreUnavailable):
                await rig.read(record, 0, 1000)
        assert len(store.gets) == STORE_READ_THREADS
        await rig.stores.run(0, lambda store: store.delete([ChunkKey(7, 0)]))
        store.open.set()
        await until(lambda: not rig.pool.used_bytes and not _lost(rig))

    run(test, Rig(store_deadline_s=PATIENCE_S))


def test_work_that_does_not_wait_for_the_store_is_not_given_up() -> None:
    """A slow copy from the caller's memory may take longer than the store's deadline."""

    async def test(rig: Rig) -> None:
        block = rig.writer.open_block(BLOCK)

        def fill(memory: memoryview) -> None:
            trio.from_thread.run(trio.sleep, 3 * PATIENCE_S, trio_token=token)
            memory[:] = noise(len(memory))

        token = trio.lowlevel.current_trio_token()
        with await rig.pool.acquire(CHUNK_BYTES) as buffer:
            await rig.writer.put_chunk(block, 0, buffer, CHUNK_BYTES, fill=fill)
        record = rig.writer.seal(block, CHUNK_BYTES, created_ns=7)
        assert await rig.read(record, 0, CHUNK_BYTES) == noise(CHUNK_BYTES)

    run(test, Rig(store_deadline_s=PATIENCE_S))


def test_closing_does_not_wait_for_lost_calls(caplog: pytest.LogCaptureFixture) -> None:
    """A store that hangs is left alone at the end, and the log says so."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(noise(1000))
        store.open.clear()
        with pytest.raises(StoreUnavailable):
            await rig.read(record, 0, 1000)
        await rig.stores.close()
        assert "left with 1 calls that never ended" in caplog.text
        store.open.set()
        await until(lambda: not rig.pool.used_bytes and not _lost(rig))

    run(test, Rig(store_deadline_s=PATIENCE_S))
