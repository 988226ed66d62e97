"""coherence=push between clients: seen when the call returns, bounded whatever the others do."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import trio
from trio.abc import Clock
from trio.testing import MockClock, wait_all_tasks_blocked

from tectonic_client.errors import NotFound
from tectonic_client.filesystem.core import FileSystem
from tectonic_client.kv.port import KV, ReadTransaction, Transaction
from tectonic_client.kv.wrappers import CountingKV
from tectonic_client.limits import (
    CHANGE_STRIPES,
    CHANGES_KEPT_S,
    COHERENCE_DEADLINE_S,
    FOLLOW_INTERVAL_S,
    PUSH_TIMEOUT_S,
)
from tectonic_client.metadata import changes, keys
from tectonic_client.metadata.changerecords import ChangeHeadRecord, ChangeRecord, FollowerRecord
from tectonic_client.metadata.inodes import read_inode, write_inode
from tectonic_client.records import InodeFlag, SessionRecord
from tectonic_client.types import ROOT_INODE, AttributeChanges, Change, ChangeKind, RenameFlag
from tectonic_client.volume import Volume, VolumeOptions, open_volume
from tests.filesystem.engines import NewVolume, any_engine
from tests.filesystem.faultrig import OWNER, load_file, new_volume

__all__ = ["any_engine"]


class Recorder:
    """A cache that remembers what it was told to forget; `gate` makes it wait before."""

    def __init__(self) -> None:
        self.found: list[Change] = []
        self.forgot_all = 0
        self.forgotten = trio.Event()
        self.gate = trio.Event()
        self.gate.set()

    async def forget(self, found: Sequence[Change]) -> None:
        await self.gate.wait()
        self.found += found

    async def forget_open_files(self) -> None:
        self.forgot_all += 1
        self.forgotten.set()

    def take(self) -> list[Change]:
        """What was forgotten since the last call."""
        found, self.found = self.found, []
        return found


def entry(name: bytes, directory: int = ROOT_INODE) -> Change:
    return Change(ChangeKind.ENTRY, directory, name)


def changed(inode: int) -> Change:
    return Change(ChangeKind.INODE, inode, b"")


async def push(volume: Volume, inode: int = ROOT_INODE) -> None:
    """Set the policy; what is made below it inherits it."""

    def set_flag(tx: Transaction) -> None:
        record = read_inode(tx, inode)
        write_inode(tx, inode, replace(record, flags=record.flags | InodeFlag.PUSH))

    await volume.kv.transact(set_flag)


async def follow(volume: Volume) -> Recorder:
    """Let a client follow; returns what it forgets from now on."""
    recorder = Recorder()
    volume.filesystem.follower.caches.append(recorder)
    await volume.filesystem.follower.ready()
    assert volume.filesystem.follower.moment().following
    return recorder


@asynccontextmanager
async def clients(url: str, count: int = 2) -> AsyncIterator[list[Volume]]:
    """Clients of a volume whose root pushes."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_volume(url)) for _ in range(count)]
        await push(opened[0])
        yield opened


def run(main: Callable[[], Awaitable[None]], clock: Clock | None = None) -> None:
    """Run it, with a bound in real time where no clock is given."""

    async def bounded() -> None:
        with trio.fail_after(60 if clock is None else 3600):
            await main()

    trio.run(bounded, clock=clock)


def simulated() -> MockClock:
    """Time that passes ten times as fast."""
    return MockClock(rate=10.0)


async def replace_file(fs: FileSystem, name: bytes, data: bytes) -> int:
    """As `open(name, "w")`, write and close; returns the inode."""
    try:
        inode = (await fs.lookup(ROOT_INODE, name)).inode
        handle = await fs.open(inode, os.O_WRONLY | os.O_TRUNC)
    except NotFound:
        created, handle = await fs.create(ROOT_INODE, name, 0o644, OWNER, os.O_WRONLY)
        inode = created.inode
    await fs.write(handle, 0, data)
    await fs.release(handle)
    return inode


async def events(volume: Volume) -> list[Change]:
    """All that is in the feed."""

    def scan(tx: ReadTransaction) -> list[Change]:
        rows = [row for s in range(CHANGE_STRIPES) for row in tx.scan(*keys.changes(s))]
        return [change for _, row in rows for change in ChangeRecord.decode(row).changes]

    return await volume.kv.read(scan)


# --- what is told -----------------------------------------------------------------------------


async def _every_change(fs: FileSystem, parent: int) -> list[list[Change]]:
    """Change something in every way there is; returns what each must tell of, in its order."""
    told = []
    file, handle = await fs.create(parent, b"file", 0o644, OWNER, os.O_RDWR)
    told.append([entry(b"file", parent)])
    await fs.write(handle, 0, b"data")
    await fs.flush(handle)
    told.append([changed(file.inode)])
    await fs.release(handle)
    await fs.setattr(file.inode, AttributeChanges(size=2))
    told.append([changed(file.inode)])
    await fs.setattr(file.inode, AttributeChanges(mode=0o600))
    told.append([changed(file.inode)])
    await fs.link(file.inode, parent, b"link")
    told.append([changed(file.inode), entry(b"link", parent)])
    await fs.rename(parent, b"link", parent, b"moved")
    told.append([changed(file.inode), entry(b"link", parent), entry(b"moved", parent)])
    other = await fs.symlink(parent, b"other", b"target", OWNER)
    told.append([entry(b"other", parent)])
    await fs.rename(parent, b"other", parent, b"moved", RenameFlag.EXCHANGE)
    swapped = [entry(b"other", parent), entry(b"moved", parent)]
    told.append([changed(file.inode), changed(other.inode), *swapped])
    await fs.rename(parent, b"other", parent, b"moved")
    told.append([changed(other.inode), changed(file.inode), *swapped])
    await fs.unlink(parent, b"moved")
    told.append([entry(b"moved", parent), changed(file.inode)])
    sub = await fs.mkdir(parent, b"sub", 0o755, OWNER)
    told.append([entry(b"sub", parent)])
    await fs.rmdir(parent, b"sub")
    told.append([entry(b"sub", parent), changed(sub.inode)])
    return told


def test_every_change_is_told_when_its_call_returns(any_engine: NewVolume) -> None:
    """A follower has dropped exactly what each operation changed, in order, when it returns."""

    async def main() -> None:
        async with clients(any_engine()) as (writer, reader):
            recorder = await follow(reader)
            told = await _every_change(writer.filesystem, ROOT_INODE)
            assert recorder.take() == [change for step in told for change in step]
            assert recorder.forgot_all == 1

    run(main)


def test_plain_directories_pay_nothing() -> None:
    """Without the policy nothing is written into the feed and no transaction is added."""
    counts = []

    async def main() -> None:
        for policy in (False, True):
            engine: list[CountingKV] = []

            def wrap(kv: KV, engine: list[CountingKV] = engine) -> KV:
                engine.append(CountingKV(kv))
                return engine[0]

            async with open_volume(new_volume(), VolumeOptions(wrap_kv=wrap)) as volume:
                plain = await volume.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
                if policy:
                    await push(volume, plain.inode)
                # Cleaning up, at the start and after removals, adds transactions of its own.
                await wait_all_tasks_blocked()
                engine[0].reset()
                await volume.filesystem.mknod(plain.inode, b"f", 0o644, OWNER)
                await volume.filesystem.rename(plain.inode, b"f", plain.inode, b"g")
                counts.append((engine[0].transactions, engine[0].reads))
                await _every_change(volume.filesystem, plain.inode)
                assert bool(await events(volume)) is policy

    run(main)
    assert counts == [(2, 0), (2, 2)]


def test_the_policy_is_inherited() -> None:
    """New files and directories have the policy of the directory they are made in."""

    async def main() -> None:
        async with clients(new_volume(), 1) as (volume,):
            directory = await volume.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
            file = await volume.filesystem.mknod(directory.inode, b"f", 0o644, OWNER)
            assert directory.pushes
            assert file.pushes

    run(main)


# --- what is seen -----------------------------------------------------------------------------


def test_open_files_see_what_others_closed(any_engine: NewVolume) -> None:
    """Data, size and end of a file that stays open are those of the last close elsewhere."""

    async def main() -> None:
        async with clients(any_engine()) as (writer, reader):
            file = await replace_file(writer.filesystem, b"f", b"old")
            handle = await reader.filesystem.open(file, os.O_RDONLY)
            await follow(reader)
            assert bytes(await reader.filesystem.read(handle, 0, 100)) == b"old"
            for version in (b"newer and longer", b"short", b""):
                await replace_file(writer.filesystem, b"f", version)
                assert bytes(await reader.filesystem.read(handle, 0, 100)) == version
            await reader.filesystem.release(handle)

    run(main)


def test_own_dirty_data_lies_over_what_others_wrote(any_engine: NewVolume) -> None:
    """What a client has not flushed stays, over the bytes that another one published meanwhile."""

    async def main() -> None:
        async with clients(any_engine()) as (writer, other):
            file = await replace_file(writer.filesystem, b"f", b"..........")
            await follow(other)
            handle = await other.filesystem.open(file, os.O_RDWR)
            await other.filesystem.write(handle, 2, b"OWN")
            theirs = await writer.filesystem.open(file, os.O_RDWR)
            await writer.filesystem.write(theirs, 0, b"theirs and more")
            await writer.filesystem.release(theirs)
            assert bytes(await other.filesystem.read(handle, 0, 100)) == b"thOWNs and more"
            await other.filesystem.release(handle)
            assert await load_file(writer.filesystem, b"f") == b"thOWNs and more"

    run(main)


def test_an_appender_goes_on_behind_what_others_appended(any_engine: NewVolume) -> None:
    """Two clients that append by turns to one open file lose nothing."""

    async def main() -> None:
        async with clients(any_engine()) as pair:
            file = await replace_file(pair[0].filesystem, b"log", b"")
            for volume in pair:
                await follow(volume)
            handles = [
                await volume.filesystem.open(file, os.O_WRONLY | os.O_APPEND) for volume in pair
            ]
            expected = b""
            for turn in range(10):
                line = b"%d\n" % turn
                volume, handle = pair[turn % 2], handles[turn % 2]
                await volume.filesystem.write(handle, 0, line)
                await volume.filesystem.flush(handle)
                expected += line
            assert await load_file(pair[0].filesystem, b"log") == expected
            for volume, handle in zip(pair, handles, strict=True):
                await volume.filesystem.release(handle)

    run(main)


def test_close_waits_for_what_a_background_flush_published() -> None:
    """Data flushed before its close is seen, too, when the close returns."""

    async def main() -> None:
        async with clients(new_volume()) as (writer, reader):
            recorder = await follow(reader)
            file, handle = await writer.filesystem.create(ROOT_INODE, b"f", 0o644, OWNER, os.O_RDWR)
            recorder.take()
            recorder.gate = trio.Event()
            await writer.filesystem.write(handle, 0, b"data")
            await writer.filesystem.flush_expired(0.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.filesystem.flush, handle)
                await wait_all_tasks_blocked(0.02)
                assert recorder.found == []
                recorder.gate.set()
            assert changed(file.inode) in recorder.take()
            await writer.filesystem.release(handle)

    run(main)


# --- how long something may be cached ---------------------------------------------------------


def test_trust_counts_from_the_beginning_of_the_request() -> None:
    """An answer is trusted only while the client follows, no event came, and time is left."""

    async def main() -> None:
        async with clients(new_volume()) as (writer, reader):
            follower = reader.filesystem.follower
            assert follower.trusted_s(follower.moment()) == 0  # does not follow yet
            await follow(reader)
            begun = follower.moment()
            assert PUSH_TIMEOUT_S - 1 < follower.trusted_s(begun) <= PUSH_TIMEOUT_S
            await trio.sleep(PUSH_TIMEOUT_S - 1)
            assert 0 < follower.trusted_s(begun) <= 1
            begun = follower.moment()
            await writer.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
            assert follower.trusted_s(begun) == 0
            assert follower.trusted_s(follower.moment()) > 0

    run(main, simulated())


def test_the_deadline_is_longer_than_any_trust() -> None:
    """What a silent client's kernel may still serve has run out when a writer gives up on it."""
    assert PUSH_TIMEOUT_S + 2 * FOLLOW_INTERVAL_S <= COHERENCE_DEADLINE_S


def test_read_only_clients_are_not_waited_for_and_trust_nothing() -> None:
    """A client without a session cannot acknowledge: it may not cache below push directories."""

    async def main() -> None:
        url = new_volume()
        async with (
            clients(url, 1) as (writer,),
            open_volume(url, VolumeOptions(read_only=True)) as reader,
        ):
            follower = reader.filesystem.follower
            await follower.ready()
            assert follower.trusted_s(follower.moment()) == 0
            await writer.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)

    run(main)


# --- followers that do not answer -------------------------------------------------------------


def test_a_silent_follower_is_cast_out_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A change waits for its deadline, not longer; the follower drops everything and goes on."""
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with clients(new_volume(), 3) as (writer, silent, good):
            recorder, other = await follow(silent), await follow(good)
            recorder.gate = trio.Event()
            started = trio.current_time()
            await writer.filesystem.mkdir(ROOT_INODE, b"a", 0o755, OWNER)
            assert COHERENCE_DEADLINE_S <= trio.current_time() - started < 2 * COHERENCE_DEADLINE_S
            assert other.take() == [entry(b"a")]
            assert not silent.filesystem.follower.moment().following
            started = trio.current_time()
            await writer.filesystem.mkdir(ROOT_INODE, b"b", 0o755, OWNER)
            assert trio.current_time() - started < 1  # nobody waits for it any more
            recorder.gate.set()
            await silent.filesystem.follower.ready()
            assert recorder.forgot_all == 2
            recorder.take()
            await writer.filesystem.mkdir(ROOT_INODE, b"c", 0o755, OWNER)
            assert recorder.take() == [entry(b"c")]

    run(main, simulated())
    assert "did not answer" in caplog.text
    assert "lost touch" in caplog.text


def test_a_dead_follower_is_not_waited_for(any_engine: NewVolume) -> None:
    """A follower whose process is gone is cast out at once."""

    async def main() -> None:
        async with clients(any_engine(), 1) as (writer,):
            dead = await writer.kv.transact(lambda tx: _dead_follower(tx, writer.session_id))
            with trio.fail_after(COHERENCE_DEADLINE_S / 2):
                await writer.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
            assert dead not in await writer.kv.read(changes.read_followers)

    run(main)


def _dead_follower(tx: Transaction, model: int) -> int:
    """A session like `model`, but of a process that is gone, follows."""
    data = tx.get(keys.session(model))
    assert data is not None
    record = replace(SessionRecord.decode(data), pid_started_ticks=1)
    tx.put(keys.session(model + 1), record.encode())
    changes.follow(tx, model + 1)
    return model + 1


def test_a_client_that_closes_is_not_waited_for() -> None:
    """Closing ends following before the last flush, which may take long."""

    async def main() -> None:
        url = new_volume()
        async with clients(url, 1) as (writer,):
            async with open_volume(url) as reader:
                await follow(reader)
            assert await writer.kv.read(changes.read_followers) == {}

    run(main)


def test_lost_calls_only_cost_time() -> None:
    """Where no call is ever heard, followers and writers find out by looking."""

    class Mute(CountingKV):
        def call(self, topic: str) -> None:
            pass

    async def main() -> None:
        url = new_volume()
        options = VolumeOptions(wrap_kv=Mute)
        async with open_volume(url, options) as writer, open_volume(url, options) as reader:
            await push(writer)
            recorder = await follow(reader)
            started = trio.current_time()
            await writer.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
            assert recorder.take() == [entry(b"d")]
            assert trio.current_time() - started < 2 * FOLLOW_INTERVAL_S

    run(main)


@pytest.mark.parametrize("head", [ChangeHeadRecord(9, 9), ChangeHeadRecord(0, 0)])
def test_a_feed_that_lacks_events_makes_a_follower_drop_everything(head: ChangeHeadRecord) -> None:
    """Whoever needs events that were trimmed away, or saw some that the engine forgot, forgets all
    it has, and follows on from there."""

    async def main() -> None:
        async with clients(new_volume()) as (writer, reader):
            recorder = await follow(reader)
            await writer.filesystem.mkdir(ROOT_INODE, b"a", 0o755, OWNER)
            recorder.take()
            recorder.forgotten = trio.Event()
            key = keys.change_head(changes.stripe_of(ROOT_INODE))
            await writer.kv.transact(lambda tx: tx.put(key, head.encode()))
            await writer.kv.call("changed")
            with trio.fail_after(10):
                await recorder.forgotten.wait()
            await reader.filesystem.follower.ready()
            await writer.filesystem.mkdir(ROOT_INODE, b"d", 0o755, OWNER)
            assert recorder.take() == [entry(b"d")]

    run(main)


def test_old_events_are_trimmed_and_new_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go once they are older than CHANGES_KEPT_S; positions go on behind them."""

    async def main() -> None:
        async with clients(new_volume(), 1) as (volume,):
            for number in range(5):
                await volume.filesystem.mkdir(ROOT_INODE, b"%d" % number, 0o755, OWNER)
            await volume.cleaner.trim_changes()
            assert len(await events(volume)) == 5
            await volume.kv.transact(_aged)
            await volume.filesystem.mkdir(ROOT_INODE, b"new", 0o755, OWNER)
            await volume.cleaner.trim_changes()
            assert await events(volume) == [entry(b"new")]
            stripe = changes.stripe_of(ROOT_INODE)
            head = await volume.kv.read(lambda tx: tx.get(keys.change_head(stripe)))
            assert head is not None
            assert ChangeHeadRecord.decode(head) == ChangeHeadRecord(6, 5)

    run(main)


def _aged(tx: Transaction) -> None:
    """Make all events older than they are kept."""
    for stripe in range(CHANGE_STRIPES):
        for key, row in tx.scan(*keys.changes(stripe)):
            event = ChangeRecord.decode(row)
            past = event.changed_ns - (CHANGES_KEPT_S + 1) * 1_000_000_000
            tx.put(key, replace(event, changed_ns=past).encode())


# --- locks of the kernel ----------------------------------------------------------------------


def test_two_writers_in_one_directory_do_not_wait_for_each_other() -> None:
    """A cache that cannot drop a name while its own mount's request holds the directory (as a
    kernel's) gives up waiting for that request; else both would end at their deadlines."""

    class Kernel(Recorder):
        """A directory's lock, held by requests and needed to drop names."""

        def __init__(self, volume: Volume, tasks: trio.Nursery) -> None:
            super().__init__()
            self.volume = volume
            self.tasks = tasks
            self.lock = trio.Lock()

        async def mkdir(self, name: bytes) -> None:
            async with self.lock:
                await self.volume.filesystem.mkdir(ROOT_INODE, name, 0o755, OWNER)

        async def forget(self, found: Sequence[Change]) -> None:
            done = trio.Event()
            self.tasks.start_soon(self.drop, found, done)
            await self.volume.audience.wait_unless_held(ROOT_INODE, done)

        async def drop(self, found: Sequence[Change], done: trio.Event) -> None:
            async with self.lock:
                self.found += found
                done.set()

    async def main() -> None:
        async with clients(new_volume()) as pair, trio.open_nursery() as tasks:
            kernels = [Kernel(volume, tasks) for volume in pair]
            for volume, kernel in zip(pair, kernels, strict=True):
                volume.filesystem.follower.caches.append(kernel)
                await volume.filesystem.follower.ready()
            with trio.fail_after(COHERENCE_DEADLINE_S - 1):
                for number in range(20):
                    async with trio.open_nursery() as nursery:
                        for index, kernel in enumerate(kernels):
                            nursery.start_soon(kernel.mkdir, b"%d-%d" % (number, index))
            await wait_all_tasks_blocked(0.01)  # what was put off
            names = sorted(b"%d-1" % number for number in range(20))
            assert sorted(kernels[0].found) == [entry(name) for name in names]

    run(main)


def test_a_follower_record_counts_for_its_session_only() -> None:
    """is_behind compares the stripes that were written, and no others."""
    follower = FollowerRecord((5,) * CHANGE_STRIPES)
    assert not changes.is_behind(follower, {})
    assert not changes.is_behind(follower, {3: 5})
    assert changes.is_behind(follower, {3: 5, 4: 6})
