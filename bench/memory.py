"""Memory of a process: what is resident, and its peak since it was last reset. Bytes."""

from __future__ import annotations

from pathlib import Path

from tectonic_client.limits import KiB


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set."""
    return _field(pid, "VmRSS")


def peak_resident_bytes(pid: int | str = "self") -> int:
    """Largest resident set since `reset_peak`."""
    return _field(pid, "VmHWM")


def reset_peak(pid: int | str = "self") -> None:
    """Let the peak start at what is resident now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) * KiB
    raise AssertionError(f"/proc/{pid}/status has no {name}")
