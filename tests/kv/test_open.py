"""Metadata URLs: every form opens what it names, everything else is refused with the forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tectonic_client.errors import BadURL, ReadOnly, VolumeNotFound
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.open import display_url, open_kv
from tectonic_client.kv.sqlite import SqliteKV
from tests.contracts.kv import get, increment


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, relative or absolute, and sqlite:// with three or four slashes name the same file."""
    monkeypatch.chdir(tmp_path)
    urls = [
        "a b%",
        f"{tmp_path}/a b%",
        f"sqlite://{tmp_path}/a%20b%25",
        f"sqlite:///{tmp_path}/a b%25",
    ]
    for count, url in enumerate(urls, start=1):
        kv = open_kv(url, create=count == 1)
        assert isinstance(kv, SqliteKV)
        assert kv.transact(increment) == count
        kv.close()


def test_memory() -> None:
    """memory://NAME is one engine per name and process, which outlives its clients."""
    with pytest.raises(VolumeNotFound, match="memory://test-open"):
        open_kv("memory://test-open")
    first = open_kv("memory://test-open", create=True)
    assert isinstance(first, MemoryKV)
    first.transact(increment)
    first.close()
    assert get(open_kv("memory://test-open"), b"count") == b"1"
    assert get(open_kv("memory://test-open", create=True), b"count") == b"1"
    assert get(open_kv("memory://test-open-2", create=True), b"count") is None


@pytest.mark.parametrize("url", ["memory://test-read-only", "{tmp_path}/meta.db"])
def test_read_only(tmp_path: Path, url: str) -> None:
    """read_only reaches the engine, and wins over create."""
    url = url.format(tmp_path=tmp_path)
    open_kv(url, create=True).close()
    kv = open_kv(url, create=True, read_only=True)
    with pytest.raises(ReadOnly):
        kv.transact(increment)
    kv.close()


@pytest.mark.parametrize(
    "url",
    ["", "mysql://host/db", "://", "sqlite://relative", "sqlite:///", "sqlite:////", "s3://b"],
)
def test_refused(url: str) -> None:
    """Any other URL is BadURL, and the message names a form to use."""
    with pytest.raises(BadURL, match=r"sqlite:///PATH"):
        open_kv(url, create=True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/a/b:c@d", "/a/b:c@d"),
        ("sqlite:///a", "sqlite:///a"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://u@h:5432/d?schema=s", "postgresql://u@h:5432/d?schema=s"),
        ("postgresql://u:secret@h/d", "postgresql://u:***@h/d"),
        ("postgres://u:sec/ret?x@y@h/d", "postgres://u:***@h/d"),
        ("postgresql://u:@h/d", "postgresql://u:***@h/d"),
        (
            "postgresql:///d?user=u&password=secret&schema=s&sslpassword=secret",
            "postgresql:///d?user=u&password=***&schema=s&sslpassword=***",
        ),
        ("postgresql:///d?p%61ssword=secret", "postgresql:///d?p%61ssword=***"),
    ],
)
def test_display_url(url: str, shown: str) -> None:
    """A URL is shown without its password, wherever it stands, even if it is malformed."""
    assert display_url(url) == shown
