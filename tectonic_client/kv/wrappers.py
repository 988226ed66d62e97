"""Metadata engines that wrap another one: for tests of what lies above.

`CountingKV` counts calls; `FaultyKV` makes the n-th call fail, before it happens or after. Both
keep the port's promises otherwise, and offer `submit` exactly if the inner engine does, so that
`AsyncKV` treats them alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from tectonic_client.errors import TectonicError, UnknownOutcome
from tectonic_client.kv.executor import SubmittingKV
from tectonic_client.kv.port import KV, Listener, ReadTransaction, Transaction

T = TypeVar("T")


class _WrappedKV:
    """Passes everything on; a subclass intervenes in `_before_read` and `_transaction`."""

    def __init__(self, inner: KV) -> None:
        self.inner = inner
        self.reads_may_block = inner.reads_may_block
        if isinstance(inner, SubmittingKV):
            self.submit = self._submit

    def read(self, fn: Callable[[ReadTransaction], T]) -> T:
        self._before_read()
        return self.inner.read(fn)

    def transact(self, fn: Callable[[Transaction], T], *, durable: bool = False) -> T:
        afterwards = self._before_transaction(durable)
        result = self.inner.transact(fn, durable=durable)
        if afterwards is not None:
            raise afterwards
        return result

    def listen(self, topic: str) -> Listener:
        return self.inner.listen(topic)

    def call(self, topic: str) -> None:
        self.inner.call(topic)

    def close(self) -> None:
        self.inner.close()

    def _submit(
        self, fn: Callable[[Transaction], T], *, durable: bool = False, brief: bool = False
    ) -> Future[T]:
        assert isinstance(self.inner, SubmittingKV)
        future: Future[T] = Future()
        try:
            afterwards = self._before_transaction(durable)
        except TectonicError as error:
            future.set_exception(error)
            return future
        inner = self.inner.submit(fn, durable=durable, brief=brief)
        if afterwards is None:
            return inner
        future.set_running_or_notify_cancel()
        inner.add_done_callback(lambda done: future.set_exception(done.exception() or afterwards))
        return future

    def _before_read(self) -> None:
        """Raise instead of reading, or return."""

    def _before_transaction(self, durable: bool) -> TectonicError | None:
        """Raise instead of running it, or return what to raise once it is committed."""
        return None


class CountingKV(_WrappedKV):
    """Counts the calls since it was made or `reset`."""

    def __init__(self, inner: KV) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start again at zero."""
        with self._lock:
            self.reads = 0
            self.transactions = 0
            """All of them, durable or not."""
            self.durable_transactions = 0

    def _before_read(self) -> None:
        with self._lock:
            self.reads += 1

    def _before_transaction(self, durable: bool) -> TectonicError | None:
        with self._lock:
            self.transactions += 1
            self.durable_transactions += durable
        return None


@dataclass(slots=True)
class _Plan:
    """Calls to let pass, then one error."""

    calls_left: int
    error: TectonicError
    after_commit: bool = False


class FaultyKV(_WrappedKV):
    """Fails one read or one transaction on request, then works again.

    To try an operation with a fault at each of its steps, plan n = 1, 2, 3, ... until the
    operation ends with `pending` still true: it has fewer steps than n.
    """

    def __init__(self, inner: KV) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._read_plan: _Plan | None = None
        self._transaction_plan: _Plan | None = None

    def fail_read(self, n: int, error: TectonicError) -> None:
        """The n-th read from now (1 = the next) raises `error`."""
        with self._lock:
            self._read_plan = _Plan(n, error)

    def fail_transaction(self, n: int, error: TectonicError) -> None:
        """The n-th transaction from now (1 = the next) does not happen and raises `error`."""
        with self._lock:
            self._transaction_plan = _Plan(n, error)

    def lose_answer(self, n: int, error: TectonicError | None = None) -> None:
        """The n-th transaction from now is committed, then raises (UnknownOutcome by default)."""
        error = error or UnknownOutcome("injected: the commit got no answer")
        with self._lock:
            self._transaction_plan = _Plan(n, error, after_commit=True)

    @property
    def pending(self) -> bool:
        """Whether a planned fault has not come yet."""
        with self._lock:
            return self._read_plan is not None or self._transaction_plan is not None

    def clear(self) -> None:
        """Forget planned faults."""
        with self._lock:
            self._read_plan = self._transaction_plan = None

    def _before_read(self) -> None:
        with self._lock:
            plan = self._read_plan
            if plan is None or not _is_due(plan):
                return
            self._read_plan = None
        raise plan.error

    def _before_transaction(self, durable: bool) -> TectonicError | None:
        with self._lock:
            plan = self._transaction_plan
            if plan is None or not _is_due(plan):
                return None
            self._transaction_plan = None
        if plan.after_commit:
            return plan.error
        raise plan.error


def _is_due(plan: _Plan) -> bool:
    plan.calls_left -= 1
    return plan.calls_left == 0
