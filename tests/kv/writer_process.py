"""Run as a program by tests: a process that writes to an embedded engine.

    python -m tests.kv.writer_process increment PATH COUNT
    python -m tests.kv.writer_process stream PATH

`stream` prints the number of each transaction after it was acknowledged, until it is killed;
every fourth one is durable.
"""

from __future__ import annotations

import itertools
import sys

from tectonic_client.kv.sqlite import SqliteKV
from tests.contracts.kv import increment, put_all


def _increment(path: str, count: int) -> None:
    kv = SqliteKV(path, create=False)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        kv.transact(increment, durable=True)
    kv.close()


def _stream(path: str) -> None:
    kv = SqliteKV(path, create=False)
    for number in itertools.count():
        key = b"%08d" % number
        put_all(kv, {key: key}, durable=number % 4 == 0)
        print(number, flush=True)


if __name__ == "__main__":
    command, path, *rest = sys.argv[1:]
    if command == "increment":
        _increment(path, int(rest[0]))
    else:
        _stream(path)
