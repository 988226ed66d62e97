"""How often functions of the metadata ask the database: it may be a network away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tectonic_client.extents import Extent
from tectonic_client.kv.port import Transaction
from tectonic_client.kv.postgresql import PostgresKV
from tectonic_client.metadata import files
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind
from tests.kv.proxy import Proxy
from tests.postgres import PostgresServer

pytestmark = pytest.mark.postgres

LENGTH = 4096


class _Counted:
    """An engine behind a proxy that counts."""

    def __init__(self, kv: PostgresKV, proxy: Proxy) -> None:
        self._kv = kv
        self._proxy = proxy

    def transact(self, fn: Callable[[Transaction], object]) -> int:
        """Run it; returns the round trips."""
        before = self._proxy.round_trips
        self._kv.transact(fn)
        return self._proxy.round_trips - before


@pytest.fixture
def engine(postgres_server: PostgresServer) -> Iterator[_Counted]:
    url = postgres_server.fresh_url()
    PostgresKV(url, create=True).close()
    with Proxy(postgres_server.port) as proxy:
        kv = PostgresKV(
            url.replace(f":{postgres_server.port}", f":{proxy.port}"), create=False
        )  # fmt: skip
        kv.read(lambda tx: tx.get(b"x"))  # connect
        yield _Counted(kv, proxy)
        kv.close()


def _block() -> BlockRecord:
    return BlockRecord(
        encoding=EncodingKind.SINGLE, data_chunks=1, parity_chunks=0, codec=Codec.NONE,
        chunk_bytes=65536, length=LENGTH, created_ns=1, places=(ChunkPlace(0, LENGTH),),
    )  # fmt: skip


def _file_of(count: int) -> Callable[[Transaction], None]:
    blocks = {1000 + number: _block() for number in range(count)}
    extents = [
        Extent(number * LENGTH, LENGTH, block_id, 0) for number, block_id in enumerate(blocks)
    ]
    return lambda tx: files.publish(tx, 7, blocks, extents)


def test_dropping_a_file_asks_once_per_block_beside_a_few_times(engine: _Counted) -> None:
    """Owners and records of all blocks are read together; only whether a block has other owners
    is asked for each. Publishing new blocks costs the same whatever their number."""
    costs = {}
    for count in (2, 20):
        published = engine.transact(_file_of(count))
        dropped = engine.transact(lambda tx: files.drop_extents(tx, 7, 256))
        costs[count] = (published, dropped)
    assert costs[2][0] == costs[20][0] <= 3
    assert costs[20][1] - costs[2][1] == 18
    assert costs[2][1] <= 8
