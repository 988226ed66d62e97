"""The composition root: formats a volume, opens it, and runs the background tasks of a client.

Nothing else builds engines, stores, pools or the file system. See CONCURRENCY.md for the tasks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import trio

from tectonic_client.background import BackgroundTasks, Signals
from tectonic_client.blocks.buffers import BufferPool
from tectonic_client.blocks.reader import BlockReader
from tectonic_client.blocks.stores import StoreSet
from tectonic_client.blocks.writer import BlockWriter, Geometry
from tectonic_client.chunkstore.open import (
    check_store,
    initialise_store,
    normalise_store_url,
    open_store,
)
from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import MeteredStore
from tectonic_client.concurrency import unwrapped_groups
from tectonic_client.errors import (
    BadOption,
    CorruptRecord,
    DeadlineExceeded,
    StoreUnavailable,
    TectonicError,
    VolumeExists,
    VolumeNotFound,
)
from tectonic_client.filesystem.audience import Audience
from tectonic_client.filesystem.blocktable import BlockTable
from tectonic_client.filesystem.chunkcache import ChunkCache
from tectonic_client.filesystem.compaction import Compactor
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.filesystem.follower import Follower
from tectonic_client.filesystem.namespace import make_root
from tectonic_client.filesystem.services import FileServices
from tectonic_client.filesystem.writelog import WriteServices
from tectonic_client.kv.executor import AsyncKV
from tectonic_client.kv.open import display_url, open_kv
from tectonic_client.kv.port import KV, ReadTransaction, Transaction
from tectonic_client.limits import (
    ALIGNMENT_BYTES,
    CHECKSUM_UNIT_BYTES,
    DEFAULT_BLOCK_BYTES,
    DEFAULT_CHUNK_BYTES,
    DEFAULT_MEMORY_LIMIT_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS_PER_BLOCK,
    METADATA_DEADLINE_S,
    MIN_CHUNK_BYTES,
    MIN_MEMORY_LIMIT_BYTES,
    MIN_POOL_CHUNKS,
    POOL_SHARE,
    SHUTDOWN_DEADLINE_S,
    SLOW_STEP_S,
    STORE_DEADLINE_S,
    MiB,
)
from tectonic_client.metadata import keys, sessions
from tectonic_client.metadata.ids import IdAllocator
from tectonic_client.metadata.sessions import list_sessions
from tectonic_client.metadata.volume import read_stores, read_volume, write_volume
from tectonic_client.records import (
    FORMAT_VERSION,
    Codec,
    CounterRecord,
    EncodingKind,
    SessionRecord,
    StoreRecord,
    StoreState,
    VolumeRecord,
)
from tectonic_client.types import Owner
from tectonic_client.upkeep.debris import Debris
from tectonic_client.upkeep.leftovers import Cleaner

_log = logging.getLogger(__name__)


# --- formatting -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Choices of a new volume; sizes in bytes. Raises BadOption for what cannot work."""

    name: str
    stores: tuple[str, ...]
    block_bytes: int = DEFAULT_BLOCK_BYTES
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    codec: Codec = Codec.NONE
    level: int = 1
    force: bool = False

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > 63 or not self.name.isprintable():
            raise BadOption("the name must be 1 to 63 printable characters")
        if not self.stores:
            raise BadOption("a volume needs at least one --store")
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise BadOption(
                f"chunk size {self.chunk_bytes} is not between {MIN_CHUNK_BYTES}"
                f" and {MAX_CHUNK_BYTES} bytes"
            )
        if self.chunk_bytes % CHECKSUM_UNIT_BYTES or self.chunk_bytes % ALIGNMENT_BYTES:
            raise BadOption(f"chunk size must be a multiple of {CHECKSUM_UNIT_BYTES} bytes")
        chunks, rest = divmod(self.block_bytes, self.chunk_bytes)
        if rest or not 1 <= chunks <= MAX_CHUNKS_PER_BLOCK:
            raise BadOption(
                f"block size must be 1 to {MAX_CHUNKS_PER_BLOCK} times the chunk size"
                f" of {self.chunk_bytes} bytes"
            )
        if not 1 <= self.level <= 19:
            raise BadOption(f"compression level {self.level} is not between 1 and 19")


def format_volume(meta_url: str, options: FormatOptions) -> VolumeRecord:
    """Make a volume. The metadata transaction at the end is the commit point.

    Raises VolumeExists without `force`, StoreMismatch, BadURL, BadOption, NoSpace, ReadOnly.
    """
    urls = [normalise_store_url(url) for url in options.stores]
    if len(set(urls)) != len(urls):
        raise BadOption("the same --store was given twice")
    record = VolumeRecord(
        format_version=FORMAT_VERSION, uuid=uuid.uuid4().bytes, created_ns=time.time_ns(),
        block_bytes=options.block_bytes, chunk_bytes=options.chunk_bytes, codec=options.codec,
        level=options.level, encoding=EncodingKind.SINGLE, name=options.name,
    )  # fmt: skip
    stores = [
        StoreRecord(number, StoreState.ACTIVE, 100, url, f"store{number}")
        for number, url in enumerate(urls)
    ]
    if not options.force:
        _refuse_existing(meta_url)
    for url in urls:  # all of them before anything is made or destroyed
        check_store(url, force=options.force)
    kv = open_kv(meta_url, create=True)
    try:
        for store in stores:
            initialise_store(store.url, record.uuid, store.store_id, force=options.force)
        kv.transact(lambda tx: _create(tx, record, stores, force=options.force), durable=True)
    finally:
        kv.close()
    return record


def _refuse_existing(meta_url: str) -> None:
    try:
        kv = open_kv(meta_url)
    except VolumeNotFound:
        return
    try:
        if kv.read(lambda tx: tx.get(keys.VOLUME)) is not None:
            raise VolumeExists(
                f"there is a volume at {display_url(meta_url)} already: --force destroys it"
            )
    finally:
        kv.close()


def _create(
    tx: Transaction, record: VolumeRecord, stores: list[StoreRecord], *, force: bool
) -> None:
    if force:
        _clear(tx)
    elif tx.get(keys.VOLUME) is not None:
        raise VolumeExists("somebody else formatted the volume at the same time")
    write_volume(tx, record, stores)
    make_root(tx, Owner(os.getuid(), os.getgid()), record.created_ns)


def _clear(tx: Transaction) -> None:
    """Remove a volume, but let the numbers of sessions and leases go on.

    A client that still has it open must not take a session of the new volume for its own, nor
    publish blocks under ids that are given out again.
    """
    numbering = tx.get(keys.NEXT_LEASE)
    tx.delete_range(b"", b"\xff")
    if numbering is not None:
        with suppress(CorruptRecord):  # a damaged volume is what force is there for
            tx.put(keys.NEXT_LEASE, CounterRecord.decode(numbering).encode())


# --- looking from outside ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store as seen from here; `problem` says why its space is not known."""

    record: StoreRecord
    total_bytes: int
    free_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class VolumeStatus:
    """What `tectonicfs status` shows."""

    volume: VolumeRecord
    stores: list[StoreStatus]
    sessions: list[SessionRecord]


def volume_status(meta_url: str) -> VolumeStatus:
    """Look at a volume without becoming a client of it."""

    def load(tx: ReadTransaction) -> tuple[VolumeRecord, list[StoreRecord], list[SessionRecord]]:
        volume = read_volume(tx, display_url(meta_url))
        return volume, read_stores(tx), [record for _, record in list_sessions(tx)]

    kv = open_kv(meta_url, read_only=True)
    try:
        volume, stores, found = kv.read(load)
    finally:
        kv.close()
    return VolumeStatus(volume, [_store_status(store, volume.uuid) for store in stores], found)


def _store_status(record: StoreRecord, volume_uuid: bytes) -> StoreStatus:
    try:
        store = open_store(record, volume_uuid, read_only=True)
    except TectonicError as error:
        return StoreStatus(record, 0, 0, str(error))
    try:
        usage = store.usage()
        return StoreStatus(record, usage.total_bytes, usage.free_bytes, None)
    except TectonicError as error:
        return StoreStatus(record, 0, 0, str(error))
    finally:
        store.close()


# --- opening ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VolumeOptions:
    """How a client opens a volume.

    A metadata transaction, or an operation of a store, that got no answer within
    `metadata_deadline_s` or `store_deadline_s` fails. Chunks that were read may occupy
    `read_cache_bytes` of the buffers, at most (and by default) CHUNK_CACHE_SHARE of them.

    With `access_times` reading changes them, as `relatime` has it; of mounts programs expect that.

    `wrap_kv` and `wrap_store` put something around the engine and each store: measurement, delays,
    faults. They must keep the ports' contracts where they do not mean to break them.
    """

    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    read_only: bool = False
    client: str = "api"
    read_cache_bytes: int | None = None
    metadata_deadline_s: float = METADATA_DEADLINE_S
    store_deadline_s: float = STORE_DEADLINE_S
    access_times: bool = False
    wrap_kv: Callable[[KV], KV] = lambda kv: kv
    wrap_store: Callable[[ChunkStore], ChunkStore] = lambda store: store

    def __post_init__(self) -> None:
        if self.memory_limit_bytes < MIN_MEMORY_LIMIT_BYTES:
            raise BadOption(
                f"memory limit of {self.memory_limit_bytes} bytes, at least"
                f" {MIN_MEMORY_LIMIT_BYTES // MiB} MiB are needed"
            )


@dataclass(slots=True)
class Volume:
    """An open volume: what the doors and the checkpoint API build on."""

    url: str
    record: VolumeRecord
    options: VolumeOptions
    kv: AsyncKV
    session_id: int
    ids: IdAllocator
    stores: StoreSet
    meters: dict[int, MeteredStore]
    debris: Debris
    pool: BufferPool
    writer: BlockWriter
    reader: BlockReader
    cache: ChunkCache
    audience: Audience
    filesystem: FileSystem
    cleaner: Cleaner
    tasks: BackgroundTasks
    nursery: trio.Nursery


@asynccontextmanager
async def open_volume(meta_url: str, options: VolumeOptions | None = None) -> AsyncIterator[Volume]:
    """Open a volume as a client of it; on exit everything dirty is flushed.

    Raises VolumeNotFound, FormatTooNew, StoreMismatch, MetadataUnavailable, BadURL. The exit raises
    the first error of the last flush.
    """
    options = options or VolumeOptions()
    async with _connected(meta_url, options) as backend, _session(backend, options) as ids:
        with _memory(options, backend.record) as pool, unwrapped_groups():
            async with trio.open_nursery() as nursery:
                volume = _assemble(meta_url, options, backend, ids, pool, nursery)
                volume.tasks.start(nursery, read_only=options.read_only)
                try:
                    yield volume
                except BaseException:
                    await _shut_down_after_error(volume)
                    raise
                else:
                    await _shut_down(volume)
                finally:
                    volume.cache.close()
                    nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class _Backend:
    """What a client stands on: the engine, the stores, and what the volume's records say."""

    kv: AsyncKV
    record: VolumeRecord
    store_records: list[StoreRecord]
    stores: StoreSet
    meters: dict[int, MeteredStore]
    debris: Debris


@asynccontextmanager
async def _connected(meta_url: str, options: VolumeOptions) -> AsyncIterator[_Backend]:
    """Open engine and stores, and close them when the last task that uses them has ended."""

    def load(tx: ReadTransaction) -> tuple[VolumeRecord, list[StoreRecord]]:
        return read_volume(tx, display_url(meta_url)), read_stores(tx)

    open_engine = partial(
        open_kv, meta_url, read_only=options.read_only, deadline_s=options.metadata_deadline_s
    )
    raw = await trio.to_thread.run_sync(open_engine)
    try:
        kv = AsyncKV(options.wrap_kv(raw), deadline_s=options.metadata_deadline_s)
        record, store_records = await kv.read(load)
        debris = Debris()
        opened = await trio.to_thread.run_sync(
            _open_in_time, store_records, record, options, debris
        )
        meters = {store_id: MeteredStore(store) for store_id, store in opened.items()}
        stores = StoreSet(meters, deadline_s=options.store_deadline_s, on_debris=debris.note)
        try:
            yield _Backend(kv, record, store_records, stores, meters, debris)
        finally:
            with trio.CancelScope(shield=True), _told_if_slow("closing the stores"):
                await stores.close()
    finally:
        with trio.CancelScope(shield=True), _told_if_slow("closing the metadata"):
            await trio.to_thread.run_sync(raw.close)


@asynccontextmanager
async def _session(backend: _Backend, options: VolumeOptions) -> AsyncIterator[IdAllocator]:
    """A session, unless read-only; it ends when no task has anything in flight any more."""
    kv = backend.kv
    if options.read_only:
        yield IdAllocator(kv, 0)
        return

    def register(tx: Transaction) -> tuple[int, SessionRecord | None]:
        session_id = sessions.open_session(tx, options.client)
        return session_id, sessions.read_session(tx, session_id)

    session_id, record = await kv.transact(register)
    assert record is not None, "it was written in the same transaction"
    ids = IdAllocator(kv, session_id)
    try:
        yield ids
    finally:
        leases = backend.debris.clean_leases(ids.leases)
        with trio.CancelScope(shield=True), _told_if_slow("ending the session"):
            try:
                await kv.transact(lambda tx: sessions.end_session(tx, session_id, leases))
            except TectonicError as error:
                sessions.note_ended(record)
                _log.warning("session %d is left to be cleaned up: %s", session_id, error)


def _assemble(
    meta_url: str, options: VolumeOptions, backend: _Backend, ids: IdAllocator, pool: BufferPool,
    nursery: trio.Nursery,
) -> Volume:  # fmt: skip
    """Build everything that a client consists of, from the ground up."""
    kv, record, stores = backend.kv, backend.record, backend.stores
    geometry = Geometry(record.block_bytes, record.chunk_bytes, record.codec, record.level)
    writer = BlockWriter(record.uuid, geometry, stores, backend.store_records, pool)
    reader = BlockReader(record.uuid, stores, pool)
    cache = ChunkCache(reader, pool, record.chunk_bytes, nursery, options.read_cache_bytes)
    signals = Signals()
    pool.on_pressure = signals.memory_wanted
    session_id = ids.session_id
    audience = Audience(kv, session_id, nursery)
    services = FileServices(
        kv=kv, session_id=session_id, stores=stores,
        write=WriteServices(writer, pool, ids.next_id, nursery, backend.debris.note),
        reader=reader, cache=cache, table=BlockTable(kv), chunk_bytes=record.chunk_bytes,
        on_blocks_freed=signals.blocks_freed, on_scattered=signals.scattered,
        on_tail=signals.tail_left, audience=audience,
    )  # fmt: skip
    follower = Follower(kv, session_id)
    filesystem = FileSystem(
        services, ids, follower, read_only=options.read_only,
        keeps_access_times=options.access_times, on_orphan=signals.orphaned,
    )  # fmt: skip
    cleaner = Cleaner(kv, stores, session_id, filesystem.files.is_open)
    compactor = Compactor(services, filesystem.files)
    tasks = BackgroundTasks(kv, session_id, filesystem, cleaner, cache, pool, signals, compactor)
    return Volume(
        url=meta_url, record=record, options=options, kv=kv, session_id=session_id, ids=ids,
        stores=stores, meters=backend.meters, debris=backend.debris, pool=pool, writer=writer,
        reader=reader, cache=cache, audience=audience, filesystem=filesystem,
        cleaner=cleaner, tasks=tasks, nursery=nursery,
    )  # fmt: skip


@contextmanager
def _memory(options: VolumeOptions, record: VolumeRecord) -> Iterator[BufferPool]:
    """The buffer pool; its memory goes back to the system when the last task has ended.

    Raises BadOption where too few chunks would fit to make progress.
    """
    size = int(options.memory_limit_bytes * POOL_SHARE)
    if size < MIN_POOL_CHUNKS * record.chunk_bytes:
        needed = int(MIN_POOL_CHUNKS * record.chunk_bytes / POOL_SHARE)
        raise BadOption(
            f"memory limit of {options.memory_limit_bytes} bytes: with chunks of"
            f" {record.chunk_bytes} bytes at least {needed // MiB} MiB are needed"
        )
    pool = BufferPool(size, record.chunk_bytes)
    yield pool
    if pool.used_bytes:
        _log.error("%d bytes of buffers were not given back", pool.used_bytes)
    else:
        pool.close()


def _open_in_time(
    records: list[StoreRecord], volume: VolumeRecord, options: VolumeOptions, debris: Debris
) -> dict[int, ChunkStore]:
    """All stores. Raises StoreUnavailable where one does not answer: its thread is left alone."""
    opened: Future[dict[int, ChunkStore]] = Future()

    def work() -> None:
        try:
            opened.set_result(_open_stores(records, volume, options, debris))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            opened.set_exception(error)

    threading.Thread(target=work, name="open-stores", daemon=True).start()
    try:
        return opened.result(options.store_deadline_s)
    except TimeoutError:
        urls = ", ".join(record.url for record in records)
        raise StoreUnavailable(
            f"no answer for {options.store_deadline_s:.0f} s from the volume's stores: {urls}"
        ) from None


def _open_stores(
    records: list[StoreRecord], volume: VolumeRecord, options: VolumeOptions, debris: Debris
) -> dict[int, ChunkStore]:
    """Open every store of the volume, or none."""
    opened: dict[int, ChunkStore] = {}
    try:
        for record in records:
            store = open_store(record, volume.uuid, read_only=options.read_only)
            opened[record.store_id] = debris.watch(options.wrap_store(store))
    except TectonicError:
        for store in opened.values():
            store.close()
        raise
    return opened


async def _shut_down_after_error(volume: Volume) -> None:
    """Shut down without hiding the error that is on its way."""
    try:
        await _shut_down(volume)
    except TectonicError as error:
        _log.error("closing volume %r: %s", volume.record.name, error)


async def _shut_down(volume: Volume) -> None:
    """Flush everything; raises the first error of it. Then clean up as far as that succeeds.

    Shielded, with a deadline of its own: cancelling a client never loses dirty data.
    """
    if volume.options.read_only:
        return
    failure: TectonicError | None = DeadlineExceeded(
        f"volume {volume.record.name!r} could not be flushed within {SHUTDOWN_DEADLINE_S:.0f} s:"
        " what was not flushed is lost"
    )
    try:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_DEADLINE_S):
            await _attempt(volume, volume.filesystem.follower.stop)
            try:
                with _told_if_slow("flushing"):
                    await volume.filesystem.sync(durable=False)
                failure = None
            except TectonicError as error:
                failure = error
            else:
                with _told_if_slow("removing garbage"):
                    await _collect_garbage(volume)
    finally:
        if failure is not None:
            # What could not be flushed may lie in the stores, under any lease.
            volume.debris.note_leases(volume.ids.leases)
            if inodes := volume.filesystem.unflushed():
                _log.error("lost, because they could not be flushed: inodes %s", inodes)
    if failure is not None:
        raise failure


@contextmanager
def _told_if_slow(step: str) -> Iterator[None]:
    """Whoever waits for a client to end finds in the log what it waited for."""
    started = time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - started
        if took_s > SLOW_STEP_S:
            _log.warning("%s took %.1f s", step, took_s)


async def _collect_garbage(volume: Volume) -> None:
    """What fails here is left to the next client, as after a crash."""
    for step in (volume.tasks.reclaim_due_orphans, volume.cleaner.delete_dead_blocks):
        await _attempt(volume, step)


async def _attempt(volume: Volume, step: Callable[[], Awaitable[object]]) -> None:
    try:
        await step()
    except TectonicError as error:
        _log.warning("closing volume %r: %s", volume.record.name, error)
