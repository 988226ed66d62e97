"""A volume whose engine and store fail on request, and the faults to try at each step."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import trio
import trio.testing

from tectonic_client.chunkstore.port import ChunkStore
from tectonic_client.chunkstore.wrappers import Effect, Fail, Fault, FaultyStore, Operation, Tear
from tectonic_client.errors import (
    Exists,
    MetadataUnavailable,
    NoSpace,
    NotFound,
    StoreUnavailable,
    TectonicError,
    UnknownOutcome,
)
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.port import KV
from tectonic_client.kv.wrappers import FaultyKV
from tectonic_client.metadata import sessions
from tectonic_client.records import Codec
from tectonic_client.types import ROOT_INODE, Attributes, Owner
from tectonic_client.volume import (
    FormatOptions,
    Volume,
    VolumeOptions,
    format_volume,
    open_volume,
)
from tests.leaks import assert_no_leaks, clean

CHUNK_BYTES = 64 * 1024
OWNER = Owner(os.getuid(), os.getgid())

_numbers = itertools.count()


def new_volume(
    meta_url: str = "", store: str = "", *, stores: int = 1, chunk_bytes: int = CHUNK_BYTES
) -> str:
    """Format a volume of small chunks, in memory unless told where; returns its metadata URL."""
    memory = f"memory://faults-{next(_numbers)}"
    base = store or f"{memory}-store"
    format_volume(
        meta_url or memory,
        FormatOptions(
            name="faults",
            stores=tuple(f"{base}-{number}" for number in range(stores)),
            chunk_bytes=chunk_bytes,
            block_bytes=2 * chunk_bytes,
            codec=Codec.NONE,
        ),
    )
    return meta_url or memory


class Faults:
    """Wrappers of one client's engine and stores."""

    def __init__(self) -> None:
        self.kv: FaultyKV
        self.stores: list[FaultyStore] = []

    def options(self, **others: object) -> VolumeOptions:
        """How to open a volume so that this can make it fail."""

        def wrap_kv(kv: KV) -> KV:
            self.kv = FaultyKV(kv)
            return self.kv

        def wrap_store(store: ChunkStore) -> ChunkStore:
            self.stores.append(FaultyStore(store))
            return self.stores[-1]

        return VolumeOptions(wrap_kv=wrap_kv, wrap_store=wrap_store, **others)  # type: ignore[arg-type]

    @property
    def pending(self) -> bool:
        """Whether a planned fault has not come yet."""
        return self.kv.pending or any(store.pending for store in self.stores)

    def clear(self) -> None:
        """Forget what is planned."""
        self.kv.clear()
        for store in self.stores:
            store.clear()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault; `plan(faults, n)` makes it happen at the n-th step of its sort."""

    name: str
    plan: Callable[[Faults, int], None]

    def __str__(self) -> str:
        return self.name


def _store_fault(operation: Operation, effect: Effect) -> Callable[[Faults, int], None]:
    return lambda faults, n: faults.stores[0].plan(Fault(operation, effect, n))


_DOWN = MetadataUnavailable("injected: no database")
_UNKNOWN = UnknownOutcome("injected: no answer")
_LOST = StoreUnavailable("injected: no store")
_FULL = NoSpace("injected: full")

KINDS = [
    Kind("transaction fails", lambda faults, n: faults.kv.fail_transaction(n, _DOWN)),
    Kind("unknown, not done", lambda faults, n: faults.kv.fail_transaction(n, _UNKNOWN)),
    Kind("unknown, done", lambda faults, n: faults.kv.lose_answer(n)),
    Kind("metadata full", lambda faults, n: faults.kv.fail_transaction(n, _FULL)),
    Kind("read fails", lambda faults, n: faults.kv.fail_read(n, _DOWN)),
    Kind("put: no space", _store_fault("put", Fail(_FULL))),
    Kind("put: no store", _store_fault("put", Fail(_LOST))),
    Kind("put: torn", _store_fault("put", Tear(4096, _LOST))),
    Kind("get fails", _store_fault("get_into", Fail(_LOST))),
    Kind("delete fails", _store_fault("delete", Fail(_LOST))),
    Kind("list fails", _store_fault("list", Fail(_LOST))),
]


@asynccontextmanager
async def failing_client(url: str, faults: Faults, **others: object) -> AsyncIterator[Volume]:
    """A client whose background tasks have had their first turn."""
    async with open_volume(url, faults.options(**others)) as volume:
        await trio.testing.wait_all_tasks_blocked(0.001)
        yield volume


async def end_sessions_left_by_this_process(volume: Volume) -> None:
    """As if the process of clients that could not end their session had ended now."""
    for session_id, _ in await volume.kv.read(sessions.list_sessions):
        if session_id != volume.session_id:
            end = partial(sessions.end_session, session_id=session_id, leases=[])
            await volume.kv.transact(end)


# --- programs that do not give up -------------------------------------------------------------

TRIES = 6


async def insist(
    work: Callable[[], Awaitable[object]], *, done: type[TectonicError] | None = None
) -> None:
    """Run `work` until it succeeds; `done` is what it raises where an earlier try took effect."""
    unsure = False
    for _ in range(TRIES):
        try:
            await work()
            return
        except TectonicError as error:
            if unsure and done is not None and isinstance(error, done):
                return
            if not _is_injected(error):
                raise
            unsure = unsure or isinstance(error, UnknownOutcome)
    raise AssertionError(f"failed {TRIES} times")


def _is_injected(error: BaseException | None) -> bool:
    """Whether an error, or what it was made of, is one of ours."""
    while error is not None:
        if "injected" in str(error):
            return True
        error = error.__cause__
    return False


async def store_file(fs: FileSystem, name: bytes, data: bytes, *, offset: int = 0) -> None:
    """Write and flush until it worked, as a program that checks its errors."""

    async def create() -> None:
        _, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_RDWR)
        await fs.release(handle)

    async def look() -> None:
        with suppress(NotFound):
            found.append(await fs.lookup(ROOT_INODE, name))

    async def fill() -> None:
        inode = (await fs.lookup(ROOT_INODE, name)).inode
        handle = await fs.open(inode, os.O_RDWR)
        try:
            await fs.write(handle, offset, data)
            await fs.flush(handle)
        finally:
            await fs.release(handle)

    found: list[Attributes] = []
    await insist(look)
    if not found:
        await insist(create, done=Exists)
    await insist(fill)


async def load_file(fs: FileSystem, name: bytes, step: int = 100_000) -> bytes:
    """All bytes of a file in the root directory."""
    inode = (await fs.lookup(ROOT_INODE, name)).inode
    handle = await fs.open(inode, os.O_RDONLY)
    try:
        parts: list[bytes] = []
        while part := bytes(await fs.read(handle, sum(map(len, parts)), step)):
            parts.append(part)
        return b"".join(parts)
    finally:
        await fs.release(handle)


async def load_tree(fs: FileSystem) -> dict[bytes, bytes]:
    """All files in the root directory."""
    handle = await fs.opendir(ROOT_INODE)
    names = [entry.name for entry in await fs.readdir(handle, 0)]
    await fs.releasedir(handle)
    return {name: await load_file(fs, name) for name in names}


# --- a fault at each step ---------------------------------------------------------------------

MAX_STEPS = 40
"""More steps than any scenario has."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is there before, what the program does, and what must be there afterwards."""

    work: Callable[[Volume], Awaitable[None]]
    before: dict[bytes, bytes]
    after: dict[bytes, bytes]

    def __str__(self) -> str:
        return self.work.__name__.strip("_")


async def try_each_step(scenario: Scenario, kind: Kind, max_steps: int = MAX_STEPS) -> None:
    """Run the scenario with the fault at its first step, its second, ... until it has no more."""
    for n in range(1, max_steps):
        with trio.fail_after(20):
            try:
                if not await _try(scenario, kind, n):
                    return
            except BaseException as error:
                error.add_note(f"the fault was at step {n}")
                raise
    raise AssertionError(f"more than {max_steps} steps")


async def _try(scenario: Scenario, kind: Kind, n: int) -> bool:
    """Run the scenario with the fault at its n-th step; False if it has fewer steps."""
    url = new_volume()
    async with open_volume(url) as volume:
        for name, data in scenario.before.items():
            await store_file(volume.filesystem, name, data)
    faults = Faults()
    try:
        async with failing_client(url, faults) as volume:
            kind.plan(faults, n)
            await scenario.work(volume)
            # What the program was told must be there, before anybody cleans up.
            reached = not faults.pending
            faults.clear()
            assert await load_tree(volume.filesystem) == scenario.after
    except TectonicError as error:
        raise AssertionError(f"closing failed: {error!r}") from error
    assert volume.pool.used_bytes == 0, "leaked buffers"
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)
        assert await load_tree(volume.filesystem) == scenario.after
    return reached
