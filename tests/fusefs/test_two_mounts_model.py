"""Two mounts of one volume against a model: random steps on both, what each must see of the other.

Everywhere: who opens a file sees what was closed or synced before, on whichever mount, and whether
the name is there at all. Below push directories, also without opening: names, attributes, listings
and the content of what is open. A file has one writer at a time; what others see between its writes
and its fsync or close is left open, as the promise does.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.fusefs.pairs import PLAIN, PUSH, Pair
from tests.fusefs.posixcalls import pattern

pytestmark = pytest.mark.fuse

_numbers = itertools.count()

_NAMES = ["a", "b", "d/a", "d/b"]

_LABEL = "user.label"

sides = st.sampled_from([0, 1])
names = st.sampled_from(_NAMES)
slots = st.sampled_from([0, 1])
sizes = st.sampled_from([0, 1, 100, 4096, 70_000, 300_000])
offsets = st.sampled_from([0, 1, 4095, 65_536, 262_144])


class _File:
    """What an inode holds. `writer` is the slot of those who have it open for writing."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.mode = 0o644
        self.label: bytes | None = None
        self.links = 1
        self.writer: tuple[int, int] | None = None
        self.in_doubt = False
        """The writer has written since its last fsync."""


class _Open:
    """A descriptor of one of the mounts."""

    def __init__(self, descriptor: int, file: _File) -> None:
        self.descriptor = descriptor
        self.file = file


class _TwoMounts(RuleBasedStateMachine):
    """`tops` is a new directory, as each mount sees it; `pushes` says that it has the policy."""

    def __init__(self, tops: tuple[Path, Path], pushes: bool) -> None:
        super().__init__()
        self.tops = tops
        self.pushes = pushes
        self.names: dict[str, _File] = {}
        self.writers: dict[tuple[int, int], _Open] = {}
        self.readers: dict[tuple[int, int], _Open] = {}
        (tops[0] / "d").mkdir()

    def teardown(self) -> None:
        for opened in (*self.writers.values(), *self.readers.values()):
            os.close(opened.descriptor)

    # --- writing --------------------------------------------------------------------------------

    @rule(side=sides, name=names, size=sizes)
    def replace_content(self, side: int, name: str, size: int) -> None:
        """open with O_TRUNC, write, close."""
        file = self.names.get(name) or _File()
        if file.writer is None:
            data = pattern(next(_numbers), size)
            (self.tops[side] / name).write_bytes(data)
            file.content[:] = data
            self.names[name] = file

    @rule(side=sides, name=names, size=sizes)
    def replace_file(self, side: int, name: str, size: int) -> None:
        """The way editors save: a new file renamed over the name."""
        new, data = self.tops[side] / f"new-{next(_numbers)}", pattern(next(_numbers), size)
        new.write_bytes(data)
        new.rename(self.tops[side] / name)
        self._drop(name)
        self.names[name] = _File()
        self.names[name].content[:] = data

    @rule(side=sides, slot=slots, name=names, flags=st.sampled_from([os.O_RDWR, os.O_WRONLY]))
    def begin_writing(self, side: int, slot: int, name: str, flags: int) -> None:
        """A descriptor that stays open; of a new file too."""
        file = self.names.get(name) or _File()
        if (side, slot) not in self.writers and file.writer is None:
            descriptor = os.open(self.tops[side] / name, flags | os.O_CREAT, 0o644)
            self.writers[side, slot] = _Open(descriptor, file)
            file.writer = side, slot
            self.names[name] = file

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), offset=offsets, size=sizes)
    def write(self, data: st.DataObject, offset: int, size: int) -> None:
        """Somewhere in the file, also behind its end."""
        opened = self.writers[data.draw(st.sampled_from(sorted(self.writers)))]
        new, content = pattern(next(_numbers), size), opened.file.content
        assert os.pwrite(opened.descriptor, new, offset) == size
        if size:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + size] = new
            opened.file.in_doubt = True

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), size=sizes)
    def truncate(self, data: st.DataObject, size: int) -> None:
        """What is behind the new end is gone for good."""
        opened = self.writers[data.draw(st.sampled_from(sorted(self.writers)))]
        os.ftruncate(opened.descriptor, size)
        del opened.file.content[size:]
        opened.file.content.extend(bytes(size - len(opened.file.content)))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        """From now on others see it."""
        opened = self.writers[data.draw(st.sampled_from(sorted(self.writers)))]
        os.fsync(opened.descriptor)
        opened.file.in_doubt = False

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def end_writing(self, data: st.DataObject) -> None:
        """From now on others see it."""
        opened = self.writers.pop(data.draw(st.sampled_from(sorted(self.writers))))
        os.close(opened.descriptor)
        opened.file.in_doubt, opened.file.writer = False, None

    # --- names and attributes -------------------------------------------------------------------

    def _drop(self, name: str) -> None:
        file = self.names.pop(name, None)
        if file is not None:
            file.links -= 1

    @rule(side=sides, name=names)
    def unlink(self, side: int, name: str) -> None:
        """Who has it open keeps it."""
        if name in self.names:
            (self.tops[side] / name).unlink()
            self._drop(name)

    @precondition(lambda self: self.pushes)
    @rule(side=sides, old=names, new=names)
    def rename(self, side: int, old: str, new: str) -> None:
        """Elsewhere others may find the old name for as long as they trust it."""
        if old in self.names and self.names[old] is not self.names.get(new):
            (self.tops[side] / old).rename(self.tops[side] / new)
            self._drop(new)
            self.names[new] = self.names.pop(old)

    @precondition(lambda self: self.pushes)
    @rule(side=sides, old=names, new=names)
    def link(self, side: int, old: str, new: str) -> None:
        """One more name."""
        if old in self.names and new not in self.names:
            os.link(self.tops[side] / old, self.tops[side] / new)
            self.names[new] = self.names[old]
            self.names[new].links += 1

    @rule(side=sides, name=names, mode=st.sampled_from([0o600, 0o644, 0o777]))
    def chmod(self, side: int, name: str, mode: int) -> None:
        """Seen at once where changes are told, by who opens elsewhere."""
        if name in self.names:
            (self.tops[side] / name).chmod(mode)
            self.names[name].mode = mode

    @rule(side=sides, name=names, label=st.binary(max_size=3))
    def label(self, side: int, name: str, label: bytes) -> None:
        """Extended attributes are nowhere cached."""
        if name in self.names:
            os.setxattr(self.tops[side] / name, _LABEL, label)
            self.names[name].label = label

    # --- looking --------------------------------------------------------------------------------

    @rule(side=sides, name=names)
    def read_by_name(self, side: int, name: str) -> None:
        """Who opens sees what was closed."""
        if name not in self.names:
            with pytest.raises(FileNotFoundError):
                os.open(self.tops[side] / name, os.O_RDONLY)
            return
        descriptor = os.open(self.tops[side] / name, os.O_RDONLY)
        try:
            self._check_content(side, descriptor, self.names[name])
        finally:
            os.close(descriptor)

    def _check_content(self, side: int, descriptor: int, file: _File) -> None:
        found, size = os.pread(descriptor, 10**6, 0), os.fstat(descriptor).st_size
        if not file.in_doubt or file.writer is None or file.writer[0] == side:
            assert found == file.content
            assert size == len(found)

    @rule(side=sides, slot=slots, name=names)
    def begin_reading(self, side: int, slot: int, name: str) -> None:
        """A descriptor that stays open."""
        if name in self.names and (side, slot) not in self.readers:
            descriptor = os.open(self.tops[side] / name, os.O_RDONLY)
            self.readers[side, slot] = _Open(descriptor, self.names[name])

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), close=st.booleans())
    def read_what_is_open(self, data: st.DataObject, close: bool) -> None:
        """Where changes are told, as of now; it never fails, whoever has removed the file."""
        chosen = data.draw(st.sampled_from(sorted(self.readers)))
        opened = self.readers[chosen]
        if self.pushes and opened.file.links:
            self._check_content(chosen[0], opened.descriptor, opened.file)
        else:
            os.pread(opened.descriptor, 10**6, 0)
        if close:
            os.close(self.readers.pop(chosen).descriptor)

    @rule(side=sides, name=names)
    def stat_by_name(self, side: int, name: str) -> None:
        """Where changes are told, stat says what is now; elsewhere fstat after an open does."""
        if name not in self.names:
            assert not (self.pushes and (self.tops[side] / name).exists())
            return
        file = self.names[name]
        with open(self.tops[side] / name, "rb") as opened:
            found = os.fstat(opened.fileno())
        if self.pushes:
            found = (self.tops[side] / name).stat()
            assert found.st_nlink == file.links
        assert found.st_mode & 0o7777 == file.mode
        if file.label is not None:
            assert os.getxattr(self.tops[side] / name, _LABEL) == file.label

    @rule(side=sides)
    def list_names(self, side: int) -> None:
        """Listings are made anew for who opens the directory; nothing of them is cached."""
        found = [
            *os.listdir(self.tops[side]),
            *(f"d/{n}" for n in os.listdir(self.tops[side] / "d")),
        ]
        assert sorted(found) == sorted([*self.names, "d"])


@pytest.fixture
def tops(shared_pair: Pair) -> dict[str, tuple[Path, Path]]:
    """The directories of both mounts, by policy."""
    return {
        policy: (shared_pair[0].path / policy, shared_pair[1].path / policy)
        for policy in (PLAIN, PUSH)
    }


@pytest.mark.parametrize("policy", [PLAIN, PUSH])
def test_each_mount_sees_what_it_must_of_the_other(
    tops: dict[str, tuple[Path, Path]], policy: str
) -> None:
    """Close-to-open everywhere, at once below push directories, whatever the two mounts do."""

    def machine() -> _TwoMounts:
        number = f"model-{next(_numbers)}"
        (tops[policy][0] / number).mkdir()
        return _TwoMounts((tops[policy][0] / number, tops[policy][1] / number), policy == PUSH)

    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True),
    )
