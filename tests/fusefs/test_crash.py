"""A mount over a full store and damaged chunks, and its memory: nothing is lost or wrong."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.fusefs.devices import for_root, memory_device
from tests.fusefs.mounts import format_volume, mounted, tectonicfs

pytestmark = pytest.mark.fuse


@for_root
def test_a_full_store_is_enospc_and_earlier_files_stay_whole(fuse: None, tmp_path: Path) -> None:
    """The writer gets ENOSPC by write, fsync or close; what was there stays; room helps again."""
    url = str(tmp_path / "meta.db")
    with memory_device(tmp_path / "device", "8m") as device:
        tectonicfs("format", url, "--name", "small", "--store", device.path / "store",
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
