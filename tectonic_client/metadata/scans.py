"""Scans of a whole layer, page by page. Functions over a transaction."""

from __future__ import annotations

from collections.abc import Iterator

from tectonic_client.kv.port import ReadTransaction
from tectonic_client.limits import SCAN_PAGE_ROWS
from tectonic_client.metadata import keys


def scan_layer(tx: ReadTransaction, layer: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
    """All pairs of a layer in key order, at most SCAN_PAGE_ROWS in memory at once."""
    start, end = layer, keys.prefix_end(layer)
    while rows := tx.scan(start, end, limit=SCAN_PAGE_ROWS):
        yield rows
        start = rows[-1][0] + b"\x00"
