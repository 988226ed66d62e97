"""Every engine and wrapper runs the contract suite."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import tectonic_client.kv
import tests.kv
from tests.contracts.kv import KVContract


def _modules(package: ModuleType) -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def _engines() -> set[type]:
    """Public classes that implement the port's calls, synchronously."""
    return {
        member
        for module in _modules(tectonic_client.kv)
        for name, member in inspect.getmembers(module, inspect.isclass)
        if not name.startswith("_")
        and member.__module__.startswith(tectonic_client.kv.__name__)
        and not getattr(member, "_is_protocol", False)
        and hasattr(member, "read")
        and inspect.isfunction(transact := getattr(member, "transact", None))
        and not inspect.iscoroutinefunction(transact)
    }


def _covered(suite: type[KVContract]) -> set[type]:
    covered = {suite.engine} if "engine" in vars(suite) else set()
    return covered.union(*map(_covered, suite.__subclasses__()))


def test_every_engine_is_covered() -> None:
    """Each engine in tectonic_client.kv has a subclass of the contract that names it."""
    _modules(tests.kv)
    engines = _engines()
    assert {engine.__name__ for engine in engines} >= {"MemoryKV", "SqliteKV", "PostgresKV"}
    assert engines == _covered(KVContract)
