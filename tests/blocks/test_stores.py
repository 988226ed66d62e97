"""The stores of a volume: slots, threads, errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
import trio

from tectonic_client.chunkstore.port import StoreUsage
from tectonic_client.errors import NoSpace, StoreUnavailable
from tectonic_client.limits import STORE_READ_THREADS, STORE_WRITE_THREADS
from tests.blocks.rig import BLOCK, CHUNK_BYTES, Rig, noise, run, text, until


def test_an_unknown_store_is_unavailable() -> None:
    """A store id that is not open is StoreUnavailable for every kind of use."""

    async def test(rig: Rig) -> None:
        with pytest.raises(StoreUnavailable):
            rig.stores.get(7)
        for slot in (rig.stores.reading, rig.stores.writing):
            with pytest.raises(StoreUnavailable):
                async with slot(7):
                    pass
        with pytest.raises(StoreUnavailable):
            await rig.stores.run(7, lambda store: store.usage())

    run(test, Rig())


def test_work_runs_in_a_thread_and_its_result_or_error_comes_back() -> None:
    """run hands the store to the work in a thread, and returns or raises what the work does."""

    async def test(rig: Rig) -> None:
        here = threading.get_ident()
        found = await rig.stores.run(0, lambda store: (store.name, threading.get_ident()))
        assert found[0] == "memory://store0"
        assert found[1] != here

        def fail(_: object) -> None:
            raise NoSpace("full")

        with pytest.raises(NoSpace):
            await rig.stores.run(0, fail)

    run(test, Rig())


@pytest.mark.parametrize("store_id", [0, 1])
def test_a_store_that_hangs_holds_up_nobody_else(store_id: int) -> None:
    """While all slots of one store hang, another store is read and written as ever."""

    async def test(rig: Rig) -> None:
        hung, other = rig.watched[store_id], 1 - store_id
        records = {}
        for number in range(64):
            record = await rig.write(noise(1000), BLOCK + number)
            records[BLOCK + number] = record
        on_hung = [i for i, r in records.items() if r.places[0].store_id == store_id]
        on_other = [i for i, r in records.items() if r.places[0].store_id == other]
        hung.gets.clear()
        hung.open.clear()
        async with trio.open_nursery() as nursery:
            for block_id in on_hung[:10]:
                nursery.start_soon(rig.read, records[block_id], 0, 1000, block_id)
            await until(lambda: len(hung.gets) == STORE_READ_THREADS)
            for block_id in on_other:
                assert await rig.read(records[block_id], 0, 1000, block_id) == noise(1000)
            assert len(hung.gets) == STORE_READ_THREADS
            hung.open.set()

    run(test, Rig(stores=2))


def test_puts_of_a_store_are_bounded() -> None:
    """No more than STORE_WRITE_THREADS puts of a store are under way; the others wait in line."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.open.clear()
        block = rig.writer.open_block(BLOCK)
        async with trio.open_nursery() as nursery:
            for index in range(2 * STORE_WRITE_THREADS):
                nursery.start_soon(rig.put, block, index, text(CHUNK_BYTES))
            await until(lambda: len(store.puts) >= STORE_WRITE_THREADS)
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert len(store.puts) == STORE_WRITE_THREADS
            store.open.set()
        assert len(store.puts) == 2 * STORE_WRITE_THREADS

    run(test, Rig())


def test_usage_is_that_of_all_stores() -> None:
    """Total and free space are summed over the stores."""

    async def test(rig: Rig) -> None:
        await rig.write(noise(CHUNK_BYTES))
        each = [store.usage() for store in rig.watched]
        assert await rig.stores.usage() == StoreUsage(
            sum(u.total_bytes for u in each), sum(u.free_bytes for u in each)
        )
        assert rig.stores.ids() == [0, 1]

    run(test, Rig(stores=2))


@pytest.mark.parametrize(
    ("devices", "counted"), [((1, 1, 2), 2), ((None, None, 2), 3), ((1, None, 1), 2)]
)
def test_a_device_counts_once(
    devices: Sequence[int | None], counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores on one device have its space together; where nobody knows, each has its own."""

    async def test(rig: Rig) -> None:
        for store, device in zip(rig.watched, devices, strict=True):
            monkeypatch.setattr(store, "usage", partial(StoreUsage, 100, 30, device))
        assert await rig.stores.usage() == StoreUsage(100 * counted, 30 * counted)

    run(test, Rig(stores=3))


def test_a_closed_set_has_no_stores() -> None:
    """After close, which may be called again, every store is unavailable."""

    async def test(rig: Rig) -> None:
        await rig.stores.close()
        await rig.stores.close()
        assert rig.stores.ids() == []
        with pytest.raises(StoreUnavailable):
            rig.stores.get(0)

    run(test, Rig())
