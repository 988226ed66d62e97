"""The Prometheus endpoint: what the official parser reads from it, and that it minds nobody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from fusefs.exporter import exporting, exposition
from fusefs.inspection import Inspection
from fusefs.operations import FuseOperations
from fusefs.options import MountOptions
from tectonic_client.errors import MountError
from tectonic_client.limits import MAX_SCRAPES
from tectonic_client.recorder import Recorder
from tectonic_client.volume import FormatOptions, format_volume, open_volume
from tests.fusefs.mounts import mounted, refused, tectonicfs

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _stats() -> dict[str, Any]:
    """Those of a volume with one operation of each outcome."""
    url = "memory://exporter"
    format_volume(url, FormatOptions('ex"port\\er\n'.strip(), ("memory://e-store",), force=True))
    found: dict[str, Any] = {}

    async def main() -> None:
        async with open_volume(url) as volume:
            recorder = Recorder()
            recorder.end(recorder.begin("read", 2, 0, 10), 0, 10)
            recorder.end(recorder.begin("lookup", 1), 2)
            recorder.begin("write", 3)
            await volume.filesystem.statfs()
            operations = FuseOperations(volume.filesystem, MountOptions(), recorder)
            found.update(Inspection("/mnt/x", volume, operations).stats())

    trio.run(main)
    return found


@pytest.fixture(scope="module")
def stats() -> dict[str, Any]:
    """What a mount tells, once for all tests."""
    return _stats()


def test_the_text_is_what_the_official_parser_reads(stats: dict[str, Any]) -> None:
    """Counters, labels, histograms and awkward names arrive; buckets add up."""
    found = _samples(exposition(stats).decode())
    assert found["tectonicfs_operation_bytes_total", (("operation", "read"),)] == 10
    label = (("errno", "ENOENT"), ("operation", "lookup"))
    assert found["tectonicfs_operation_errors_total", label] == 1
    assert found["tectonicfs_oldest_operation_seconds", ()] > 0
    name = "tectonicfs_operation_duration_seconds"
    assert found[f"{name}_count", (("operation", "read"),)] == 1
    assert found[f"{name}_bucket", (("le", "+Inf"), ("operation", "read"))] == 1
    label = (("operation", "usage"), ("store", "0"))
    assert found["tectonicfs_store_duration_seconds_count", label] == 1
    (info,) = (dict(key[1]) for key in found if key[0] == "tectonicfs_mount_info")
    assert info["volume"] == 'ex"port\\er'


def test_buckets_are_cumulative_and_end_with_all(stats: dict[str, Any]) -> None:
    """Each bucket holds those below it, as Prometheus wants it, also beyond the last bound."""
    buckets = [0] * 40
    buckets[3], buckets[10], buckets[39] = 5, 2, 1
    slow = {
        "calls": 8, "errors": 0, "transferred_bytes": 0, "total_ns": 7, "max_ns": 7,
        "buckets": buckets,
    }  # fmt: skip
    text = exposition(stats | {"operations": {"read": slow}}).decode()
    name = "tectonicfs_operation_duration_seconds_bucket"
    counts = [
        (float(dict(labels)["le"]), value)
        for (sample, labels), value in _samples(text).items()
        if sample == name
    ]
    assert counts == sorted(counts)
    assert counts[0] == (16e-6, 5)
    assert dict(counts)[1.024e-3] == 7
    assert (counts[-2][1], counts[-1]) == (7, (float("inf"), 8))


# --- HTTP -------------------------------------------------------------------------------------


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


async def _fetch(address: tuple[str, int], request: bytes) -> bytes:
    stream = await trio.open_tcp_stream(*address)
    received = b""
    async with stream:
        await stream.send_all(request)
        await stream.send_eof()
        async for part in stream:
            received += part
    return received


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"GET\r\n\r\n", b"400"),
        (b"\0\xff\r\n\r\n", b"400"),
        (b"x" * 100_000, b"400"),
        (b"GET /metrics HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
def test_every_request_gets_its_answer(
    stats: dict[str, Any], request_bytes: bytes, status: bytes
) -> None:
    """GET /metrics is answered, whatever the headers; anything else gets an error or nothing."""

    async def main() -> None:
        async with exporting("127.0.0.1", 0, lambda: stats) as address:
            try:
                reply = await _fetch(address, request_bytes)
            except trio.BrokenResourceError:  # closed while there was more to be sent
                assert len(request_bytes) > 8192
            else:
                assert reply[9:12] == status
                head, _, body = reply.partition(b"\r\n\r\n")
                assert not head or b"Content-Length: %d\r\n" % len(body) in head
            good = await _fetch(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"tectonicfs_uptime_seconds" in good

    trio.run(main)


def test_idle_connections_do_not_keep_others_out(
    stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that send nothing are closed at the timeout, and the next ones are served."""
    monkeypatch.setattr("fusefs.exporter.SCRAPE_TIMEOUT_S", 0.2)

    async def main() -> None:
        async with exporting("127.0.0.1", 0, lambda: stats) as address:
            idle = [await trio.open_tcp_stream(*address) for _ in range(2 * MAX_SCRAPES)]
            with trio.fail_after(30):
                assert b"200 OK" in await _fetch(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            for stream in idle:
                await stream.aclose()

    trio.run(main)


def test_an_address_that_is_taken_is_one_clear_error(stats: dict[str, Any]) -> None:
    """Who asks for a port that somebody else has, or for a host that is not here, is told."""

    async def main() -> None:
        async with exporting("127.0.0.1", 0, lambda: stats) as (host, port):
            with pytest.raises(MountError, match=f"cannot serve metrics at {host} port {port}"):
                async with exporting(host, port, lambda: stats):
                    pass
        with pytest.raises(MountError, match=r"cannot serve metrics at 192\.0\.2\.1"):
            async with exporting("192.0.2.1", 9, lambda: stats):
                pass

    trio.run(main)


@pytest.mark.fuse
@pytest.mark.usefixtures("fuse")
def test_a_mount_is_scraped(volume: str, tmp_path: Path) -> None:
    """-o metrics=PORT serves a real mount's figures; a second mount at that port is refused with
    one line and is not there."""
    with _free_port() as port:
        pass
    with mounted(volume, tmp_path / "mnt", f"metrics={port}") as mount:
        (mount.path / "f").write_bytes(bytes(100_000))
        text = trio.run(_fetch, ("127.0.0.1", port), b"GET /metrics HTTP/1.1\r\n\r\n").decode()
        found = _samples(text.partition("\r\n\r\n")[2])
        assert found["tectonicfs_operation_bytes_total", (("operation", "write"),)] == 100_000
        label = (("operation", "put"), ("store", "0"))
        assert found["tectonicfs_store_bytes_total", label] > 100_000
        (tmp_path / "two").mkdir()
        options = f"metrics={port},log_file={tmp_path}/two.log"
        said = refused("mount", volume, tmp_path / "two", "-o", options)
        assert f"cannot serve metrics at 127.0.0.1 port {port}: Address already in use" in said
        tectonicfs("umount", mount.path)
