"""The marker's bytes: fixed for good, and no damage goes unnoticed."""

from __future__ import annotations

import pytest

from tectonic_client.chunkstore.marker import StoreMarker
from tectonic_client.errors import FormatTooNew, StoreMismatch

MARKER = StoreMarker(bytes(range(16)), 0x0102)

GOLDEN = bytes.fromhex(
    "5445435453544f52"  # TECTSTOR
    "0100" "0000"
    "000102030405060708090a0b0c0d0e0f"
    "0201" "0000"
    "33d09f64"
)  # fmt: skip


def test_golden() -> None:
    """The bytes of version 1 are those of FORMAT.md, and are understood."""
    assert MARKER.encode() == GOLDEN
    assert StoreMarker.decode(GOLDEN, "d") == MARKER


def test_any_flipped_bit_is_noticed() -> None:
    """A marker with one bit changed identifies no store."""
    for bit in range(len(GOLDEN) * 8):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((StoreMismatch, FormatTooNew), match="store d"):
            StoreMarker.decode(bytes(damaged), "d")


def test_any_other_length_is_noticed() -> None:
    """A marker that is cut short, or goes on, identifies no store."""
    for length in range(len(GOLDEN)):
        with pytest.raises(StoreMismatch, match="damaged"):
            StoreMarker.decode(GOLDEN[:length], "d")
    with pytest.raises(StoreMismatch, match="damaged"):
        StoreMarker.decode(GOLDEN + b"\0", "d")


def test_newer_version() -> None:
    """A later release's marker, whatever its length, asks for an upgrade."""
    for length in (10, len(GOLDEN), 100):
        newer = (GOLDEN[:8] + b"\2\0" + GOLDEN[10:]).ljust(length, b"\0")[:length]
        with pytest.raises(FormatTooNew, match=r"version 2.*upgrade"):
            StoreMarker.decode(newer, "d")
