"""The file system against a host directory: the same operations, results and errnos."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tectonic_client.records import Codec
from tectonic_client.volume import FormatOptions, format_volume, open_volume
from tests.filesystem.trees import HostTree, VolumeTree
from tests.leaks import assert_no_leaks, clean
from tests.postgres import PostgresServer

_numbers = itertools.count()
_names = st.sampled_from([b"a", b"b", b"c"])
_paths = st.one_of(
    st.builds(lambda a: b"/" + a, _names),
    st.builds(lambda a, b: b"/" + a + b"/" + b, _names, _names),
    st.builds(lambda a, b, c: b"/" + b"/".join((a, b, c)), _names, _names, _names),
)
_offsets = st.one_of(st.integers(0, 300), st.sampled_from([65_000, 65_536, 131_072, 400_000]))
_data = st.one_of(
    st.binary(max_size=200),
    st.integers(0, 255).map(lambda b: bytes([b]) * 70_000),
    st.integers(0, 255).map(lambda b: bytes([b, 255 - b]) * 100_000),
)
_modes = st.sampled_from([0o644, 0o600, 0o755, 0o4755, 0o1777])
_dir_modes = st.sampled_from([0o755, 0o700, 0o1777])
_operations = st.one_of(
    st.tuples(st.just("create"), _paths, _modes),
    st.tuples(st.just("mkdir"), _paths, _dir_modes),
    st.tuples(st.just("write"), _paths, _offsets, _data),
    st.tuples(st.just("append"), _paths, _data),
    st.tuples(st.just("read"), _paths, _offsets, st.integers(0, 200_000)),
    st.tuples(st.just("truncate"), _paths, _offsets),
    st.tuples(st.just("rmdir"), _paths),
    st.tuples(st.just("unlink"), _paths),
    st.tuples(st.just("rename"), _paths, _paths),
    st.tuples(st.just("link"), _paths, _paths),
    st.tuples(st.just("symlink"), st.sampled_from([b"a", b"b/c", b"/nowhere-else"]), _paths),
    st.tuples(st.just("readlink"), _paths),
    st.tuples(st.just("chmod"), _paths, _modes),
    st.tuples(st.just("utime"), _paths, st.integers(0, 2**33), st.integers(0, 2**33)),
    st.tuples(st.just("listdir"), st.one_of(_paths, st.just(b"/"))),
    st.tuples(st.just("stat"), _paths),
)


_sequences = st.lists(_operations, min_size=1, max_size=25)
_codecs = st.sampled_from([Codec.NONE, Codec.AUTO])


def _format(url: str, stores: tuple[str, ...], codec: Codec) -> str:
    options = FormatOptions(
        name="model", stores=stores, block_bytes=128 * 1024, chunk_bytes=64 * 1024, codec=codec
    )
    format_volume(url, options)
    return url


async def _play(
    url: str, host_root: Path, operations: list[tuple[object, ...]], clients: int = 1
) -> None:
    """Run the operations on both sides, by each client in turn; then another one finds nothing
    wrong."""
    async with AsyncExitStack() as stack:
        volumes = [await stack.enter_async_context(open_volume(url)) for _ in range(clients)]
        host, subjects = HostTree(host_root), [VolumeTree(v.filesystem) for v in volumes]
        for number, (name, *arguments) in enumerate(operations):
            expected = host.run(str(name), *arguments)
            found = await subjects[number % clients].run(str(name), *arguments)
            assert found == expected, f"operation {number}: {name} {arguments}"
    assert not any(volume.pool.used_bytes for volume in volumes), "leaked buffers"
    async with open_volume(url) as volume:
        await clean(volume)
        await assert_no_leaks(volume)


@given(operations=_sequences, codec=_codecs)
def test_operations_agree_with_a_host_directory(
    operations: list[tuple[object, ...]], codec: Codec
) -> None:
    """Every sequence of operations gives the same results and errnos as on the host."""
    name = f"memory://model-{next(_numbers)}"
    with tempfile.TemporaryDirectory(prefix="tectonicfs-model-") as host_root:
        url = _format(name, (f"{name}-a", f"{name}-b"), codec)
        trio.run(_play, url, Path(host_root), operations)


@given(operations=_sequences, codec=_codecs)
def test_clients_that_take_turns_agree_with_a_host_directory(
    operations: list[tuple[object, ...]], codec: Codec
) -> None:
    """What one client closed, made or renamed the next one sees: close-to-open."""
    name = f"memory://model-{next(_numbers)}"
    with tempfile.TemporaryDirectory(prefix="tectonicfs-model-") as host_root:
        url = _format(name, (f"{name}-a", f"{name}-b"), codec)
        trio.run(_play, url, Path(host_root), operations, 3)


@settings(max_examples=settings.default.max_examples // 8)
@given(operations=_sequences, codec=_codecs)
def test_the_embedded_engine_and_flash_agree_with_a_host_directory(
    operations: list[tuple[object, ...]], codec: Codec
) -> None:
    """The same with what a volume on one machine is made of."""
    with tempfile.TemporaryDirectory(prefix="tectonicfs-model-") as directory:
        base, host_root = Path(directory), Path(directory, "host")
        host_root.mkdir()
        url = _format(str(base / "meta.db"), (str(base / "a"),), codec)
        trio.run(_play, url, host_root, operations)


@settings(max_examples=settings.default.max_examples // 8)
@given(operations=_sequences, codec=_codecs)
def test_postgresql_agrees_with_a_host_directory(
    postgres_server: PostgresServer, operations: list[tuple[object, ...]], codec: Codec
) -> None:
    """The same with the engine of a cluster."""
    with tempfile.TemporaryDirectory(prefix="tectonicfs-model-") as host_root:
        store = f"memory://model-{next(_numbers)}"
        url = _format(postgres_server.fresh_url(), (store,), codec)
        trio.run(_play, url, Path(host_root), operations)
