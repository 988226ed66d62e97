"""What a client has measured so far and how busy it is at this moment, as JSON values.

Reading it waits for nothing and asks neither stores nor metadata, so that it also tells about a
client that is stuck. Durations are in seconds where the name says so, meters in nanoseconds.
"""

from __future__ import annotations

from typing import Any

import trio

from tectonic_client.blocks.stores import LaneLoad
from tectonic_client.volume import Volume


def client_stats(volume: Volume) -> dict[str, Any]:
    """Session, memory, read cache, unflushed bytes, metadata and stores of a client."""
    return {
        "volume": volume.record.name,
        "session": _session(volume),
        "memory": _memory(volume),
        "cache": _cache(volume),
        "files": _files(volume),
        "metadata": {
            "read": volume.kv.reads.measured().to_json(),
            "transaction": volume.kv.transactions.measured().to_json(),
            "retries": volume.kv.retries,
        },
        "stores": _stores(volume),
    }


def _session(volume: Volume) -> dict[str, Any]:
    beat = volume.tasks.last_heartbeat
    age_s = None if beat is None else trio.current_time() - beat
    return {"id": volume.session_id, "heartbeat_age_s": age_s}


def _memory(volume: Volume) -> dict[str, Any]:
    pool = volume.pool
    return {
        "limit_bytes": volume.options.memory_limit_bytes,
        "pool_bytes": pool.capacity_bytes,
        "used_bytes": pool.used_bytes,
        "peak_bytes": pool.peak_bytes,
        "waiting": pool.waiting,
        "waits": pool.waits.measured().to_json(),
    }


def _cache(volume: Volume) -> dict[str, Any]:
    cache = volume.cache
    return {
        "hits": cache.hits,
        "misses": cache.misses,
        "prefetches": cache.prefetches,
        "chunks": cache.chunks,
    }


def _files(volume: Volume) -> dict[str, Any]:
    files = volume.filesystem.files
    dirty = files.dirty()
    return {
        "open": files.open_inodes,
        "dirty": len(dirty),
        "dirty_bytes": sum(state.log.unflushed_bytes for state in dirty),
    }


def _stores(volume: Volume) -> dict[str, Any]:
    return {
        str(store_id): {
            "name": load.name,
            "reads": _lane(load.reads),
            "writes": _lane(load.writes),
            **{
                operation: measured.to_json()
                for operation, measured in volume.meters[store_id].measured().items()
            },
        }
        for store_id, load in volume.stores.load().items()
    }


def _lane(load: LaneLoad) -> dict[str, Any]:
    return load._asdict() | {"queue_waits": load.queue_waits.to_json()}
