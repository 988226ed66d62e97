"""Clients of a PostgreSQL server whose connections break, also while they commit."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from tectonic_client.errors import Exists, NotFound, TectonicError, TransientError, UnknownOutcome
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.types import ROOT_INODE
from tectonic_client.volume import open_volume
from tests.filesystem.faultrig import OWNER, new_volume
from tests.kv.proxy import Proxy
from tests.leaks import assert_no_leaks, clean
from tests.postgres import PostgresServer

CLIENTS = 3
NAMES = [b"a", b"b", b"c"]


class Stubborn:
    """Works in a directory of its own and tries again whatever the network breaks."""

    def __init__(
        self, fs: FileSystem, directory: int, rng: random.Random, chaos: Callable[[], None]
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._rng = rng
        self._chaos = chaos
        self.files: dict[bytes, bytes] = {}
        self.unknown = 0

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            name = self._rng.choice(NAMES)
            choice = self._rng.random()
            if name not in self.files or choice < 0.5:
                await self._write(name)
            elif choice < 0.7:
                await self._unlink(name)
            elif choice < 0.9:
                await self._rename(name, self._rng.choice(NAMES))
            else:
                await self._append(name)

    async def _insist(
        self, work: Callable[[], Awaitable[object]], done: type[TectonicError] | None = None
    ) -> None:
        """Until it succeeds, or a try without an answer turns out to have done so."""
        unsure = False
        while True:
            self._chaos()
            try:
                await work()
                return
            except TransientError:
                continue
            except UnknownOutcome:
                self.unknown += 1
                unsure = True
            except TectonicError as error:
                if unsure and done is not None and isinstance(error, done):
                    return
                raise

    async def _write(self, name: bytes) -> None:
        data = self._rng.randbytes(self._rng.choice([100, 70_000, 200_000]))
        if name not in self.files:
            await self._insist(lambda: self._create(name), done=Exists)
        await self._insist(lambda: self._fill(name, 0, data, os.O_TRUNC))
        self.files[name] = data

    async def _append(self, name: bytes) -> None:
        data, offset = self._rng.randbytes(50_000), len(self.files[name])
        await self._insist(lambda: self._fill(name, offset, data, 0))
        self.files[name] += data

    async def _create(self, name: bytes) -> None:
        _, handle = await self._fs.create(self._directory, name, 0o644, OWNER, os.O_RDWR)
        await self._fs.release(handle)

    async def _fill(self, name: bytes, offset: int, data: bytes, flags: int) -> None:
        inode = (await self._fs.lookup(self._directory, name)).inode
        handle = await self._fs.open(inode, os.O_RDWR | flags)
        try:
            for start in range(0, len(data), 60_000):
                part = data[start : start + 60_000]
                await self._fs.write(handle, offset + start, part)
                if self._rng.random() < 0.3:
                    self._chaos()
                    await self._fs.flush(handle)
            await self._fs.fsync(handle)
        finally:
            await self._fs.release(handle)

    async def _unlink(self, name: bytes) -> None:
        await self._insist(lambda: self._fs.unlink(self._directory, name), done=NotFound)
        del self.files[name]

    async def _rename(self, old: bytes, new: bytes) -> None:
        if old != new:
            await self._insist(
                lambda: self._fs.rename(self._directory, old, self._directory, new), done=NotFound
            )
            self.files[new] = self.files.pop(old)

    async def check(self, fs: FileSystem) -> None:
        """Exactly these files, with exactly these bytes."""
        handle = await fs.opendir(self._directory)
        entries = await fs.readdir(handle, 0)
        assert {entry.name for entry in entries} == self.files.keys()
        for entry in entries:
            reading = await fs.open(entry.attributes.inode, os.O_RDONLY)
            assert bytes(await fs.read(reading, 0, 2**20)) == self.files[entry.name]
            await fs.release(reading)


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.stress)])
def test_broken_connections_lose_and_leak_nothing(
    postgres_server: PostgresServer, tmp_path: Path, rng: random.Random, steps: int
) -> None:
    """Commits whose requests or answers are lost: who tries again gets what he wanted, once."""
    url = new_volume(postgres_server.fresh_url(), str(tmp_path / "store"))

    async def main() -> None:
        with Proxy(postgres_server.port) as proxy, trio.fail_after(110):

            def chaos() -> None:
                choice = rng.random()
                if choice < 0.5:
                    proxy.cut_at(b"COMMIT", forward=choice < 0.35)
                elif choice < 0.55:
                    proxy.cut()

            flaky = url.replace(f":{postgres_server.port}", f":{proxy.port}")
            async with open_volume(flaky) as one, open_volume(flaky) as two:
                clients = []
                for number in range(CLIENTS):
                    volume = (one, two)[number % 2]
                    made = await volume.filesystem.mkdir(ROOT_INODE, b"%d" % number, 0o755, OWNER)
                    seed = random.Random(f"{rng.random()}")
                    clients.append(Stubborn(volume.filesystem, made.inode, seed, chaos))
                while not any(client.unknown for client in clients):
                    # In one round of ten the network is too good.
                    async with trio.open_nursery() as nursery:
                        for client in clients:
                            nursery.start_soon(client.run, steps)
                proxy.cut_at(b"nothing that is ever sent", forward=False)
            assert one.pool.used_bytes == two.pool.used_bytes == 0, "leaked buffers"
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            for client in clients:
                await client.check(volume.filesystem)

    trio.run(main)
