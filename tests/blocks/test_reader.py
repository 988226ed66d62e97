"""Reading of blocks: any range, never wrong bytes, memory and threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import cycle, islice

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.blocks import fetch
from tectonic_client.blocks.buffers import BufferPool
from tectonic_client.blocks.reader import BlockReader, Part
from tectonic_client.chunkstore.port import ChunkKey
from tectonic_client.encoding.chunk import ChunkHeader
from tectonic_client.encoding.compression import FRAME_BYTES
from tectonic_client.errors import (
    ChunkMissing,
    CorruptChunk,
    CorruptRecord,
    FormatTooNew,
    StoreUnavailable,
)
from tectonic_client.limits import (
    CHECKSUM_UNIT_BYTES,
    CHUNK_HEADER_BYTES,
    STORE_READ_THREADS,
    KiB,
    MiB,
)
from tectonic_client.records import BlockRecord, ChunkPlace, Codec
from tests.blocks.rig import BLOCK, CHUNK_BYTES, UUID, Rig, noise, run, text, until
from tests.golden.samples import with_field

# --- round trips ------------------------------------------------------------------------------


@given(
    codec=st.sampled_from(Codec),
    kinds=st.lists(st.sampled_from([text, noise]), min_size=4, max_size=4),
    length=st.integers(1, 4 * CHUNK_BYTES)
    | st.sampled_from([1, 4096, 65_536, CHUNK_BYTES, CHUNK_BYTES + 1]),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
)
def test_any_range_of_any_block_is_read_back(
    codec: Codec,
    kinds: list[Callable[[int], bytes]],
    length: int,
    ranges: list[tuple[float, float]],
) -> None:
    """What was written is read, whole and in any range, whatever the codec and what it did."""
    content = b"".join(kind(CHUNK_BYTES) for kind in kinds)[:length]

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        for a, b in [*ranges, (0, 1)]:
            start, end = int(min(a, b) * length), int(max(a, b) * length)
            assert await rig.read(record, start, end) == content[start:end]

    run(test, Rig(codec, stores=3))


@given(
    frames=st.integers(2, 5),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4),
)
@settings(max_examples=10)
def test_ranges_of_chunks_of_many_frames(frames: int, ranges: list[tuple[float, float]]) -> None:
    """Parts of a large compressed chunk are read back in any order, first or with known header."""
    length = frames * FRAME_BYTES - 12_345
    content = text(length)

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        for a, b in ranges:
            start, end = int(min(a, b) * length), int(max(a, b) * length)
            assert await rig.read(record, start, end) == content[start:end]

    run(test, Rig(Codec.ZSTD, chunk_bytes=8 * MiB, buffers=3))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_range_can_be_kept_and_can_be_consumed(codec: Codec) -> None:
    """read_chunk_range keeps verified bytes until released; read_scatter shows them once."""
    content = text(CHUNK_BYTES)

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        kept = await rig.reader.read_chunk_range(BLOCK, record, 0, 1000, 200_001)
        await rig.read(record, 0, CHUNK_BYTES)
        assert bytes(kept.view) == content[1000:200_001]
        assert rig.pool.used_bytes > 0
        kept.release()
        assert len(kept.view) == 0
        seen: list[bytes] = []
        await rig.reader.read_scatter(
            BLOCK, record, 0, 5, 70_000, lambda view: seen.append(bytes(view))
        )
        assert seen == [content[5:70_000]]

    run(test, Rig(codec))


def test_an_error_of_the_consumer_is_told() -> None:
    """What `consume` raises reaches the caller as it is; the memory goes back."""

    def consume(_: memoryview) -> None:
        raise ZeroDivisionError

    async def test(rig: Rig) -> None:
        record = await rig.write(text(100_000))
        with pytest.raises(ZeroDivisionError):
            await rig.reader.read_scatter(BLOCK, record, 0, 0, 10, consume)

    run(test, Rig(Codec.ZSTD))


# --- what is read for it ----------------------------------------------------------------------


def test_only_the_units_of_a_range_are_read() -> None:
    """A read from the start is one get with the header; later ones get their units alone."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(noise(CHUNK_BYTES))
        key, unit = ChunkKey(BLOCK, 0), CHECKSUM_UNIT_BYTES
        await rig.read(record, 10, 20)
        assert store.gets == [(key, 0, CHUNK_HEADER_BYTES + unit)]
        await rig.read(record, unit - 1, unit + 1)
        await rig.read(record, CHUNK_BYTES - 1, CHUNK_BYTES)
        assert store.gets[1:] == [
            (key, CHUNK_HEADER_BYTES, 2 * unit),
            (key, CHUNK_HEADER_BYTES + CHUNK_BYTES - unit, unit),
        ]

    run(test, Rig())


def test_only_the_frames_of_a_range_are_read() -> None:
    """A small read of a large compressed chunk gets the header, the seek table, and one frame.

    Header and table are kept, so that the next one gets its frame alone.
    """

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(text(8 * FRAME_BYTES))
        payload = record.places[0].stored_bytes
        await rig.read(record, 3 * FRAME_BYTES, 3 * FRAME_BYTES + 1)
        assert [size for _, _, size in store.gets[:2]] == [
            CHUNK_HEADER_BYTES, -(-(payload % CHECKSUM_UNIT_BYTES) // 4096) * 4096,
        ]  # fmt: skip
        await rig.read(record, 5 * FRAME_BYTES, 5 * FRAME_BYTES + 1)
        assert len(store.gets) == 4
        assert all(size < payload / 4 for _, _, size in store.gets)

    run(test, Rig(Codec.ZSTD, chunk_bytes=8 * MiB, buffers=3))


def test_headers_are_kept_by_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of headers that are kept is bounded; the least recently used one goes."""
    monkeypatch.setattr(fetch, "MAX_CACHED_CHUNK_HEADERS", 2)

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        records = [await rig.write(noise(CHUNK_BYTES), BLOCK + number) for number in range(3)]

        async def gets(number: int) -> int:
            """How many gets a read takes: 2 with the header's, else 1."""
            store.gets.clear()
            await rig.read(records[number], CHUNK_BYTES - 1, CHUNK_BYTES, BLOCK + number)
            return len(store.gets)

        assert [await gets(number) for number in (0, 1, 0, 2)] == [2, 2, 1, 2]
        assert [await gets(number) for number in (0, 2, 1)] == [1, 1, 2]

    run(test, Rig())


# --- damage -----------------------------------------------------------------------------------

Reading = Callable[[Rig, BlockRecord], Awaitable[object]]


async def _into(rig: Rig, record: BlockRecord) -> None:
    memory = bytearray(b"\xaa" * record.length)
    try:
        await rig.reader.read_into(BLOCK, record, 0, memoryview(memory), context="/some/file")
    finally:
        assert memory == b"\xaa" * record.length


async def _range(rig: Rig, record: BlockRecord) -> None:
    loaded = await rig.reader.read_chunk_range(
        BLOCK, record, 0, 0, record.length, context="/some/file"
    )
    loaded.release()
    raise AssertionError("damage was not seen")


async def _scatter(rig: Rig, record: BlockRecord) -> None:
    def consume(_: memoryview) -> None:
        raise AssertionError("damaged bytes were handed out")

    await rig.reader.read_scatter(BLOCK, record, 0, 0, record.length, consume, context="/some/file")


READINGS: list[Reading] = [_into, _range, _scatter]
KEY = ChunkKey(BLOCK, 0)


def refused(
    damage: Callable[[Rig], None], kind: type[Exception], *, codec: Codec = Codec.NONE,
    content: bytes = text(150_000),
) -> str:  # fmt: skip
    """All ways to read must raise `kind`, with a header known or not; returns the last message."""
    messages = []

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        for known in (False, True):
            for reading in READINGS:
                # A reader of its own, since the first to see damage forgets the header.
                rig.reader = BlockReader(UUID, rig.stores, rig.pool)
                if known:
                    assert await rig.read(record, 0, record.length) == content
                whole = rig.watched[0].chunk(KEY)
                damage(rig)
                with pytest.raises(kind) as caught:
                    await reading(rig, record)
                rig.watched[0].replace(KEY, whole)
                messages.append(str(caught.value))

    run(test, Rig(codec))
    for message in messages:
        assert message.startswith("/some/file: block 0000000000005000 chunk 0 ")
        assert "memory://store0" in message
        assert "\n" not in message
    return messages[-1]


def flip(position: int, bit: int = 0) -> Callable[[Rig], None]:
    def damage(rig: Rig) -> None:
        data = rig.watched[0].chunk(KEY)
        data[position] ^= 1 << bit
        rig.watched[0].replace(KEY, data)

    return damage


@given(position=st.integers(0, 149_999), bit=st.integers(0, 7))
@settings(max_examples=15)
def test_a_flipped_bit_of_the_payload_is_found(position: int, bit: int) -> None:
    """Any flipped bit of the payload is CorruptChunk, however the bytes are read."""
    message = refused(flip(CHUNK_HEADER_BYTES + position, bit), CorruptChunk)
    assert f"checksum of unit {position // CHECKSUM_UNIT_BYTES} " in message


@given(from_end=st.integers(1, 33) | st.integers(1, 70_000), bit=st.integers(0, 7))
@settings(max_examples=15)
def test_a_flipped_bit_of_a_compressed_payload_is_found(from_end: int, bit: int) -> None:
    """Any flipped bit of a compressed payload, seek table included, is CorruptChunk."""

    def damage(rig: Rig) -> None:
        payload_bytes = ChunkHeader.decode(memoryview(rig.watched[0].chunk(KEY))).payload_bytes
        flip(CHUNK_HEADER_BYTES + payload_bytes - from_end, bit)(rig)

    refused(damage, CorruptChunk, codec=Codec.ZSTD)


@given(position=st.integers(0, CHUNK_HEADER_BYTES - 1), bit=st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_of_the_header_is_found(position: int, bit: int) -> None:
    """Any flipped bit of a header is CorruptChunk for whoever has not read it yet."""

    async def test(rig: Rig) -> None:
        record = await rig.write(text(1000))
        flip(position, bit)(rig)
        with pytest.raises(CorruptChunk, match=r"^/some/file: block .* chunk 0 in memory://store0"):
            await rig.read(record, 0, 1000)

    run(test, Rig())


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize(
    "size", [0, 100, CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + CHECKSUM_UNIT_BYTES - 4096]
)
def test_a_chunk_cut_short_is_found(size: int, codec: Codec) -> None:
    """A chunk that lost its end is CorruptChunk, and the message says so."""

    def damage(rig: Rig) -> None:
        rig.watched[0].replace(KEY, rig.watched[0].chunk(KEY)[:size])

    assert "cut short" in refused(damage, CorruptChunk, codec=codec)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_missing_chunk_is_told_as_such(codec: Codec) -> None:
    """A chunk that is gone is ChunkMissing, naming file, block, chunk and store."""
    message = refused(lambda rig: rig.watched[0].delete([KEY]), ChunkMissing, codec=codec)
    assert message == "/some/file: block 0000000000005000 chunk 0 is missing in memory://store0"


def test_damage_elsewhere_in_a_chunk_does_not_matter() -> None:
    """A range is readable while its own units are whole; the damaged unit's bytes are not."""
    content = noise(CHUNK_BYTES)

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        flip(CHUNK_HEADER_BYTES + CHECKSUM_UNIT_BYTES)(rig)
        assert await rig.read(record, 0, 65_536) == content[:65_536]
        assert await rig.read(record, 131_072, CHUNK_BYTES) == content[131_072:]
        with pytest.raises(CorruptChunk):
            await rig.read(record, 65_535, 65_537)

    run(test, Rig())


def test_a_repaired_chunk_is_read_again() -> None:
    """Nothing of a damaged chunk is remembered: once it is whole again, so are the reads."""
    content = text(CHUNK_BYTES)

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        whole = rig.watched[0].chunk(KEY)
        for damage in (flip(20), flip(CHUNK_HEADER_BYTES + 7)):
            damage(rig)
            with pytest.raises(CorruptChunk):
                await rig.read(record, 0, CHUNK_BYTES)
            rig.watched[0].replace(KEY, whole)
            assert await rig.read(record, 0, CHUNK_BYTES) == content

    run(test, Rig(Codec.ZSTD))


def test_one_bad_chunk_of_many_is_named() -> None:
    """A read over several chunks fails with the error of the bad one, as a plain exception."""

    async def test(rig: Rig) -> None:
        record = await rig.write(noise(4 * CHUNK_BYTES))
        for store in rig.watched:
            store.delete([ChunkKey(BLOCK, 2)])
        with pytest.raises(ChunkMissing, match="chunk 2 is missing"):
            await rig.read(record, 0, 4 * CHUNK_BYTES)

    run(test, Rig(stores=2))


# --- chunks that are whole, but not the right ones --------------------------------------------


def swapped(other: Callable[[Rig], Awaitable[bytes | bytearray]]) -> str:
    """The error of reading a block in whose chunk's place lies another chunk."""
    messages = []

    async def test(rig: Rig) -> None:
        record = await rig.write(text(5000))
        rig.watched[0].replace(KEY, await other(rig))
        with pytest.raises(CorruptChunk) as caught:
            await rig.read(record, 0, 5000)
        messages.append(str(caught.value))

    run(test, Rig())
    return messages[0]


def test_a_chunk_of_another_volume_is_refused() -> None:
    """A chunk that some other volume wrote under the same name is not taken for ours."""

    async def other(_: Rig) -> bytearray:
        foreign = Rig()
        foreign.writer._volume_uuid = bytes(16)
        await foreign.write(text(5000))
        return foreign.watched[0].chunk(KEY)

    assert "another volume" in swapped(other)


def test_a_chunk_of_another_block_or_index_is_refused() -> None:
    """A chunk under the wrong name is refused, even if everything else fits."""

    async def of_block(rig: Rig) -> bytearray:
        await rig.write(text(5000), BLOCK + 1)
        return rig.watched[0].chunk(ChunkKey(BLOCK + 1, 0))

    async def of_index(rig: Rig) -> bytearray:
        await rig.write(text(CHUNK_BYTES + 5000), BLOCK + 1)
        return rig.watched[0].chunk(ChunkKey(BLOCK + 1, 1))

    assert "the chunk is 0000000000005001.0000" in swapped(of_block)
    assert "the chunk is 0000000000005001.0001" in swapped(of_index)


def test_a_chunk_of_a_newer_release_is_told_as_such() -> None:
    """A chunk of a newer format is FormatTooNew, naming the chunk."""

    async def test(rig: Rig) -> None:
        record = await rig.write(text(5000))
        chunk = rig.watched[0].chunk(KEY)
        chunk[:CHUNK_HEADER_BYTES] = with_field(bytes(chunk[:CHUNK_HEADER_BYTES]), 8, b"\x02\x00")
        rig.watched[0].replace(KEY, chunk)
        with pytest.raises(FormatTooNew, match="/some/file: block"):
            await rig.read(record, 0, 5000)

    run(test, Rig())


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("known", [False, True])
def test_header_and_record_must_agree(codec: Codec, *, known: bool) -> None:
    """Lengths that the block's record and the chunk's header tell differently are CorruptChunk."""

    async def test(rig: Rig) -> None:
        record = await rig.write(text(150_000))
        if known:
            await rig.read(record, 0, 10)
        stored = record.places[0].stored_bytes
        for wrong in (
            replace(record, length=150_001),
            replace(record, length=149_999, places=(ChunkPlace(0, min(stored, 149_999)),)),
            replace(record, places=(ChunkPlace(0, stored - 1),)),
            replace(record, places=(ChunkPlace(0, 1),)),
        ):
            with pytest.raises(CorruptChunk, match="record"):
                await rig.read(wrong, 0, 10)

    run(test, Rig(codec))


@pytest.mark.parametrize(
    ("start", "end", "places"),
    [
        (149_999, 150_001, (ChunkPlace(0, 150_000),)),
        (CHUNK_BYTES, CHUNK_BYTES + 1, (ChunkPlace(0, 150_000),)),
        (-5, 5, (ChunkPlace(0, 150_000),)),
        (0, 10, ()),
        (0, 10, (ChunkPlace(0, 0),)),
        (0, 10, (ChunkPlace(0, 150_001),)),
    ],
)
def test_a_range_that_the_block_does_not_have_is_refused(
    start: int, end: int, places: tuple[ChunkPlace, ...]
) -> None:
    """An extent beyond its block, or a record that contradicts itself, is CorruptRecord."""

    async def test(rig: Rig) -> None:
        record = replace(await rig.write(text(150_000)), places=places)
        with pytest.raises(CorruptRecord, match="/some/file: block"):
            await rig.read(record, start, end)

    run(test, Rig())


def test_a_store_that_is_not_open_is_told() -> None:
    """A chunk in a store that this client does not have is StoreUnavailable, not a crash."""

    async def test(rig: Rig) -> None:
        record = replace(await rig.write(text(5000)), places=(ChunkPlace(9, 5000),))
        with pytest.raises(StoreUnavailable, match="store 9 is not open"):
            await rig.read(record, 0, 10)

    run(test, Rig())


# --- threads and memory -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_cancelled_read_waits_for_its_thread(codec: Codec) -> None:
    """Cancellation never gives back memory that a thread still reads into."""

    async def test(rig: Rig) -> None:
        (store,) = rig.watched
        record = await rig.write(text(CHUNK_BYTES))
        store.open.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.read, record, 0, CHUNK_BYTES)
            await until(lambda: bool(store.gets))
            nursery.cancel_scope.cancel()
            for _ in range(10):
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
                assert rig.pool.used_bytes > 0
            store.open.set()

    run(test, Rig(codec))


def test_a_long_read_takes_little_memory() -> None:
    """A read over many chunks holds memory for as many as are under way, not for all."""

    async def test(rig: Rig) -> None:
        content = bytes(islice(cycle(noise(1000)), 16 * CHUNK_BYTES))
        record = await rig.write(content)
        rig.pool = rig.reader._pool = BufferPool(16 * CHUNK_BYTES, CHUNK_BYTES)
        assert await rig.read(record, 0, len(content)) == content
        assert rig.pool.peak_bytes <= STORE_READ_THREADS * CHUNK_BYTES

    run(test, Rig())


def test_a_read_waits_for_memory() -> None:
    """With all memory in use a read waits until some is given back, then goes on."""

    async def test(rig: Rig) -> None:
        record = await rig.write(text(CHUNK_BYTES))
        held = [await rig.pool.acquire(CHUNK_BYTES) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.read, record, 0, CHUNK_BYTES)
            await until(lambda: rig.pool.waiting)
            assert not rig.watched[0].gets
            for buffer in held:
                buffer.release()
        assert rig.watched[0].gets

    run(test, Rig(Codec.ZSTD, buffers=2))


def test_small_reads_take_little_memory() -> None:
    """A read of a few bytes takes memory for their checksum unit, not for a chunk."""

    async def test(rig: Rig) -> None:
        record = await rig.write(noise(CHUNK_BYTES))
        rig.pool.peak_bytes = 0
        await rig.read(record, 70_000, 70_010)
        assert rig.pool.peak_bytes == 64 * KiB

    run(test, Rig())


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_many_parts_of_a_chunk(codec: Codec) -> None:
    """Parts in any order, near and far, touching and overlapping, all get their bytes; near ones
    are fetched together."""
    content = text(CHUNK_BYTES) if codec is Codec.ZSTD else noise(CHUNK_BYTES)
    places = [(CHUNK_BYTES - 10, 10), (0, 1), (5, 100), (50, 100), (150, 1), (CHUNK_BYTES // 2, 7)]
    places += [(start, 16) for start in range(0, CHUNK_BYTES, 4096)]

    async def test(rig: Rig) -> None:
        record = await rig.write(content)
        targets = [bytearray(length) for _, length in places]
        parts = [
            Part(start, memoryview(target))
            for (start, _), target in zip(places, targets, strict=True)
        ]
        await rig.reader.read_parts(BLOCK, record, 0, parts, context="file")
        assert targets == [content[start : start + length] for start, length in places]
        assert not rig.pool.used_bytes
        outside = [Part(CHUNK_BYTES - 1, memoryview(bytearray(2)))]
        with pytest.raises(CorruptRecord, match="file"):
            await rig.reader.read_parts(BLOCK, record, 0, outside, context="file")

    run(test, Rig(codec))
