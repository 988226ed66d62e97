"""The file system against a host directory: the same operations, results and errnos."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import trio
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.records import Codec
from tectonic_client.volume import FormatOptions, format_volume, open_volume
from tests.filesystem.trees import HostTree, VolumeTree

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


def _format(codec: Codec) -> str:
    number = next(_numbers)
    url = f"memory://model-{number}"
    format_volume(
        url,
        FormatOptions(
            name="model",
            stores=(f"memory://model-{number}-a", f"memory://model-{number}-b"),
            block_bytes=128 * 1024,
            chunk_bytes=64 * 1024,
            codec=codec,
        ),
    )
    return url


@given(
    operations=st.lists(_operations, min_size=1, max_size=25),
    codec=st.sampled_from([Codec.NONE, Codec.AUTO]),
)
def test_operations_agree_with_a_host_directory(
    operations: list[tuple[object, ...]], codec: Codec
) -> None:
    """Every sequence of operations gives the same results and errnos as on the host."""
    host_root = Path(tempfile.mkdtemp(prefix="tectonicfs-model-"))

    async def play() -> None:
        async with open_volume(_format(codec)) as volume:
            host, subject = HostTree(host_root), VolumeTree(volume.filesystem)
            for number, (name, *arguments) in enumerate(operations):
                expected = host.run(str(name), *arguments)
                found = await subject.run(str(name), *arguments)
                assert found == expected, f"operation {number}: {name} {arguments}"
            await volume.filesystem.sync()
            volume.cache.clear()
            assert volume.pool.used_bytes == 0, "leaked buffers"

    try:
        trio.run(play)
    finally:
        shutil.rmtree(host_root)
