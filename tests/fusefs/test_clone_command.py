"""`tectonicfs clone` and quotas, seen through a mount."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.fusefs.mounts import format_volume, mounted, refused, tectonicfs

pytestmark = pytest.mark.fuse


def test_a_tree_is_cloned_by_its_mounted_path(tmp_path: Path) -> None:
    """The clone is there at once, equal, and goes its own way; the report counts it."""
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        source = mount.path / "source"
        (source / "inner").mkdir(parents=True)
        (source / "inner" / "file").write_bytes(os.urandom(300_000))
        (source / "link").symlink_to("inner/file")
        target = mount.path / "target"
        said = tectonicfs("clone", source, target, "--json").stdout
        counts = {"files": 1, "directories": 2, "others": 1, "bytes": 300_000}
        assert json.loads(said) == counts
        subprocess.run(["diff", "-r", "--no-dereference", source, target], check=True)
        with open(target / "inner" / "file", "r+b") as file:
            file.write(b"changed")
        assert (source / "inner" / "file").read_bytes()[:7] != b"changed"
        assert "cloned 1 file (" in tectonicfs("clone", source / "inner", target / "again").stdout
        tectonicfs("clone", "--volume", url, "/source/link", "/link")
        assert os.readlink(mount.path / "link") == "inner/file"


def test_what_is_refused(tmp_path: Path) -> None:
    """A target that exists, a source that does not, paths outside of a mount or in two volumes, a
    directory into itself: one line each."""
    volumes = [tmp_path / "one", tmp_path / "two"]
    for base in volumes:
        base.mkdir()
    urls = [format_volume(base) for base in volumes]
    with mounted(urls[0], volumes[0] / "mnt") as one, mounted(urls[1], volumes[1] / "mnt") as two:
        source = one.path / "source"
        source.mkdir()
        assert "exists" in refused("clone", source, source)
        for missing, target in (
            (one.path / "nothing", one.path / "copy"),
            (one.path / "no directory", one.path / "no directory" / "copy"),
        ):
            line = refused("clone", source if missing == target.parent else missing, target)
            assert f"{missing}: no such file or directory" in line
        line = refused("clone", source, tmp_path / "copy")
        assert f"{tmp_path / 'copy'} is not below a mount" in line
        assert "--volume META_URL" in line
        assert "''" in refused("clone", source, "")
        assert "two volumes" in refused("clone", source, two.path / "copy")
        assert "cloned into itself" in refused("clone", source, source / "copy")
        assert os.listdir(one.path) == ["source"]


def test_a_quota_through_the_kernel(tmp_path: Path) -> None:
    """Programs get EDQUOT and EXDEV, so that mv(1) copies into another quota."""
    url = format_volume(tmp_path)
    with mounted(url, tmp_path / "mnt") as mount:
        home = mount.path / "home"
        home.mkdir()
        (mount.path / "outside").write_bytes(bytes(1000))
        tectonicfs("quota", "set", url, "/home", "--bytes", "100000", "--inodes", "4")
        (home / "file").write_bytes(bytes(60_000))
        with pytest.raises(OSError, match=f"Errno {errno.EDQUOT}"):
            (home / "more").write_bytes(bytes(60_000))
        with pytest.raises(OSError, match=f"Errno {errno.EXDEV}"):
            os.rename(mount.path / "outside", home / "inside")
        subprocess.run(["mv", mount.path / "outside", home / "inside"], check=True)
        with pytest.raises(OSError, match=f"Errno {errno.EDQUOT}"):
            os.mkdir(home / "directory")
        used = json.loads(tectonicfs("quota", "show", url, "/home", "--json").stdout)["quotas"][0]
        assert (used["used_bytes"], used["used_inodes"]) == (61_000, 4)
