"""A simulated cluster for the save protocol: processes, a clock, crashes, lost answers.

Each process drives the same generators as the manager, one request at a time; what runs next is the
test's choice. Transactions run on the memory engine with the simulated clock. After each one the
world checks what must always hold: verdicts never change, and visible steps are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tectonic_client.checkpoint import keys
from tectonic_client.checkpoint.attempts import Arrival, Attempt
from tectonic_client.checkpoint.collective import Pause, Read, Save, Transact, WriteIndex
from tectonic_client.checkpoint.members import Identity, Memory, register
from tectonic_client.checkpoint.names import INDEX_NAME, part_name
from tectonic_client.checkpoint.port import NewFile, SessionView
from tectonic_client.checkpoint.records import AttemptRecord, Outcome, Verdict
from tectonic_client.errors import Exists, SessionLost, TectonicError, UnknownOutcome
from tectonic_client.kv.memory import MemoryKV
from tectonic_client.kv.port import ReadTransaction, Transaction

DIRECTORY = 77
_S = 1_000_000_000


@dataclass(frozen=True)
class SimFile:
    """A written file; `content` says what is in it."""

    inode: int
    nbytes: int
    content: list[Any]


class ClockedTransaction:
    """A transaction of the memory engine that tells the simulated time and notes what it writes."""

    def __init__(self, inner: Transaction, now_ns: int) -> None:
        self._inner = inner
        self._now_ns = now_ns
        self.written: set[bytes] = set()

    def get(self, key: bytes) -> bytes | None:
        return self._inner.get(key)

    def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        return self._inner.get_many(wanted)

    def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        return self._inner.scan(start, end, limit=limit, reverse=reverse)

    def now_ns(self) -> int:
        return self._now_ns

    def put(self, key: bytes, value: bytes) -> None:
        self.written.add(key)
        self._inner.put(key, value)

    def delete(self, key: bytes) -> None:
        if self._inner.get(key) is not None:
            self.written.add(key)
        self._inner.delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        self.written.update(key for key, _ in self._inner.scan(start, end))
        self._inner.delete_range(start, end)


@dataclass
class SimSession:
    """A session; without a record it was cleaned up."""

    heartbeat_ns: int
    alive: bool = True
    has_record: bool = True


class World:
    """Engine, clock, sessions and processes."""

    def __init__(self) -> None:
        self.kv = MemoryKV()
        self.now = 1000.0
        self.sessions: dict[int, SimSession] = {}
        self.processes: list[Process] = []
        self.verdicts: dict[int, Verdict] = {}
        self.objections: list[bytes] = []
        self._next_id = 1

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def now_ns(self) -> int:
        """Time moves with each look at it: no two events are at the same time."""
        self.now += 1e-6
        return int(self.now * _S)

    def read(self, fn: Callable[[ReadTransaction], Any]) -> Any:
        return self.kv.read(lambda tx: fn(ClockedTransaction(tx, self.now_ns())))  # type: ignore[arg-type]  # reads only

    def transact(self, fn: Callable[[Transaction], Any]) -> tuple[Any, set[bytes]]:
        """Result of `fn` and the keys that it wrote."""

        def run(tx: Transaction) -> tuple[Any, set[bytes]]:
            clocked = ClockedTransaction(tx, self.now_ns())
            return fn(clocked), clocked.written

        answer, written = self.kv.transact(run)
        start, end = keys.objections(DIRECTORY, 0)[0], keys.objections(DIRECTORY, 1 << 62)[1]
        self.objections += [key for key in written if start <= key < end]
        self._check_verdicts()
        return answer, written

    def _check_verdicts(self) -> None:
        for _, value in self.kv.read(lambda tx: tx.scan(*keys.attempts(DIRECTORY))):
            record = AttemptRecord.decode(value)
            before = self.verdicts.get(record.attempt_id)
            decided = before is not None and before.outcome is not Outcome.OPEN
            assert not decided or before == record.verdict, "a verdict changed"
            self.verdicts[record.attempt_id] = record.verdict

    # --- looking ------------------------------------------------------------------------------

    def visible(self) -> dict[int, int]:
        """Steps that can be seen, with the inodes of their directories."""
        rows = self.kv.read(lambda tx: tx.scan(b"Xs", b"Xt"))
        return {int(key[2:]): int(value) for key, value in rows}

    def files(self, directory: int) -> dict[str, SimFile]:
        """Files of a directory."""
        prefix = b"Xf%d/" % directory
        rows = self.kv.read(lambda tx: tx.scan(prefix, prefix + b"\xff"))
        return {key[len(prefix) :].decode(): SimFile(*json.loads(value)) for key, value in rows}

    def hidden(self) -> set[int]:
        """Directories that are neither visible nor handed over for cleaning."""
        return {int(key[2:]) for key, _ in self.kv.read(lambda tx: tx.scan(b"Xh", b"Xi"))}

    def open_attempts(self) -> set[int]:
        """Attempts without a verdict."""
        rows = self.kv.read(lambda tx: tx.scan(*keys.attempts(DIRECTORY)))
        records = [AttemptRecord.decode(value) for _, value in rows]
        return {record.attempt_id for record in records if record.is_open}

    def check_whole(self) -> None:
        """Every visible step has the parts of one attempt, of one start of a run; nothing leaks."""
        for step, directory in self.visible().items():
            files = self.files(directory)
            index = files.pop(INDEX_NAME).content
            world_size, start = index[0], index[1]
            assert files.keys() == {part_name(rank, world_size) for rank in range(world_size)}
            for rank in range(world_size):
                content = files[part_name(rank, world_size)].content
                assert content == [start, rank, step], f"step {step} has a part of {content}"
        open_attempts = self.open_attempts()
        assert self.hidden() == open_attempts, "a hidden directory leaks"
        start, end = keys.parts(DIRECTORY, 0)[0], keys.objections(DIRECTORY, 1 << 62)[1]
        for key, _ in self.kv.read(lambda tx: tx.scan(start, end)):
            assert int.from_bytes(key[-12:-4]) in open_attempts, "a part or objection leaks"

    # --- processes ----------------------------------------------------------------------------

    def start(
        self, world_size: int, run_id: str = "run", start: str = "A",
        ranks: Sequence[int] | None = None, **options: Any,
    ) -> list[Process]:  # fmt: skip
        """Start the ranks of a job, as one start of it."""
        started = [
            Process(self, rank, world_size, run_id, start, **options)
            for rank in (range(world_size) if ranks is None else ranks)
        ]
        self.processes += started
        return started

    def runnable(self) -> list[Process]:
        """Processes that can take a step now; time passes if all of them sleep."""
        living = [process for process in self.processes if not process.done]
        if living and all(process.wakes_at > self.now for process in living):
            self.now = min(process.wakes_at for process in living)
        return [process for process in living if process.wakes_at <= self.now]

    def run(self, choose: Callable[[list[Process]], Process] | None = None) -> None:
        """Run all processes to their end; `choose` picks who goes next (default: in turn)."""
        turns = 0
        while ready := self.runnable():
            turns += 1
            assert turns < 100_000, "somebody never gets an answer"
            (choose(ready) if choose else ready[turns % len(ready)]).step()


class SimNamespace:
    """The port of one process, over rows of the same engine."""

    def __init__(self, world: World, session: int) -> None:
        self._world = world
        self._session = session

    def step_directory(self, tx: ReadTransaction, step: int) -> int | None:
        row = tx.get(b"Xs%010d" % step)
        return None if row is None else int(row)

    def create_hidden(self, tx: Transaction, inode: int) -> None:
        tx.put(b"Xh%d" % inode, b"")

    def add_file(self, tx: Transaction, directory: int, name: str, file: NewFile) -> None:
        assert isinstance(file, SimFile)
        assert tx.get(b"Xh%d" % directory) is not None, "a file for a directory that is not hidden"
        value = json.dumps([file.inode, file.nbytes, file.content]).encode()
        tx.put(b"Xf%d/%s" % (directory, name.encode()), value)

    def publish(self, tx: Transaction, inode: int, step: int) -> None:
        if self.step_directory(tx, step) is not None:
            raise Exists(f"step {step} is there")
        assert tx.get(b"Xh%d" % inode) is not None, "published what is not hidden"
        tx.delete(b"Xh%d" % inode)
        tx.put(b"Xs%010d" % step, b"%d" % inode)

    def discard(self, tx: Transaction, inode: int) -> None:
        assert tx.get(b"Xh%d" % inode) is not None, "discarded what is not hidden"
        tx.delete(b"Xh%d" % inode)

    def require_session(self, tx: ReadTransaction) -> None:
        if not self._world.sessions[self._session].has_record:
            raise SessionLost("cleaned up")

    def look_up(self, tx: ReadTransaction, session_ids: Sequence[int]) -> list[SessionView | None]:
        found = [self._world.sessions[session] for session in session_ids]
        return [SessionView(s.alive, s.heartbeat_ns) if s.has_record else None for s in found]


Script = Callable[["Process"], Generator[Any, Any, None]]


@dataclass
class Process:
    """One rank of one start of a job. `results` has what each save came to."""

    world: World
    rank: int
    world_size: int
    run_id: str
    start: str
    steps: Sequence[int] = (100,)
    uploads: int = 2
    timeout_s: float = 30.0
    script: Script | None = None
    results: dict[int, Attempt | BaseException] = field(default_factory=dict)
    written: set[bytes] = field(default_factory=set)
    transactions: int = 0
    lose_answers: list[bool | None] = field(default_factory=list)
    """For the next transactions: lose the answer, after (True) or before it took effect (False)."""

    def __post_init__(self) -> None:
        self.session = self.world.next_id()
        self.world.sessions[self.session] = SimSession(self.world.now_ns())
        self.me = Identity(
            directory=DIRECTORY, run_id=self.run_id, rank=self.rank, world_size=self.world_size,
            session=self.session, token=self.world.next_id(), process=self.world.next_id(),
            born_ns=self.world.now_ns(), pid=1000 + self.session, hostname=f"host{self.start}",
        )  # fmt: skip
        self.memory = Memory()
        self.namespace = SimNamespace(self.world, self.session)
        self.wakes_at = 0.0
        self.done = False
        self._uploads_left = 0
        self._answer: Any = None
        self._error: BaseException | None = None
        self._work = (self.script or Process.save_all)(self)

    # --- what it does -------------------------------------------------------------------------

    def join_run(self) -> Generator[Any, Any, None]:
        """Make a manager: register."""
        while True:
            try:
                self.memory.registered = yield Transact(
                    lambda tx: register(tx, self.namespace, self.me, saving=False)
                )
            except UnknownOutcome:
                continue
            return

    def save_all(self) -> Generator[Any, Any, None]:
        yield from self.join_run()
        for step in self.steps:
            yield from self.save(step)

    def save(self, step: int) -> Generator[Any, Any, None]:
        """Save a step and note the result."""
        try:
            self.results[step] = yield from self.new_save(step).run()
        except TectonicError as error:
            self.results[step] = error

    def new_save(self, step: int) -> Save:
        self._uploads_left = self.uploads
        content = [self.start, self.rank, step]
        file = SimFile(self.world.next_id(), 10 + self.rank, content)
        return Save(
            self.namespace, self.me, self.memory, step, attempt_id=self.world.next_id(),
            arrival=lambda: None if self._uploads_left else Arrival(file, 0.1, 0.2),
            clock=lambda: self.world.now, timeout_s=self.timeout_s,
        )  # fmt: skip

    # --- how it runs --------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.world.sessions[self.session].alive

    def crash(self) -> None:
        """kill -9."""
        self.done = True
        self.world.sessions[self.session].alive = False

    def step(self) -> None:
        """Take one step: hand over the last answer, carry out the next request."""
        self.world.sessions[self.session].heartbeat_ns = self.world.now_ns()
        try:
            if self._error is not None:
                error, self._error = self._error, None
                request = self._work.throw(error)
            else:
                request = self._work.send(self._answer)
        except StopIteration:
            self.done = True
            return
        self._answer = None
        try:
            self._answer = self._carry_out(request)
        except TectonicError as error:
            self._error = error

    def _carry_out(self, request: Any) -> Any:
        match request:
            case Read(fn):
                return self.world.read(fn)
            case Transact(fn):
                return self._transact(fn)
            case Pause(seconds):
                self._uploads_left = max(0, self._uploads_left - 1)
                self.wakes_at = self.world.now + seconds
                return None
            case WriteIndex(attempt, parts):
                assert sorted(parts) == list(range(attempt.record.world_size))
                content = [attempt.record.world_size, self.start]
                return SimFile(self.world.next_id(), 5, content)
        raise AssertionError(request)

    def _transact(self, fn: Callable[[Transaction], Any]) -> Any:
        self.transactions += 1
        took_effect = self.lose_answers.pop(0) if self.lose_answers else None
        if took_effect is False:
            raise UnknownOutcome("no answer")
        answer, written = self.world.transact(fn)
        self.written |= written
        if took_effect:
            raise UnknownOutcome("no answer")
        return answer
