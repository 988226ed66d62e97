"""Writing of blocks: what is stored, what failures leave, whose memory it is."""

from __future__ import annotations

import logging

import pytest
import trio

from tectonic_client.blocks.buffers import Buffer
from tectonic_client.blocks.writer import OpenBlock
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.encoding.chunk import ChunkHeader
from tectonic_client.errors import Exists, NoSpace, StoreUnavailable, TectonicError
from tectonic_client.limits import ALIGNMENT_BYTES, CHUNK_HEADER_BYTES, KiB
from tectonic_client.records import BlockRecord, ChunkPlace, Codec, EncodingKind
from tests.blocks.rig import (
    BLOCK,
    CHUNK_BYTES,
    CHUNKS_PER_BLOCK,
    UUID,
    Rig,
    noise,
    run,
    text,
    until,
)

# --- what is stored ---------------------------------------------------------------------------


def test_a_chunk_describes_itself() -> None:
    """A stored chunk is a header that names volume, block and index, its content, and zeros."""
    content = noise(CHUNK_BYTES + 5000)

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        assert record == BlockRecord(
            EncodingKind.SINGLE, 1, 0, Codec.NONE, CHUNK_BYTES, len(content), 7,
            (ChunkPlace(0, CHUNK_BYTES), ChunkPlace(0, 5000)),
        )  # fmt: skip
        chunk = rig.watched[0].chunk(ChunkKey(BLOCK, 1))
        header = ChunkHeader.decode(memoryview(chunk))
        header.check(UUID, BLOCK, 1)
        assert (header.content_bytes, header.payload_bytes) == (5000, 5000)
        assert chunk[CHUNK_HEADER_BYTES:][:5000] == content[CHUNK_BYTES:]
        assert chunk[CHUNK_HEADER_BYTES + 5000 :] == bytes(2 * ALIGNMENT_BYTES - 5000)

    run(test, Rig())


@pytest.mark.parametrize(
    ("codec", "content", "smaller"),
    [
        (Codec.NONE, text(CHUNK_BYTES), False),
        (Codec.ZSTD, text(CHUNK_BYTES), True),
        (Codec.ZSTD, noise(CHUNK_BYTES), False),
        (Codec.AUTO, text(CHUNK_BYTES), True),
        (Codec.AUTO, noise(CHUNK_BYTES), False),
        (Codec.ZSTD, text(ALIGNMENT_BYTES), False),  # takes a page either way
        (Codec.ZSTD, text(ALIGNMENT_BYTES + 1), True),
    ],
)
def test_the_codec_decides_what_is_compressed(
    codec: Codec, content: bytes, *, smaller: bool
) -> None:
    """Compression is done where the volume asks for it, and kept only where it saves space."""

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        (place,) = record.places
        assert (place.stored_bytes < len(content)) is smaller
        size = rig.watched[0].head(ChunkKey(BLOCK, 0))
        assert size == CHUNK_HEADER_BYTES + -(-place.stored_bytes // 4096) * 4096

    run(test, Rig(codec))


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
def test_chunks_are_put_in_any_order(order: tuple[int, ...]) -> None:
    """The record of a block does not depend on the order in which its chunks were put."""
    content = noise(3 * CHUNK_BYTES + 1)

    async def test(rig: Rig) -> None:
        first = await rig.write(content, BLOCK)
        second = await rig.write(content, BLOCK + 64, order)
        assert [p.stored_bytes for p in first.places] == [p.stored_bytes for p in second.places]
        assert await rig.read(second, 0, len(content), BLOCK + 64) == content

    run(test, Rig(stores=3))


def test_the_buffer_stays_the_callers() -> None:
    """The writer neither gives back nor changes the bytes of the buffer that it was handed."""
    content = text(CHUNK_BYTES - 100)

    async def test(rig: Rig) -> None:
        block = rig.writer.open_block(BLOCK)
        with await rig.pool.acquire(CHUNK_BYTES) as buffer:
            buffer.memory[: len(content)] = content
            await rig.writer.put_chunk(block, 0, buffer, len(content))
            assert bytes(buffer.memory[: len(content)]) == content
            assert rig.pool.used_bytes == CHUNK_BYTES

    run(test, Rig(Codec.ZSTD))


def test_a_block_is_sealed_only_when_it_is_whole() -> None:
    """A missing chunk, a short one in the middle and a wrong length are bugs that seal catches."""

    async def test(rig: Rig) -> None:
        block = rig.writer.open_block(BLOCK)
        await rig.put(block, 1, noise(1000))
        for length in (CHUNK_BYTES + 1000, 1000):
            with pytest.raises(AssertionError):
                rig.writer.seal(block, length, 1)
        await rig.put(block, 0, noise(CHUNK_BYTES))
        for length in (CHUNK_BYTES + 999, 2 * CHUNK_BYTES, CHUNK_BYTES):
            with pytest.raises(AssertionError):
                rig.writer.seal(block, length, 1)
        rig.writer.seal(block, CHUNK_BYTES + 1000, 1)
        short = rig.writer.open_block(BLOCK + 1)
        await rig.put(short, 0, noise(1000))
        await rig.put(short, 1, noise(1000))
        with pytest.raises(AssertionError):
            rig.writer.seal(short, CHUNK_BYTES + 1000, 1)

    run(test, Rig())


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(CHUNKS_PER_BLOCK))
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("error", [NoSpace("full"), StoreUnavailable("lost")])
def test_a_failed_put_is_told_and_leaves_nothing(
    failing: int, codec: Codec, error: TectonicError
) -> None:
    """Whichever put fails: the caller gets the store's error, and discard removes all the rest."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.failures[failing] = error
        block = rig.writer.open_block(BLOCK)
        for index in range(CHUNKS_PER_BLOCK):
            if index == failing:
                with pytest.raises(type(error)):
                    await rig.put(block, index, text(CHUNK_BYTES))
            else:
                await rig.put(block, index, text(CHUNK_BYTES))
        assert sorted(block.places) == [i for i in range(CHUNKS_PER_BLOCK) if i != failing]
        with pytest.raises(AssertionError):
            rig.writer.seal(block, CHUNKS_PER_BLOCK * CHUNK_BYTES, 1)
        await rig.writer.discard(block)
        assert store.keys() == []
        assert not block.places

    run(test, Rig(codec))


def test_what_the_callers_copy_raises_is_told() -> None:
    """An error of `fill` reaches the caller as it is, and nothing is stored."""

    def fill(_: memoryview) -> None:
        raise ZeroDivisionError

    async def test(rig: Rig) -> None:
        block = rig.writer.open_block(BLOCK)
        with await rig.pool.acquire(CHUNK_BYTES) as buffer, pytest.raises(ZeroDivisionError):
            await rig.writer.put_chunk(block, 0, buffer, 100, fill=fill)
        assert rig.watched[0].keys() == []
        assert not block.places

    run(test, Rig(Codec.ZSTD))


def test_an_id_that_was_used_before_overwrites_nothing() -> None:
    """A chunk whose key is taken is refused with Exists; the old one stays whole."""

    async def test(rig: Rig) -> None:
        old = await rig.write(text(1000))
        with pytest.raises(Exists):
            await rig.put(rig.writer.open_block(BLOCK), 0, noise(1000))
        assert await rig.read(old, 0, 1000) == text(1000)

    run(test, Rig())


def test_discarding_does_not_fail(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that cannot be deleted now are left to the lease's cleaning, with a warning."""

    async def test(rig: Rig) -> None:
        block = rig.writer.open_block(BLOCK)
        for index in range(2):
            await rig.put(block, index, noise(CHUNK_BYTES))
        kept, removed = block.places[0].store_id, block.places[1].store_id
        monkeypatch.setattr(rig.watched[kept], "delete", _unavailable)
        await rig.writer.discard(block)
        assert len(rig.watched[kept].keys()) == 1
        assert rig.watched[removed].keys() == []

    with caplog.at_level(logging.WARNING):
        run(test, Rig(stores=2))
    assert "stays for now" in caplog.text


def _unavailable(_: object) -> None:
    raise StoreUnavailable("lost")


# --- threads and memory -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_cancelled_put_waits_for_its_thread(codec: Codec) -> None:
    """Cancellation never gives back memory that a thread still reads from.

    The put that got through all the same is known to the block, so that discard deletes it.
    """

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.open.clear()
        block = rig.writer.open_block(BLOCK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.put, block, 0, text(CHUNK_BYTES))
            await until(lambda: bool(store.puts))
            nursery.cancel_scope.cancel()
            for _ in range(10):
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
                assert rig.pool.used_bytes >= CHUNK_BYTES
            store.open.set()
        assert list(block.places) == [0]
        await rig.writer.discard(block)
        assert store.keys() == []

    run(test, Rig(codec))


def test_a_put_that_is_cancelled_in_line_stores_nothing() -> None:
    """A put that never got its turn is cancelled at once and leaves no chunk."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        store.open.clear()
        block = rig.writer.open_block(BLOCK)
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(rig.put, block, index, text(CHUNK_BYTES))
            await until(lambda: len(store.puts) == 4)
            with trio.move_on_after(0) as scope:
                await rig.put(block, 4, text(1000))
            assert scope.cancelled_caught
            store.open.set()
        assert sorted(block.places) == [0, 1, 2, 3]
        assert len(store.keys()) == 4

    run(test, Rig(Codec.ZSTD))


def test_without_memory_a_chunk_is_stored_as_it_is() -> None:
    """Compression takes no memory that others wait for: with none free the chunk stays plain."""

    async def test(rig: Rig) -> None:
        record = await rig.write(text(CHUNK_BYTES))
        assert record.places[0].stored_bytes == CHUNK_BYTES
        assert await rig.read(record, 0, CHUNK_BYTES) == text(CHUNK_BYTES)

    run(test, Rig(Codec.ZSTD, buffers=1))


def test_busy_writers_go_on_compressing() -> None:
    """Writers that are faster than their store use up the pool, and yet all they write compresses.

    Scratch memory passes from put to put, instead of to the writers, who wait for memory.
    """
    writers, chunks = 3, 12

    async def test(rig: Rig) -> None:
        blocks = [rig.writer.open_block(BLOCK + number) for number in range(writers)]

        async def put(block: OpenBlock, index: int, buffer: Buffer) -> None:
            with buffer:
                buffer.memory[:] = text(CHUNK_BYTES)
                await rig.writer.put_chunk(block, index, buffer, CHUNK_BYTES)

        async def write(block: OpenBlock) -> None:
            for index in range(chunks):
                nursery.start_soon(put, block, index, await rig.pool.acquire(CHUNK_BYTES))

        rig.watched[0].open.clear()
        async with trio.open_nursery() as nursery:
            for block in blocks:
                nursery.start_soon(write, block)
            await until(lambda: rig.pool.waiting)
            rig.watched[0].open.set()
        places = [place for block in blocks for place in block.places.values()]
        assert len(places) == writers * chunks
        assert all(place.stored_bytes < CHUNK_BYTES for place in places)

    run(test, Rig(Codec.ZSTD, buffers=16))


def test_small_chunks_take_little_memory() -> None:
    """A small file's chunk takes two pieces of the smallest size, not two chunks' worth."""

    async def test(rig: Rig) -> None:
        await rig.write(text(20 * KiB))
        assert rig.pool.peak_bytes == 128 * KiB

    run(test, Rig(Codec.ZSTD))
