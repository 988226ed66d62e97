"""`tectonicfs format` and `tectonicfs status`."""

from __future__ import annotations

import time
import uuid

import click
from rich.table import Table

from tectonic_client.cli.parameters import Compression, Size, format_size, plain_console, print_json
from tectonic_client.limits import DEFAULT_BLOCK_BYTES, DEFAULT_CHUNK_BYTES
from tectonic_client.metadata.sessions import describe
from tectonic_client.records import Codec
from tectonic_client.volume import FormatOptions, VolumeStatus, format_volume, volume_status


@click.command("format")
@click.argument("meta_url")
@click.option("--name", required=True, help="Name of the volume; mounts show it.")
@click.option(
    "--store",
    "stores",
    multiple=True,
    required=True,
    metavar="URL",
    help="Chunk store: a directory, one per device. Repeat for several.",
)
@click.option(
    "--block-size",
    type=Size(),
    default=DEFAULT_BLOCK_BYTES,
    help="Size of a block, a multiple of the chunk size.  [default: 64MiB]",
)
@click.option(
    "--chunk-size",
    type=Size(),
    default=DEFAULT_CHUNK_BYTES,
    help="Size of a chunk, the unit that a store keeps.  [default: 8MiB]",
)
@click.option(
    "--compression",
    type=Compression(),
    default="none",
    help="none; zstd; or auto: zstd, but skip what does not compress.  [default: none]",
)
@click.option("--force", is_flag=True, help="Destroy a volume that is there already.")
def format_command(
    meta_url: str, *, name: str, stores: tuple[str, ...], block_size: int, chunk_size: int,
    compression: tuple[Codec, int], force: bool,
) -> None:  # fmt: skip
    """Create a volume at META_URL with its chunks in the given stores.

    \b
    Example:
      tectonicfs format /data/meta.db --name training --store /nvme0/chunks --store /nvme1/chunks
    """
    codec, level = compression
    options = FormatOptions(name, stores, block_size, chunk_size, codec, level, force)
    record = format_volume(meta_url, options)
    click.echo(f"volume {record.name!r} created ({uuid.UUID(bytes=record.uuid)})")


@click.command()
@click.argument("meta_url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(meta_url: str, *, as_json: bool) -> None:
    """Show a volume's settings, stores and clients."""
    found = volume_status(meta_url)
    if as_json:
        print_json(_as_dict(found))
    else:
        _print_tables(found)


def _compression(found: VolumeStatus) -> str:
    codec = found.volume.codec
    return "none" if codec is Codec.NONE else f"{codec.name.lower()}:{found.volume.level}"


def _as_dict(found: VolumeStatus) -> dict[str, object]:
    volume = found.volume
    return {
        "name": volume.name,
        "uuid": str(uuid.UUID(bytes=volume.uuid)),
        "format_version": volume.format_version,
        "created_ns": volume.created_ns,
        "block_bytes": volume.block_bytes,
        "chunk_bytes": volume.chunk_bytes,
        "compression": _compression(found),
        "encoding": volume.encoding.name.lower(),
        "stores": [
            {
                "id": store.record.store_id,
                "url": store.record.url,
                "state": store.record.state.name.lower(),
                "total_bytes": store.total_bytes,
                "free_bytes": store.free_bytes,
                "problem": store.problem,
            }
            for store in found.stores
        ],
        "sessions": [
            {
                "client": session.client,
                "hostname": session.hostname,
                "pid": session.pid,
                "started_ns": session.started_ns,
                "heartbeat_ns": session.heartbeat_ns,
            }
            for session in found.sessions
        ],
    }


def _print_tables(found: VolumeStatus) -> None:
    volume, console = found.volume, plain_console()
    facts = Table.grid(padding=(0, 2))
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(volume.created_ns / 1e9))
    for label, value in (
        ("volume", volume.name),
        ("uuid", str(uuid.UUID(bytes=volume.uuid))),
        ("created", created),
        ("block size", format_size(volume.block_bytes)),
        ("chunk size", format_size(volume.chunk_bytes)),
        ("compression", _compression(found)),
        ("encoding", volume.encoding.name.lower()),
    ):
        facts.add_row(label, value)
    console.print(facts)
    stores = Table("store", "state", "free", "size", box=None, padding=(0, 2))
    for text in ("url", "problem"):  # whole: who reads them wants to go there
        stores.add_column(text, overflow="fold")
    for store in found.stores:
        stores.add_row(
            str(store.record.store_id), store.record.state.name.lower(),
            format_size(store.free_bytes), format_size(store.total_bytes), store.record.url,
            store.problem or "",
        )  # fmt: skip
    console.print(stores)
    for session in found.sessions:
        age = time.time() - session.heartbeat_ns / 1e9
        console.print(f"client {describe(session)}, last seen {age:.0f} s ago")
