"""The superblock and the list of stores. Functions over a transaction."""

from __future__ import annotations

from tectonic_client.errors import FormatTooNew, VolumeNotFound
from tectonic_client.kv.port import ReadTransaction, Transaction
from tectonic_client.limits import SCAN_PAGE_ROWS
from tectonic_client.metadata import keys
from tectonic_client.records import FORMAT_VERSION, StoreRecord, VolumeRecord


def read_volume(tx: ReadTransaction, url: str) -> VolumeRecord:
    """The superblock. Raises VolumeNotFound, FormatTooNew, CorruptRecord; `url` is for messages."""
    data = tx.get(keys.VOLUME)
    if data is None:
        raise VolumeNotFound(f"no volume at {url}: create one with `tectonicfs format`")
    record = VolumeRecord.decode(data)
    if record.format_version > FORMAT_VERSION:
        raise FormatTooNew(
            f"volume {record.name!r} has format {record.format_version}, this release knows"
            f" {FORMAT_VERSION}: upgrade tectonicfs"
        )
    return record


def read_stores(tx: ReadTransaction) -> list[StoreRecord]:
    """All stores of the volume in the order of their ids."""
    rows = tx.scan(keys.STORES, keys.prefix_end(keys.STORES), limit=SCAN_PAGE_ROWS)
    return [StoreRecord.decode(value) for _, value in rows]


def write_volume(tx: Transaction, volume: VolumeRecord, stores: list[StoreRecord]) -> None:
    """Make a volume of an engine without one."""
    tx.put(keys.VOLUME, volume.encode())
    for store in stores:
        tx.put(keys.store(store.store_id), store.encode())
