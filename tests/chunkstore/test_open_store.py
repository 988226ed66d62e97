"""Store URLs: what they mean, what is refused, and that a store knows its volume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tectonic_client.chunkstore.open import initialise_store, normalise_store_url, open_store
from tectonic_client.errors import BadURL, ReadOnly, StoreMismatch
from tectonic_client.records import StoreRecord, StoreState
from tests.contracts.chunkstore import KEY, PAGE, filled, read

UUID, OTHER_UUID = bytes(16), bytes(15) + b"\1"


def record(url: str, store_id: int = 0) -> StoreRecord:
    return StoreRecord(store_id, StoreState.ACTIVE, 100, url, "domain")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/a/b", "/a/b"),
        ("/a//b/../c/", "/a/c"),
        ("file:///a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
        ("/a%20b", "/a%20b"),
        ("/a?b#c", "/a?b#c"),
        ("file:///a%FFb", "/a\udcffb"),
        ("memory://name", "memory://name"),
        ("memory://a/b", "memory://a/b"),
    ],
)
def test_normalised(url: str, expected: str) -> None:
    """Each accepted form has one normal form, which is its own."""
    assert normalise_store_url(url) == expected
    assert normalise_store_url(expected) == expected


def test_relative_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path is recorded absolute, so that it means the same from anywhere."""
    monkeypatch.chdir(tmp_path)
    assert normalise_store_url("a/b") == str(tmp_path / "a/b")
    assert normalise_store_url("./c") == str(tmp_path / "c")


@pytest.mark.parametrize(
    "url",
    ["", "file://", "file://host/path", "file://relative", "memory://", "ftp://x/y", "http://[x"],
)
def test_refused(url: str) -> None:
    """What is no store URL is refused with the forms that are."""
    with pytest.raises(BadURL, match="file:///PATH and memory://NAME"):
        normalise_store_url(url)


@pytest.fixture(params=["directory", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "s") if request.param == "directory" else f"memory://{tmp_path}"


def test_round_trip(url: str) -> None:
    """What was put is there when the store is opened again."""
    initialise_store(url, UUID, 0)
    store = open_store(record(url), UUID)
    store.put(KEY, [filled(PAGE)])
    store.close()
    again = open_store(record(url), UUID)
    assert again.name == url
    assert read(again, KEY) == filled(PAGE)
    again.close()


def test_unknown_store(url: str) -> None:
    """A store that was never initialised is refused, not taken for an empty one."""
    with pytest.raises(StoreMismatch):
        open_store(record(url), UUID)


def test_store_of_another_volume(url: str) -> None:
    """A store of another volume, or another of this one, is refused, naming both."""
    initialise_store(url, UUID, 3)
    for uuid, store_id in ((OTHER_UUID, 3), (UUID, 4)):
        with pytest.raises(StoreMismatch) as raised:
            open_store(record(url, store_id), uuid)
        for part in (url, "store 3", f"store {store_id}", UUID.hex(), uuid.hex()):
            assert part in str(raised.value)


def test_initialising_twice(url: str) -> None:
    """A store in use is only given to another volume, emptied, when forced."""
    initialise_store(url, UUID, 0)
    store = open_store(record(url), UUID)
    store.put(KEY, [filled(PAGE)])
    store.close()
    with pytest.raises(StoreMismatch, match="--force"):
        initialise_store(url, OTHER_UUID, 1)
    kept = open_store(record(url), UUID)
    assert kept.head(KEY) == PAGE
    kept.close()
    initialise_store(url, OTHER_UUID, 1, force=True)
    taken = open_store(record(url, 1), OTHER_UUID)
    assert list(taken.list(0, 2**64)) == []
    taken.close()
    with pytest.raises(StoreMismatch):
        open_store(record(url), UUID)


def test_read_only(url: str) -> None:
    """read_only reaches the store."""
    initialise_store(url, UUID, 0)
    store = open_store(record(url), UUID, read_only=True)
    with pytest.raises(ReadOnly):
        store.put(KEY, [filled(PAGE)])
    store.close()
