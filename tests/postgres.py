"""A PostgreSQL server of the test session's own: installed if missing, started, stopped.

It runs from Debian's binaries in a temporary directory, on a unix socket and a free loopback
port, as an unprivileged user where the tests run as root (the server refuses root). It syncs as in
production but is small.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "tectonic"
PASSWORD = "p@ss/w:rd?"
"""With characters that a URL must escape; no message may show it."""

_ESCAPED_PASSWORD = "p%40ss%2Fw%3Ard%3F"
_START_TIMEOUT_S = 60
_INSTALL_TIMEOUT_S = 600

_SETTINGS = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = '{directory}'
shared_buffers = 16MB
max_connections = 60
max_wal_size = 128MB
logging_collector = off
log_line_prefix = '%m [%p] '
"""


class PostgresServer:
    """One cluster in `directory`."""

    def __init__(self, binaries: Path, directory: Path, account: str | None) -> None:
        self._binaries = binaries
        self._account = account
        self.directory = directory
        self._data = directory / "data"
        self.port = _free_port()
        self._schemas = itertools.count()

    def initialise(self) -> None:
        password_file = self.directory / "password"
        password_file.write_text(PASSWORD)
        if self._account is not None:
            shutil.chown(self.directory, self._account)
            shutil.chown(password_file, self._account)
        self._run(
            "initdb", "-D", self._data, "-U", USER, "--pwfile", password_file,
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
        )  # fmt: skip
        settings = _SETTINGS.format(port=self.port, directory=self.directory)
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(settings)

    def start(self) -> None:
        log = self.directory / "log"
        self._run("pg_ctl", "-D", self._data, "-l", log, "-w", "-t", _START_TIMEOUT_S, "start")

    def stop(self) -> None:
        """An orderly stop: running transactions are rolled back."""
        self._run("pg_ctl", "-D", self._data, "-m", "fast", "-w", "stop")

    def crash(self) -> None:
        """Every server process ends at once; what was not in the log on disk is gone."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def signal(self, number: int) -> None:
        """Send a signal to every process of the server."""
        leader = int((self._data / "postmaster.pid").read_text().split("\n")[0])
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        for pid in (leader, *map(int, children)):
            os.kill(pid, number)

    def running(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def url(self, *, database: str = "postgres", password: str = _ESCAPED_PASSWORD) -> str:
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def fresh_url(self) -> str:
        """A URL with a schema that no other test uses."""
        return f"{self.url()}?schema=test_{next(self._schemas)}"

    def socket_url(self) -> str:
        return f"postgresql://{USER}:{_ESCAPED_PASSWORD}@/postgres?host={self.directory}&port={self.port}"

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [self._binaries / program, *map(str, arguments)],
            check=True,
            user=self._account,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None,
            timeout=2 * _START_TIMEOUT_S,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _find_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


def _install() -> Path:
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "postgresql"],
        check=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        timeout=_INSTALL_TIMEOUT_S,
    )
    binaries = _find_binaries()
    assert binaries is not None, "the postgresql package brought no server"
    return binaries


def _unprivileged_account() -> str | None:
    if os.geteuid() != 0:
        return None
    accounts = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in accounts else "nobody"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; a test that stops it starts it again."""
    binaries = _find_binaries() or _install()
    # Not below pytest's directory, which the unprivileged user could not enter.
    with tempfile.TemporaryDirectory(prefix="tectonic-postgres-") as directory:
        server = PostgresServer(binaries, Path(directory), _unprivileged_account())
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            if server.running():
                server.stop()
