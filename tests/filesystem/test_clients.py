"""Many clients at once in the same directories, on the real engines."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import trio

from tectonic_client.errors import (
    Exists,
    FileSystemError,
    InvalidArgument,
    NotEmpty,
    NotFound,
    StaleHandle,
)
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import Volume, open_volume
from tests.filesystem.client_process import random_client
from tests.filesystem.engines import NewVolume, any_engine, sqlite_volume
from tests.filesystem.faultrig import OWNER, load_file, store_file
from tests.leaks import assert_no_leaks, clean

__all__ = ["any_engine", "sqlite_volume"]

CLIENTS = 4


@asynccontextmanager
async def _clients(url: str, count: int = CLIENTS) -> AsyncIterator[list[Volume]]:
    """Clients of a volume; afterwards another one finds nothing wrong."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_volume(url)) for _ in range(count)]
    await _check(url)


async def _check(url: str) -> None:
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)


async def _together(*calls: Callable[[], Awaitable[object]]) -> list[object]:
    """What each call returned, or its POSIX answer; all run at once."""
    results: list[object] = [None] * len(calls)

    async def run(index: int) -> None:
        try:
            results[index] = await calls[index]()
        except FileSystemError as error:
            results[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(calls)):
            nursery.start_soon(run, index)
    return results


def _failed(results: list[object]) -> list[type]:
    return [type(result) for result in results if isinstance(result, Exception)]


def _run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(100):
            await main()

    trio.run(bounded)


# --- everything at random ---------------------------------------------------------------------


@pytest.mark.parametrize("steps", [60, pytest.param(2000, marks=pytest.mark.stress)])
def test_clients_at_random_keep_the_volume_whole(
    any_engine: NewVolume, rng: random.Random, steps: int
) -> None:
    """Any mix of operations by several clients: only POSIX answers, a tree, nothing leaked."""
    url, answers = any_engine(), Counter[str]()
    seeds = [f"{rng.random()}" for _ in range(CLIENTS)]

    async def client(seed: str) -> None:
        answers.update(await random_client(url, seed, steps))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                nursery.start_soon(client, seed)
        await _check(url)

    _run(main)
    assert sum(n for name, n in answers.items() if name.endswith("done")) > CLIENTS * steps / 4


@pytest.mark.parametrize("steps", [100, pytest.param(2000, marks=pytest.mark.stress)])
def test_processes_at_random_keep_the_volume_whole(
    sqlite_volume: str, rng: random.Random, steps: int
) -> None:
    """The same by processes that share only the database and the stores."""
    command = [sys.executable, "-m", "tests.filesystem.client_process", sqlite_volume]
    processes = [
        subprocess.Popen([*command, f"{rng.random()}", str(steps)], stdout=subprocess.PIPE)
        for _ in range(CLIENTS)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert output.decode().split() == ["done:", str(steps)]
    _run(lambda: _check(sqlite_volume))


# --- races over one name ----------------------------------------------------------------------

ROUNDS = 12


def test_one_of_many_creates_a_name(any_engine: NewVolume) -> None:
    """Of clients that create one name at once exactly one succeeds, the others get Exists."""

    async def main() -> None:
        async with _clients(any_engine()) as clients:
            for number in range(ROUNDS):
                name = b"%d" % number
                makes = [
                    partial(client.filesystem.mkdir, ROOT_INODE, name, 0o755, OWNER)
                    for client in clients
                ]
                results = await _together(*makes)
                assert _failed(results) == [Exists] * (CLIENTS - 1)

    _run(main)


def test_a_directory_is_removed_or_gets_an_entry(any_engine: NewVolume) -> None:
    """Of rmdir and a create in the directory exactly one succeeds."""

    async def main() -> None:
        async with _clients(any_engine(), 2) as (one, two):
            for number in range(ROUNDS):
                directory = await one.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
                removed, created = await _together(
                    partial(one.filesystem.rmdir, ROOT_INODE, b"d"),
                    partial(two.filesystem.mkdir, directory.inode, b"%d" % number, 0o755, OWNER),
                )
                if isinstance(created, Exception):
                    assert isinstance(created, NotFound | StaleHandle)
                    assert removed is None
                else:
                    assert isinstance(removed, NotEmpty)
                    await two.filesystem.rmdir(directory.inode, b"%d" % number)
                    await one.filesystem.rmdir(ROOT_INODE, b"d")

    _run(main)


def test_renames_at_once_make_no_cycle(any_engine: NewVolume) -> None:
    """Directories that are moved into each other at once: one rename is refused."""

    async def main() -> None:
        async with _clients(any_engine(), 3) as clients:
            for _ in range(ROUNDS):
                fs = clients[0].filesystem
                names = [b"a", b"b", b"c"]
                tops = [(await fs.mkdir(ROOT_INODE, n, 0o755, OWNER)).inode for n in names]
                inner = [(await fs.mkdir(top, b"in", 0o755, OWNER)).inode for top in tops]
                moves = [
                    partial(c.filesystem.rename, ROOT_INODE, name, inner[(i + 1) % 3], name)
                    for i, (c, name) in enumerate(zip(clients, names, strict=True))
                ]
                assert _failed(await _together(*moves)) == [InvalidArgument]
                await _remove_all(clients[0], ROOT_INODE)

    _run(main)


async def _remove_all(volume: Volume, directory: int) -> None:
    fs = volume.filesystem
    handle = await fs.opendir(directory)
    for entry in await fs.readdir(handle, 0):
        await _remove_all(volume, entry.attributes.inode)
        await fs.rmdir(directory, entry.name)
    await fs.releasedir(handle)


def test_names_of_one_file_are_removed_at_once(any_engine: NewVolume) -> None:
    """Each of several clients removes one link: the file goes with the last, its blocks with it."""

    async def main() -> None:
        async with _clients(any_engine()) as clients:
            for _ in range(ROUNDS // 3):
                fs = clients[0].filesystem
                await store_file(fs, b"0", bytes(100_000))
                inode = (await fs.lookup(ROOT_INODE, b"0")).inode
                for number in range(1, CLIENTS):
                    await fs.link(inode, ROOT_INODE, b"%d" % number)
                removals = [
                    partial(c.filesystem.unlink, ROOT_INODE, b"%d" % i)
                    for i, c in enumerate(clients)
                ]
                assert _failed(await _together(*removals)) == []
                with pytest.raises(StaleHandle):
                    await _reclaimed(clients, inode)

    _run(main)


async def _reclaimed(clients: list[Volume], inode: int) -> None:
    for client in clients:
        await client.tasks.reclaim_orphans()
    await clients[0].filesystem.getattr(inode)


def test_replacing_and_reading_by_others(any_engine: NewVolume) -> None:
    """A reader sees one whole version while another client replaces the file again and again."""

    async def main() -> None:
        async with _clients(any_engine(), 2) as (writer, reader):
            await store_file(writer.filesystem, b"f", bytes(150_000))
            done = trio.Event()

            async def replace() -> None:
                for version in range(1, 9):
                    await store_file(writer.filesystem, b"new", bytes((version,)) * 150_000)
                    await writer.filesystem.rename(ROOT_INODE, b"new", ROOT_INODE, b"f")
                    await writer.tasks.reclaim_orphans()
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(replace)
                while not done.is_set():
                    try:
                        content = await load_file(reader.filesystem, b"f", 20_000)
                    except StaleHandle:
                        continue  # it was replaced and reclaimed while it was open here
                    assert len(set(content)) == 1
                    assert len(content) == 150_000
                    await trio.lowlevel.checkpoint()

    _run(main)
