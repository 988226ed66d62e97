"""Checksums per unit."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.encoding.checksum import checksums, first_bad_unit, unit_count
from tectonic_client.limits import CHECKSUM_UNIT_BYTES, KiB


def crc32c_by_definition(data: bytes) -> int:
    """RFC 3720: reflected polynomial 0x82F63B78, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_checksums_are_crc32c_of_each_unit() -> None:
    """Each unit has a CRC32C of its own, the last one of what is left; little-endian."""
    data = bytes(CHECKSUM_UNIT_BYTES) + b"123456789"
    # 0xE3069283 is the check value of CRC-32C in the catalogues.
    assert crc32c_by_definition(b"123456789") == 0xE3069283
    expected = struct.pack("<II", crc32c_by_definition(bytes(CHECKSUM_UNIT_BYTES)), 0xE3069283)
    assert checksums(memoryview(data)) == expected
    assert checksums(memoryview(b"")) == b""


@given(
    length=st.integers(1, 3 * CHECKSUM_UNIT_BYTES),
    bit=st.integers(0, 24 * CHECKSUM_UNIT_BYTES - 1),
)
def test_a_flipped_bit_is_found_in_its_unit(length: int, bit: int) -> None:
    """Any flipped bit is reported with the index of its unit, and only then."""
    data = bytearray(length)
    expected = checksums(memoryview(data))
    assert len(expected) == 4 * unit_count(length)
    assert first_bad_unit(memoryview(data), expected) is None
    bit %= 8 * length
    data[bit // 8] ^= 1 << bit % 8
    assert first_bad_unit(memoryview(data), expected) == bit // 8 // CHECKSUM_UNIT_BYTES


def test_data_of_another_length_is_never_right() -> None:
    """Checksums of more or of fewer units than there are do not match."""
    data = memoryview(bytes(100 * KiB))
    expected = checksums(data)
    assert first_bad_unit(data, expected[:4]) == 1
    assert first_bad_unit(data[: 64 * KiB], expected) == 1
