"""Every store and wrapper runs the contract suite."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import tectonic_client.chunkstore
import tests.chunkstore
from tests.contracts.chunkstore import ChunkStoreContract


def _modules(package: ModuleType) -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def _stores() -> set[type]:
    """Public classes that implement the port's calls."""
    return {
        member
        for module in _modules(tectonic_client.chunkstore)
        for name, member in inspect.getmembers(module, inspect.isclass)
        if not name.startswith("_")
        and member.__module__.startswith(tectonic_client.chunkstore.__name__)
        and not getattr(member, "_is_protocol", False)
        and hasattr(member, "put")
        and hasattr(member, "get_into")
    }


def _covered(suite: type[ChunkStoreContract]) -> set[type]:
    covered = {suite.store_class} if "store_class" in vars(suite) else set()
    return covered.union(*map(_covered, suite.__subclasses__()))


def test_every_store_is_covered() -> None:
    """Each store in tectonic_client.chunkstore has a subclass of the contract that names it."""
    _modules(tests.chunkstore)
    stores = _stores()
    assert {s.__name__ for s in stores} >= {"FlashStore", "MemoryStore", "FaultyStore"}
    assert stores == _covered(ChunkStoreContract)
