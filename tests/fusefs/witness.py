"""Writers that know at every moment what a crash may leave of their files.

A writer owns a directory. Before each system call it notes the state that the call leads to, after
it what the answer promised:

* after the death of the daemon the directory is as the last call that was answered left it, or as
  the call that was under way would have, of a write perhaps only its part in the first page;
  written bytes count from close or fsync on;
* after a power loss it is in a state that it had since the last fsync that was answered.

The second is more than POSIX asks: a volume's metadata has one log, so its history is cut
somewhere, but nothing is missing before that.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

State = dict[str, bytes]

_NAMES = 6
_PAGE = os.sysconf("SC_PAGESIZE")
_SIZES = (0, 100, 5_000, 70_000, 200_000)
_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.EROFS)


class Writer:
    """Creates, writes, replaces, renames, truncates and removes until the mount fails."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self.after_crash: list[State] = [{}]
        """What may be found after the daemon's death."""
        self.after_power_loss: list[State] = [{}]
        self.rounds = 0
        self.failure: BaseException | None = None

    # --- what is promised ---------------------------------------------------------------------

    @property
    def _now(self) -> State:
        return self.after_crash[-1]

    def _may_become(self, state: State) -> None:
        self.after_crash.append(state)
        self.after_power_loss.append(state)

    def _answered(self, *, durable: bool = False) -> None:
        self.after_crash = self.after_crash[-1:]
        if durable:
            self.after_power_loss = self.after_power_loss[-1:]

    # --- what is done -------------------------------------------------------------------------

    def run(self) -> None:
        """Until the mount is gone."""
        actions = (
            self._write, self._write, self._write, self._replace, self._replace, self._rename,
            self._truncate, self._remove, self._sync_directory,
        )  # fmt: skip
        try:
            while True:
                self._rng.choice(actions)(f"f{self._rng.randrange(_NAMES)}")
                self.rounds += 1
        except OSError as error:
            # After an orderly umount even the directory is gone, which no writer removes.
            detached = error.errno == errno.ENOENT and not self._directory.exists()
            if error.errno not in _GONE and not detached:
                self.failure = error
        except BaseException as error:  # noqa: BLE001 - raised by whoever started the thread
            self.failure = error

    def _write(self, name: str) -> None:
        before = self._now.get(name, b"")
        data = self._rng.randbytes(self._rng.choice(_SIZES))
        offset = self._rng.randrange(len(before) + 1)
        after = before[:offset] + data + before[offset + len(data) :]
        if name not in self._now:
            self._may_become({**self._now, name: b""})
        descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o644)
        self._answered()
        # A write that begins inside a page the kernel does not hold comes in two requests.
        first = min(-offset % _PAGE, len(data))
        self._may_become(
            {**self._now, name: before[:offset] + data[:first] + before[offset + first :]}
        )
        self._may_become({**self._now, name: after})
        try:
            os.pwrite(descriptor, data, offset)
            if self._rng.random() < 0.5:
                os.fsync(descriptor)
                self._answered(durable=True)
        finally:
            os.close(descriptor)
        self._answered()

    def _replace(self, name: str) -> None:
        """As editors do: the new content under another name, then renamed."""
        self._write(f"{name}.new")
        state = dict(self._now)
        state[name] = state.pop(f"{name}.new")
        self._change(
            state, lambda: (self._directory / f"{name}.new").rename(self._directory / name)
        )

    def _rename(self, name: str) -> None:
        other = f"f{self._rng.randrange(_NAMES)}"
        if name in self._now and other != name:
            state = dict(self._now)
            state[other] = state.pop(name)
            self._change(state, lambda: (self._directory / name).rename(self._directory / other))

    def _truncate(self, name: str) -> None:
        if name in self._now:
            content = self._now[name]
            size = self._rng.randrange(len(content) + 5_000)
            state = {**self._now, name: content[:size].ljust(size, b"\0")}
            self._change(state, lambda: os.truncate(self._directory / name, size))

    def _remove(self, name: str) -> None:
        if name in self._now:
            state = {other: data for other, data in self._now.items() if other != name}
            self._change(state, (self._directory / name).unlink)

    def _change(self, state: State, call: Callable[[], object]) -> None:
        self._may_become(state)
        call()
        self._answered()

    def _sync_directory(self, _: str) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._answered(durable=True)

    # --- what is found ------------------------------------------------------------------------

    def check(self, allowed: list[State]) -> None:
        """The directory is in one of the allowed states."""
        found = {entry.name: entry.read_bytes() for entry in self._directory.iterdir()}
        assert found in allowed, (
            f"{self._directory}: {_shape(found)}, expected one of {[*map(_shape, allowed)]}"
        )


def _shape(state: State) -> dict[str, str]:
    return {name: f"{len(data)} bytes, {hash(data):x}" for name, data in sorted(state.items())}


class Writers:
    """Several writers at work, each in a thread and a durable directory of its own."""

    def __init__(self, root: Path, count: int, rng: random.Random) -> None:
        self._writers = []
        for number in range(count):
            directory = root / f"w{number}"
            directory.mkdir()
            self._writers.append(Writer(directory, random.Random(rng.random())))
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)
        self._threads = [threading.Thread(target=writer.run) for writer in self._writers]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def work(self, rounds: int) -> None:
        """Wait until that many actions are done in all."""
        while sum(writer.rounds for writer in self._writers) < rounds:
            assert all(thread.is_alive() for thread in self._threads), self._failures()
            self._threads[0].join(0.005)

    def join(self) -> None:
        """They have noticed that the mount is gone."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        failures = self._failures()
        assert not failures, failures

    def _failures(self) -> list[BaseException]:
        return [writer.failure for writer in self._writers if writer.failure is not None]

    def check_after_crash(self) -> None:
        for writer in self._writers:
            writer.check(writer.after_crash)

    def check_after_power_loss(self) -> None:
        for writer in self._writers:
            writer.check(writer.after_power_loss)
