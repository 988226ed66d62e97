"""What every chunk store must do: the contract of `tectonic_client.chunkstore.port`, as tests.

A test module makes a subclass, names the `store_class` it covers, and gives a fixture `open_store`
that opens one more client of one store, fresh for the test.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.chunkstore.port import ChunkInfo, ChunkKey, ChunkStore
from tectonic_client.errors import ChunkMissing, Exists, ReadOnly
from tectonic_client.limits import ALIGNMENT_BYTES, IDS_PER_LEASE, KiB

PAGE = ALIGNMENT_BYTES
END_OF_IDS = 2**64
DEADLINE_S = 60


class OpenStore(Protocol):
    def __call__(self, *, read_only: bool = False) -> ChunkStore:
        """One more client of the test's store; the fixture closes it."""


def closing(open_one: Callable[[bool], ChunkStore]) -> Iterator[OpenStore]:
    """Body of an `open_store` fixture: opens stores and closes them all."""
    opened: list[ChunkStore] = []

    def open_store(*, read_only: bool = False) -> ChunkStore:
        opened.append(open_one(read_only))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


# --- memory and chunks ------------------------------------------------------------------------


def aligned(size_bytes: int) -> memoryview:
    """Zeroed memory that begins at a page."""
    return memoryview(mmap.mmap(-1, size_bytes))


def filled(size_bytes: int, seed: int = 0) -> memoryview:
    """Memory whose every page differs from the others and between seeds."""
    view = aligned(size_bytes)
    for start in range(0, size_bytes, PAGE):
        view[start : start + PAGE] = (seed * 65_537 + start // PAGE).to_bytes(8) * (PAGE // 8)
    return view


def read(store: ChunkStore, key: ChunkKey, offset: int = 0, size_bytes: int = 64 * PAGE) -> bytes:
    """What one get gives."""
    target = aligned(size_bytes)
    count = store.get_into(key, offset, target)
    return bytes(target[:count])


def list_all(store: ChunkStore) -> list[ChunkInfo]:
    return list(store.list(0, END_OF_IDS))


def in_threads(count: int, function: Callable[[int], object]) -> None:
    """Run `function(0)`, ... all at once; the first error, if any, is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(DEADLINE_S)
            function(number)
        except BaseException as error:  # noqa: BLE001  (raised in the caller)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


KEY = ChunkKey(5 * IDS_PER_LEASE + 3, 2)


_Step = tuple[str, ChunkKey, int]

_keys = st.builds(
    ChunkKey,
    st.sampled_from(
        [IDS_PER_LEASE * lease + n for lease in (1, 2, 256, 257, 2**20) for n in (0, 1, 4095)]
    ),
    st.integers(min_value=0, max_value=2),
)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "head", "delete", "list"]),
        _keys,
        st.integers(min_value=1, max_value=3),
    ),
    max_size=25,
)


class ChunkStoreContract:
    """The contract; see the module's docstring."""

    store_class: ClassVar[type]

    @pytest.fixture
    def store(self, open_store: OpenStore) -> ChunkStore:
        return open_store()

    # --- put and get --------------------------------------------------------------------------

    def test_put_get(self, store: ChunkStore) -> None:
        """A chunk is the concatenation of its parts, whatever becomes of their memory."""
        header, payload, tail = filled(PAGE, 1), filled(17 * PAGE, 2), filled(PAGE, 3)
        expected = b"".join((header, payload, tail))
        store.put(KEY, [header, payload, tail])
        payload[:] = bytes(len(payload))
        assert read(store, KEY) == expected
        assert store.head(KEY) == 19 * PAGE

    @pytest.mark.parametrize(
        ("offset", "size", "expected"),
        [(0, 1, 1), (0, 5, 5), (2, 2, 2), (2, 3, 3), (4, 1, 1), (3, 4, 2), (5, 1, 0), (9, 2, 0)],
    )
    def test_get_ranges(self, store: ChunkStore, offset: int, size: int, expected: int) -> None:
        """A get gives the range, less only where the chunk ends (in pages, of five)."""
        content = filled(5 * PAGE)
        store.put(KEY, [content])
        got = read(store, KEY, offset * PAGE, size * PAGE)
        assert got == content[offset * PAGE : (offset + expected) * PAGE]

    def test_get_leaves_the_rest_of_the_target(self, store: ChunkStore) -> None:
        """Memory behind the bytes that a get gives keeps what it held."""
        store.put(KEY, [filled(PAGE)])
        target = filled(2 * PAGE, seed=9)
        behind = bytes(target[PAGE:])
        assert store.get_into(KEY, 0, target[:PAGE]) == PAGE
        assert target[PAGE:] == behind

    def test_large_chunk(self, store: ChunkStore) -> None:
        """A chunk of several MiB comes back whole."""
        content = filled(3 * 1024 * KiB + PAGE)
        store.put(KEY, [content[:PAGE], content[PAGE:]])
        assert read(store, KEY, size_bytes=len(content)) == content

    def test_missing_chunk(self, store: ChunkStore) -> None:
        """Reading a chunk that is not there says which one of which store."""
        store.put(KEY, [filled(PAGE)])
        for other in (ChunkKey(KEY.block_id, 0), ChunkKey(KEY.block_id + 1, KEY.chunk)):
            for call in (lambda key=other: read(store, key), lambda key=other: store.head(key)):
                with pytest.raises(ChunkMissing) as raised:
                    call()
                assert str(other) in str(raised.value)
                assert store.name in str(raised.value)

    def test_put_never_replaces(self, store: ChunkStore) -> None:
        """A second put of a key fails and leaves the first one's bytes."""
        store.put(KEY, [filled(2 * PAGE, 1)])
        with pytest.raises(Exists) as raised:
            store.put(KEY, [filled(PAGE, 2)])
        assert str(KEY) in str(raised.value)
        assert read(store, KEY) == filled(2 * PAGE, 1)

    def test_extreme_keys(self, store: ChunkStore) -> None:
        """The smallest and the largest key are keys like others."""
        for number, key in enumerate((ChunkKey(0, 0), ChunkKey(2**64 - 1, 2**16 - 1))):
            store.put(key, [filled(PAGE, number)])
            assert read(store, key) == filled(PAGE, number)
        assert [info.key for info in list_all(store)] == [
            ChunkKey(0, 0),
            ChunkKey(2**64 - 1, 2**16 - 1),
        ]

    # --- delete and list ----------------------------------------------------------------------

    def test_delete(self, store: ChunkStore) -> None:
        """Deleted chunks are gone, others stay, absent ones are fine."""
        keys = [ChunkKey(KEY.block_id + lease * IDS_PER_LEASE, 0) for lease in range(3)]
        for key in keys:
            store.put(key, [filled(PAGE)])
        store.delete(iter([keys[0], ChunkKey(1, 1), keys[2], keys[0]]))
        store.delete([])
        assert list_all(store) == [ChunkInfo(keys[1], PAGE)]
        with pytest.raises(ChunkMissing):
            store.head(keys[0])

    def test_list_is_in_key_order(self, store: ChunkStore) -> None:
        """Chunks come ordered by block, then chunk, across any number of leases, with sizes."""
        leases = (1, 2, 255, 256, 257, 258, 511, 512, 2**40)
        infos = [
            ChunkInfo(ChunkKey(lease * IDS_PER_LEASE + block, chunk), (1 + chunk) * PAGE)
            for lease in leases
            for block in (0, IDS_PER_LEASE - 1)
            for chunk in (0, 1)
        ]
        for info in sorted(infos, key=lambda info: info.key.block_id * 7919 % 1013):
            store.put(info.key, [aligned(info.size_bytes)])
        assert list_all(store) == infos

    def test_list_ranges(self, store: ChunkStore) -> None:
        """A range is half open and may begin and end anywhere in a lease."""
        ids = [IDS_PER_LEASE * lease + n for lease in (1, 2, 3, 257) for n in (0, 7)]
        for block_id in ids:
            store.put(ChunkKey(block_id, 0), [aligned(PAGE)])

        def listed(first: int, end: int) -> list[int]:
            return [info.key.block_id for info in store.list(first, end)]

        for first, end in itertools.product(
            [0, *ids, ids[1] + 1, ids[-1] + 1], [0, *ids, ids[1] + 1, ids[-1] + 1]
        ):
            assert listed(first, end) == [n for n in ids if first <= n < end], (first, end)

    def test_list_while_chunks_go(self, store: ChunkStore) -> None:
        """Deleting what is being listed is fine; what stays is listed."""
        keys = [ChunkKey(KEY.block_id + n, 0) for n in range(20)]
        for key in keys:
            store.put(key, [aligned(PAGE)])
        listing = store.list(0, END_OF_IDS)
        assert next(listing).key == keys[0]
        store.delete(keys[5:15])
        rest = [info.key for info in listing]
        assert set(keys[1:5] + keys[15:]) <= set(rest) <= set(keys[1:])
        assert rest == sorted(rest)

    def test_against_model(self, store: ChunkStore) -> None:
        """Any sequence of calls gives what a dictionary gives."""

        # A function of its own for each subclass: Hypothesis tells examples apart by it.
        @settings(max_examples=20)
        @given(_steps)
        def check(steps: list[_Step]) -> None:
            _compare_with_model(store, steps)

        check()

    # --- several at once ----------------------------------------------------------------------

    def test_another_client(self, open_store: OpenStore) -> None:
        """What one client puts, another reads; what one deletes, the other misses."""
        one, other = open_store(), open_store()
        one.put(KEY, [filled(2 * PAGE)])
        assert read(other, KEY) == filled(2 * PAGE)
        with pytest.raises(Exists):
            other.put(KEY, [filled(PAGE)])
        other.delete([KEY])
        with pytest.raises(ChunkMissing):
            one.head(KEY)

    def test_eight_threads(self, store: ChunkStore) -> None:
        """Eight threads put, get, list and delete without disturbing one another."""
        rounds = 6

        def work(number: int) -> None:
            # Two threads share each lease, and so each directory of a flash store.
            first = (1 + number // 2) * IDS_PER_LEASE + number % 2 * 1000
            for block_id in range(first, first + rounds):
                key = ChunkKey(block_id, number)
                store.put(key, [filled(PAGE, block_id), filled(16 * PAGE, number)])
                whole = bytes(filled(PAGE, block_id)) + bytes(filled(16 * PAGE, number))
                assert read(store, key) == whole
                assert ChunkInfo(key, 17 * PAGE) in list(store.list(first, first + rounds))
                if block_id % 2:
                    store.delete([key])

        in_threads(8, work)
        assert len(list_all(store)) == 8 * rounds // 2

    def test_race_for_a_key(self, store: ChunkStore) -> None:
        """Of eight puts of one key exactly one succeeds, and its bytes are the chunk."""
        winners: list[int] = []

        def work(number: int) -> None:
            with suppress(Exists):
                store.put(KEY, [filled(8 * PAGE, number)])
                winners.append(number)

        in_threads(8, work)
        assert len(winners) == 1
        assert read(store, KEY) == filled(8 * PAGE, winners[0])

    # --- the rest -----------------------------------------------------------------------------

    def test_read_only_client(self, open_store: OpenStore) -> None:
        """A client that opened the store read-only reads and lists, and changes nothing."""
        open_store().put(KEY, [filled(PAGE)])
        reader = open_store(read_only=True)
        with pytest.raises(ReadOnly):
            reader.put(ChunkKey(KEY.block_id, 9), [filled(PAGE)])
        with pytest.raises(ReadOnly):
            reader.delete([KEY])
        assert read(reader, KEY) == filled(PAGE)
        assert list_all(reader) == [ChunkInfo(KEY, PAGE)]

    def test_usage(self, store: ChunkStore) -> None:
        """The space told is plausible."""
        usage = store.usage()
        assert 0 < usage.free_bytes <= usage.total_bytes

    def test_close_twice(self, open_store: OpenStore) -> None:
        """Closing is idempotent and concerns no other client."""
        one, other = open_store(), open_store()
        one.close()
        one.close()
        other.put(KEY, [filled(PAGE)])
        assert other.head(KEY) == PAGE


def _compare_with_model(store: ChunkStore, steps: list[_Step]) -> None:
    store.delete([info.key for info in list_all(store)])
    model: dict[ChunkKey, bytes] = {}
    for number, (operation, key, pages) in enumerate(steps):
        content = filled(pages * PAGE, number)
        if operation == "put" and key in model:
            with pytest.raises(Exists):
                store.put(key, [content])
        elif operation == "put":
            store.put(key, [content])
            model[key] = bytes(content)
        elif operation == "delete":
            store.delete([key])
            model.pop(key, None)
        elif operation == "list":
            assert list_all(store) == _listed(model)
        elif key not in model:
            with pytest.raises(ChunkMissing):
                store.head(key) if operation == "head" else read(store, key)
        elif operation == "head":
            assert store.head(key) == len(model[key])
        else:
            assert read(store, key, PAGE) == model[key][PAGE:]
    assert list_all(store) == _listed(model)


def _listed(model: dict[ChunkKey, bytes]) -> list[ChunkInfo]:
    return [ChunkInfo(key, len(content)) for key, content in sorted(model.items())]
