"""Blocks that several inodes use: owner records add up, a block dies exactly with its last user."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.extents import Extent
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.open import open_kv
from tectonic_client.kv.port import KV, ReadTransaction
from tectonic_client.metadata import blocks, files, keys
from tectonic_client.metadata.scans import scan_layer
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind
from tests.postgres import PostgresServer

BLOCK_BYTES = 100
INODES = (2, 3, 4)


def _block(length: int = BLOCK_BYTES) -> BlockRecord:
    return BlockRecord(
        EncodingKind.SINGLE, 1, 0, Codec.NONE, 65_536, length, 0, (ChunkPlace(0, length),)
    )


def _check(tx: ReadTransaction, published: set[int]) -> None:
    """Every block lives with exact owner records, or is dead."""
    used: Counter[tuple[int, int]] = Counter()
    for inode in INODES:
        end = 0
        for extent in files.read_extents(tx, inode):
            assert extent.file_offset >= end
            end = extent.end
            used[extent.block_id, inode] += extent.length
    dead = {block_id for block_id, _ in blocks.dead_blocks(tx)}
    for block_id in published:
        owners = {inode: used[block_id, inode] for inode in INODES if used[block_id, inode]}
        assert set(blocks.owners(tx, block_id)) == owners.keys()
        for inode, live in owners.items():
            assert blocks._live_bytes(tx, [block_id], inode) == {block_id: live}
        assert (tx.get(keys.block(block_id)) is not None) == bool(owners)
        assert (block_id in dead) == (not owners)


_inodes = st.sampled_from(INODES)
_positions = st.integers(0, 250)
_lengths = st.integers(1, BLOCK_BYTES)
_steps = st.one_of(
    st.tuples(st.just("write"), _inodes, _positions, _lengths),
    st.tuples(st.just("clone"), _inodes, _inodes, st.just(0)),
    st.tuples(st.just("cut"), _inodes, _positions, st.just(0)),
    st.tuples(st.just("drop"), _inodes, st.just(0), st.just(0)),
)


@given(steps=st.lists(_steps, max_size=30))
def test_owner_records_add_up_whatever_happens(steps: list[tuple[str, int, int, int]]) -> None:
    """Writes, clones, cuts and removals of files that share blocks keep every count exact."""
    kv, published = MemoryKV(), set[int]()
    for number, (step, inode, other, length) in enumerate(steps, start=1):
        if step == "write":
            published.add(number)
            extent = Extent(other, length, number, BLOCK_BYTES - length)
            kv.transact(
                lambda tx, i=inode, n=number, e=extent: files.publish(tx, i, {n: _block()}, [e])
            )
        elif step == "clone":
            kv.transact(
                lambda tx, i=inode, o=other: files.publish(tx, o, {}, files.read_extents(tx, i))
            )
        elif step == "cut":
            kv.transact(lambda tx, i=inode, size=other: files.cut(tx, i, size))
        else:
            assert kv.transact(lambda tx, i=inode: files.drop_extents(tx, i, 256))
        kv.read(lambda tx: _check(tx, published))


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[KV]]:
    """Two clients of one database."""
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh_url()
    else:
        url = str(tmp_path / "meta.db") if request.param == "sqlite" else f"memory://{tmp_path}"
    opened = [open_kv(url, create=True) for _ in range(2)]
    yield opened
    for kv in opened:
        kv.close()


def _at_once(first: Callable[[], object], second: Callable[[], object]) -> None:
    barrier = threading.Barrier(2)

    def run(work: Callable[[], object]) -> object:
        barrier.wait(20)
        return work()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run, work) for work in (first, second)]:
            future.result(60)


def test_the_last_two_users_leave_at_once(clients: list[KV]) -> None:
    """Neither overlooks that the other leaves too: the block dies, with all its records."""
    one, two = clients
    for block_id in range(10, 26):
        extent = Extent(0, BLOCK_BYTES, block_id, 0)
        one.transact(lambda tx, b=block_id, e=extent: files.publish(tx, 2, {b: _block()}, [e]))
        one.transact(lambda tx, e=extent: files.publish(tx, 3, {}, [e]))
        _at_once(
            lambda: one.transact(lambda tx: files.drop_extents(tx, 2, 256)),
            lambda: two.transact(lambda tx: files.drop_extents(tx, 3, 256)),
        )
        one.read(lambda tx, b=block_id: _check(tx, set(range(10, b + 1))))
    left = one.read(lambda tx: [row for page in scan_layer(tx, keys.BLOCK) for row in page])
    assert left == []


def test_one_user_comes_as_the_last_one_leaves(clients: list[KV]) -> None:
    """A clone made while the original is removed has its block, or had nothing to clone."""
    one, two = clients
    for block_id in range(10, 26):
        extent = Extent(0, BLOCK_BYTES, block_id, 0)
        one.transact(lambda tx, b=block_id, e=extent: files.publish(tx, 2, {b: _block()}, [e]))
        _at_once(
            lambda: one.transact(lambda tx: files.drop_extents(tx, 2, 256)),
            lambda: two.transact(lambda tx: files.publish(tx, 3, {}, files.read_extents(tx, 2))),
        )
        one.read(lambda tx, b=block_id: _check(tx, set(range(10, b + 1))))
        one.transact(lambda tx: files.drop_extents(tx, 3, 256))


def test_layers_are_scanned_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a layer come once and in order, however they fall into pages."""
    monkeypatch.setattr("tectonic_client.metadata.scans.SCAN_PAGE_ROWS", 3)
    kv = MemoryKV()
    for count in range(8):
        pages = kv.read(lambda tx: list(scan_layer(tx, keys.LEASE)))
        assert [len(page) for page in pages] == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
        rows = [row for page in pages for row in page]
        assert rows == kv.read(lambda tx: tx.scan(keys.LEASE, keys.prefix_end(keys.LEASE)))
        kv.transact(lambda tx, n=count: tx.put(keys.lease(n), b"x"))
        kv.transact(lambda tx: tx.put(keys.session(1), b"of another layer"))
