"""A mount under SIGKILL, a full store and damaged chunks: nothing acknowledged is lost or wrong."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fusefs.mounts import format_volume, mounted, tectonicfs

pytestmark = pytest.mark.fuse


class Acknowledged:
    """What a writer was told is safe: content per file after the last fsync that returned."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.attempted: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.rounds = 0


def _write_until_the_mount_dies(root: Path, seed: int, acknowledged: Acknowledged) -> None:
    """Create, append, overwrite, rename and remove; note each promise when it has been given."""
    rng = random.Random(seed)
    try:
        while True:
            name = f"{seed}-{rng.randrange(6)}"
            _one_round(root, name, rng, acknowledged)
            acknowledged.rounds += 1
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            raise


def _one_round(root: Path, name: str, rng: random.Random, acknowledged: Acknowledged) -> None:
    before = acknowledged.files.get(name, b"")
    data = rng.randbytes(rng.choice([100, 5_000, 200_000]))
    offset = rng.randrange(len(before) + 1)
    after = before[:offset] + data + before[offset + len(data) :]
    acknowledged.attempted[name] = after
    descriptor = os.open(root / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, offset)
        if rng.random() < 0.7:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    acknowledged.files[name] = after


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sigkill_of_the_daemon_loses_nothing_that_was_acknowledged(
    fuse: None, tmp_path: Path, seed: int
) -> None:
    """After kill -9 under load each file is as its last close or fsync left it, or as the one that
    was under way would have; nothing else is visible."""
    url = format_volume(tmp_path)
    writers = [Acknowledged() for _ in range(3)]
    with mounted(url, tmp_path / "mnt") as mount:
        threads = [
            threading.Thread(target=_write_until_the_mount_dies, args=(mount.path, n, writer))
            for n, writer in enumerate(writers)
        ]
        for thread in threads:
            thread.start()
        goal = random.Random(seed).randrange(20, 120)
        while sum(writer.rounds for writer in writers) < goal:
            assert all(thread.is_alive() for thread in threads)
            threads[0].join(0.01)
        signal.pidfd_send_signal(mount.lives, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        mount.wait_gone()
        tectonicfs("umount", mount.path)
    expected = {name for writer in writers for name in writer.files}
    attempted = {name for writer in writers for name in writer.attempted}
    with mounted(url, tmp_path / "mnt") as mount:
        assert expected <= set(os.listdir(mount.path)) <= attempted
        for writer in writers:
            for name, data in writer.files.items():
                found = (mount.path / name).read_bytes()
                assert found in (data, writer.attempted[name]), name
        tectonicfs("umount", mount.path)


@contextmanager
def _small_device(path: Path, size: str) -> Iterator[Path]:
    """A file system of that size, mounted at `path`."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small device")
def test_a_full_store_is_enospc_and_earlier_files_stay_whole(fuse: None, tmp_path: Path) -> None:
    """The writer gets ENOSPC by write, fsync or close; what was there stays; room helps again."""
    url = str(tmp_path / "meta.db")
    with _small_device(tmp_path / "device", "8m") as device:
        tectonicfs("format", url, "--name", "small", "--store", device / "store",
                   "--chunk-size", "256KiB", "--block-size", "1MiB")  # fmt: skip
        with mounted(url, tmp_path / "mnt") as mount:
            kept = os.urandom(2_000_000)
            (mount.path / "kept").write_bytes(kept)
            with pytest.raises(OSError, match="No space left") as caught:
                (mount.path / "big").write_bytes(os.urandom(16_000_000))
            assert caught.value.errno == errno.ENOSPC
            assert (mount.path / "kept").read_bytes() == kept
            os.unlink(mount.path / "big")
            (mount.path / "after").write_bytes(kept)
            assert (mount.path / "after").read_bytes() == kept
            tectonicfs("umount", mount.path)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_chunk_is_eio_and_named_in_the_log(
    fuse: None, tmp_path: Path, damage: str
) -> None:
    """Reading it is EIO; the log names file, block and store; other files are fine."""
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        (mount.path / "victim").write_bytes(os.urandom(150_000))
        chunks = set((tmp_path / "store" / "chunks").rglob("*.0000"))
        (mount.path / "other").write_bytes(b"fine")
        tectonicfs("umount", mount.path)
    (chunk,) = chunks
    if damage == "flip":
        data = bytearray(chunk.read_bytes())
        data[4096 + 40_000] ^= 1
        chunk.write_bytes(data)
    elif damage == "truncate":
        os.truncate(chunk, 8192)
    else:
        chunk.unlink()
    with mounted(url, tmp_path / "mnt") as mount:
        with pytest.raises(OSError, match="Input/output error"):
            (mount.path / "victim").read_bytes()
        assert (mount.path / "other").read_bytes() == b"fine"
        tectonicfs("umount", mount.path)
        log = mount.log_file.read_text()
    assert "/victim" in log
    assert chunk.name.partition(".")[0] in log
    assert str(tmp_path / "store") in log


def _reset_peak(pid: int) -> int:
    """Start measuring the peak of resident memory anew; returns what is resident, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may reset the peak")
def test_eight_writers_at_once_stay_inside_the_memory_limit(fuse: None, tmp_path: Path) -> None:
    """The daemon's memory grows by less than its limit, whatever eight writers do."""
    url = str(tmp_path / "meta.db")
    tectonicfs("format", url, "--name", "memory", "--store", tmp_path / "store")
    with mounted(url, tmp_path / "mnt", "memory_limit=128MiB") as mount:
        before = _reset_peak(mount.pid)

        def write(number: int) -> None:
            block = os.urandom(1 << 20)
            with open(mount.path / str(number), "wb", buffering=0) as file:
                for _ in range(64):
                    file.write(block)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _status(mount.pid, "VmHWM") - before < 128 << 20
        for number in range(8):
            assert (mount.path / str(number)).stat().st_size == 64 << 20
            os.unlink(mount.path / str(number))
        tectonicfs("umount", mount.path)
