"""Fixtures and rules for all tests: seeds, what may be skipped, and that nothing stays behind."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.leftovers import Leftovers
from tests.postgres import postgres_server
from tests.turntaking import turn

__all__ = ["postgres_server"]

_SEED = int(os.environ.get("TECTONICFS_SEED") or random.SystemRandom().randrange(2**32))
os.environ["TECTONICFS_SEED"] = str(_SEED)  # for the worker processes of this run

# Hundreds of processes are started: each would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples on each run, so that a change is judged by what it changes; `stress` explores.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("stress", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("ci")

_leftovers = pytest.StashKey[Leftovers]()
_of_workers = pytest.StashKey[list[str]]()
_REMAINING = "left behind"


def pytest_configure(config: pytest.Config) -> None:
    """Start the watch before the first fixture starts anything."""
    config.stash[_leftovers] = Leftovers()
    config.stash[_of_workers] = []


def pytest_report_header() -> str:
    """The line to repeat a run by."""
    return f"seed: {_SEED} (TECTONICFS_SEED={_SEED} repeats it)"


# --- markers ----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are marked by the server they use; those that mount are skipped without FUSE."""
    no_fuse = _why_no_fuse()
    for item in items:
        if "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker("postgres")
        if no_fuse is not None and item.get_closest_marker("fuse"):
            item.add_marker(pytest.mark.skip(reason=no_fuse))


def _why_no_fuse() -> str | None:
    """Only what the machine refuses is a reason; whatever could be installed is not."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened here: {error.strerror}"
    return None


# --- nothing stays behind ---------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting for a turn is not the test's time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember after which test a process or mount was first seen."""
    alone = item.get_closest_marker("alone") is not None
    with turn(alone=alone) if _is_worker(item.config) else nullcontext():
        outcome = yield
        item.config.stash[_leftovers].note(item.nodeid)
    return outcome


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last fixture is torn down no process and no mount of ours may be left."""
    remaining = session.config.stash[_leftovers].clear()
    if _is_worker(session.config):
        session.config.workeroutput[_REMAINING] = remaining  # type: ignore[attr-defined]
        return
    remaining = [*remaining, *session.config.stash[_of_workers]]
    if remaining:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        for line in remaining:
            reporter.write_line(f"left behind: {line}", red=True)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """What a worker process of this run has to tell at its end."""
    told = getattr(node, "workeroutput", {})
    node.config.stash[_of_workers].extend(told.get(_REMAINING, ()))


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that run the tests (pytest-xdist)."""
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session", autouse=True)
def _watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.config.stash[_leftovers].directories.append(tmp_path_factory.getbasetemp())


# --- fixtures ---------------------------------------------------------------------------------


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test's own, from the seed that the header shows."""
    return random.Random(f"{_SEED}:{request.node.nodeid}")


@pytest.fixture
def disk_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory that takes O_DIRECT: tmp_path or, if that is in memory, one in the checkout."""
    if _takes_direct_io(tmp_path):
        yield tmp_path
        return
    checkout = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="build-", dir=checkout) as directory:
        request.config.stash[_leftovers].directories.append(Path(directory))
        yield Path(directory)


def _takes_direct_io(directory: Path) -> bool:
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
