"""The wrappers keep the contract, count right, and fail exactly as planned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tectonic_client.chunkstore.memory import MemoryChunks, MemoryStore
from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, ChunkStore
from tectonic_client.chunkstore.wrappers import (
    Delay,
    Fail,
    Fault,
    FaultyStore,
    Flip,
    Hold,
    MeteredStore,
    Tear,
    Truncate,
)
from tectonic_client.errors import ChunkMissing, Exists, NoSpace, StoreUnavailable
from tests.contracts.chunkstore import (
    DEADLINE_S,
    KEY,
    PAGE,
    ChunkStoreContract,
    OpenStore,
    closing,
    filled,
    list_all,
    read,
)

OTHER = ChunkKey(KEY.block_id + 1, 0)


class TestMeteredStore(ChunkStoreContract):
    store_class = MeteredStore

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        data = MemoryChunks()
        yield from closing(
            lambda read_only: MeteredStore(MemoryStore("m", data, read_only=read_only))
        )


class TestFaultyStore(ChunkStoreContract):
    store_class = FaultyStore

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        data = MemoryChunks()
        yield from closing(
            lambda read_only: FaultyStore(MemoryStore("m", data, read_only=read_only))
        )


class TestStack(ChunkStoreContract):
    """Wrappers around wrappers keep the contract too."""

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        data = MemoryChunks()
        yield from closing(
            lambda read_only: MeteredStore(
                FaultyStore(MeteredStore(MemoryStore("m", data, read_only=read_only)))
            )
        )


# --- measurement ------------------------------------------------------------------------------


def test_metrics() -> None:
    """Calls, errors, bytes and times are counted per operation."""
    store = MeteredStore(MemoryStore("m"))
    store.put(KEY, [filled(PAGE), filled(2 * PAGE)])
    with pytest.raises(Exists):
        store.put(KEY, [filled(PAGE)])
    read(store, KEY, PAGE)
    store.head(KEY)
    store.delete([KEY])
    with pytest.raises(ChunkMissing):
        read(store, KEY)
    metrics = store.measured()
    counted = {name: (m.calls, m.errors, m.transferred_bytes) for name, m in metrics.items()}
    assert counted == {
        "put": (2, 1, 3 * PAGE),
        "get_into": (2, 1, 2 * PAGE),
        "head": (1, 0, 0),
        "delete": (1, 0, 0),
    }
    for measured in metrics.values():
        assert sum(measured.buckets) == measured.calls
        assert measured.total_ns > 0


def test_latencies_fall_into_their_bucket() -> None:
    """A call that takes long is seen in the histogram at its duration."""
    inner = FaultyStore(MemoryStore("m"), [Fault("usage", Delay(0.02), nth=3)])
    store = MeteredStore(inner)
    for _ in range(3):
        store.usage()
    measured = store.measured()["usage"]
    assert measured.quantile_s(0.5) < 0.02 <= measured.quantile_s(1.0)
    assert measured.total_ns >= 20_000_000


# --- faults -----------------------------------------------------------------------------------


def make(*faults: Fault) -> tuple[FaultyStore, ChunkStore]:
    inner = MemoryStore("m")
    return FaultyStore(inner, faults), inner


def test_nth_call_fails() -> None:
    """Exactly the planned call fails, as planned, and does not happen."""
    store, inner = make(Fault("put", Fail(StoreUnavailable("planned")), nth=2))
    store.put(KEY, [filled(PAGE)])
    assert store.pending
    with pytest.raises(StoreUnavailable, match="planned"):
        store.put(OTHER, [filled(PAGE)])
    assert not store.pending
    assert [info.key for info in list_all(inner)] == [KEY]
    store.put(OTHER, [filled(PAGE)])
    assert len(list_all(inner)) == 2


@pytest.mark.parametrize("operation", ["put", "get_into", "head", "delete", "list", "usage"])
def test_each_operation_can_fail(operation: str) -> None:
    """A fault hits its operation and no other; times=None is for good; clear ends it."""
    error = StoreUnavailable("planned")
    store, inner = make(Fault(operation, Fail(error), times=None))  # type: ignore[arg-type]
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(OTHER, [filled(PAGE)]),
        "get_into": lambda: read(store, KEY),
        "head": lambda: store.head(KEY),
        "delete": lambda: store.delete([OTHER]),
        "list": lambda: list_all(store),
        "usage": lambda: store.usage(),
    }
    inner.put(KEY, [filled(PAGE)])
    for name, call in calls.items():
        for _ in range(2):
            if name == operation:
                with pytest.raises(StoreUnavailable):
                    call()
            else:
                inner.delete([OTHER])
                call()
    store.clear()
    inner.delete([OTHER])
    calls[operation]()


def test_fault_of_a_chunk() -> None:
    """With a key only calls that name that chunk count, also among several."""
    store, inner = make(
        Fault("get_into", Fail(ChunkMissing("planned")), key=OTHER),
        Fault("delete", Fail(StoreUnavailable("planned")), key=OTHER, nth=2),
    )
    for key in (KEY, OTHER):
        inner.put(key, [filled(PAGE)])
    read(store, KEY)
    with pytest.raises(ChunkMissing):
        read(store, OTHER)
    store.delete([KEY])
    store.delete([OTHER])
    with pytest.raises(StoreUnavailable):
        store.delete([KEY, OTHER])


@pytest.mark.parametrize("pages", [0, 1, 2, 3])
def test_torn_put(pages: int) -> None:
    """A torn put leaves the first pages, across parts, and fails."""
    store, inner = make(Fault("put", Tear(pages * PAGE, StoreUnavailable("planned"))))
    content = filled(4 * PAGE)
    with pytest.raises(StoreUnavailable, match="planned"):
        store.put(KEY, [content[: 2 * PAGE], content[2 * PAGE :]])
    assert list_all(inner) == [ChunkInfo(KEY, pages * PAGE)]
    assert read(inner, KEY) == content[: pages * PAGE]


def test_flipped_byte() -> None:
    """One byte of the chunk is wrong, wherever the get begins, and only in gets that read it."""
    offset = PAGE + 17
    store, inner = make(Fault("get_into", Flip(offset, mask=0x80), times=None))
    content = filled(3 * PAGE)
    inner.put(KEY, [content])
    wrong = bytearray(content)
    wrong[offset] ^= 0x80
    assert read(store, KEY) == wrong
    assert read(store, KEY, PAGE, PAGE) == wrong[PAGE : 2 * PAGE]
    assert read(store, KEY, 2 * PAGE) == content[2 * PAGE :]
    assert read(inner, KEY) == content


def test_truncated_chunk() -> None:
    """To gets the chunk ends early."""
    store, inner = make(Fault("get_into", Truncate(PAGE + 5), times=None))
    content = filled(3 * PAGE)
    inner.put(KEY, [content])
    assert read(store, KEY) == content[: PAGE + 5]
    assert read(store, KEY, PAGE) == content[PAGE : PAGE + 5]
    assert read(store, KEY, 2 * PAGE) == b""


def test_limited_space() -> None:
    """Puts fit until the space is used up, then NoSpace; nothing of that chunk is there."""
    store, inner = make()
    store.limit_space(3 * PAGE)
    store.put(KEY, [filled(2 * PAGE)])
    with pytest.raises(NoSpace):
        store.put(OTHER, [filled(2 * PAGE)])
    assert [info.key for info in list_all(inner)] == [KEY]
    store.limit_space(None)
    store.put(OTHER, [filled(2 * PAGE)])


def test_held_call() -> None:
    """A held call waits at the store until it is released, while others pass."""
    hold = Hold(threading.Event(), threading.Event(), DEADLINE_S)
    store, inner = make(Fault("put", hold))
    thread = threading.Thread(target=store.put, args=(KEY, [filled(PAGE)]))
    thread.start()
    assert hold.entered.wait(DEADLINE_S)
    assert list_all(inner) == []
    store.put(OTHER, [filled(PAGE)])
    hold.released.set()
    thread.join(DEADLINE_S)
    assert [info.key for info in list_all(inner)] == [KEY, OTHER]


def test_impossible_faults() -> None:
    """A fault that its operation cannot have is refused when it is planned."""
    with pytest.raises(ValueError, match="cannot happen"):
        Fault("get_into", Tear(0, StoreUnavailable("planned")))
    with pytest.raises(ValueError, match="cannot happen"):
        Fault("put", Flip(0))
    with pytest.raises(ValueError, match="page"):
        Fault("put", Tear(100, StoreUnavailable("planned")))
