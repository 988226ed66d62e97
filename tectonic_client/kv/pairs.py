"""What every engine demands of a key and a value, so that none accepts what another refuses."""

from __future__ import annotations

from tectonic_client.limits import MAX_KEY_BYTES, MAX_VALUE_BYTES


def check_pair(key: bytes, value: bytes) -> None:
    """Raise ValueError where the pair is larger than an engine must accept."""
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes; at most {MAX_KEY_BYTES}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"value of {len(value)} bytes; at most {MAX_VALUE_BYTES}")
