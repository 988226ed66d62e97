"""`tectonicfs quota`: what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tectonic_client.blocking import BlockingVolume
from tectonic_client.cli.quota import quota
from tectonic_client.errors import InvalidArgument, NotFound, TectonicError
from tectonic_client.types import ROOT_INODE, Owner
from tests.filesystem.faultrig import new_volume


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A volume with /home/ann and /home/bob."""
    url = new_volume(str(tmp_path / "meta.db"), str(tmp_path / "store"))
    owner = Owner(0, 0)
    with BlockingVolume(url) as volume:
        home = volume.run(lambda v: v.filesystem.mkdir(ROOT_INODE, b"home", 0o755, owner)).inode
        for name in (b"ann", b"bob"):
            volume.run(lambda v, name=name: v.filesystem.mkdir(home, name, 0o755, owner))
    return url


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(quota, arguments)


def _said(*arguments: str) -> str:
    result = _run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def _refused(kind: type[TectonicError], *arguments: str) -> str:
    error = _run(*arguments).exception
    assert isinstance(error, kind)
    return str(error)


def test_set_show_ls_rm(url: str) -> None:
    """A quota is set, changed, shown from below, listed with others and removed."""
    assert "5.0 GiB" in _said("set", url, "/home/ann", "--bytes", "5GiB")
    _said("set", url, "/home/ann", "--inodes", "100")
    _said("set", url, "/home/bob", "--inodes", "7")
    shown = json.loads(_said("show", url, "/home/ann", "--json"))["quotas"]
    expected = {"max_bytes": 5 * 2**30, "max_inodes": 100, "used_bytes": 0, "used_inodes": 1}
    assert [{key: row[key] for key in expected} for row in shown] == [expected]
    assert shown[0]["path"] == "/home/ann"
    rows = json.loads(_said("ls", url, "--json"))["quotas"]
    assert [row["path"] for row in rows] == ["/home/ann", "/home/bob"]
    assert _said("ls", url).count("/home/") == 2
    _said("rm", url, "/home/ann")
    assert "/home/ann" not in _said("ls", url)


def test_what_is_refused(url: str) -> None:
    """No limit at all, no such directory, a quota in a quota, none to show or remove."""
    result = _run("set", url, "/home/ann")
    assert result.exit_code == 2
    assert "--bytes" in result.stderr
    for command in (("set", "--inodes", "1"), ("rm",), ("show",)):
        said = _refused(NotFound, command[0], url, "/nowhere", *command[1:])
        assert "no directory /nowhere in the volume" in said
    _said("set", url, "/home", "--inodes", "10")
    assert "within" in _refused(InvalidArgument, "set", url, "/home/ann", "--inodes", "1")
    _said("rm", url, "/home")
    for command in ("rm", "show"):
        assert "no quota" in _refused(NotFound, command, url, "/home")
