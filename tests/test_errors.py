"""The error tree as its users meet it."""

from __future__ import annotations

import pickle

import pytest

from tectonic_client import errors


def _tree(kind: type[errors.TectonicError]) -> list[type[errors.TectonicError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


@pytest.mark.parametrize("kind", _tree(errors.TectonicError), ids=lambda kind: kind.__name__)
def test_errors_travel_between_processes(kind: type[errors.TectonicError]) -> None:
    """A rank's error reaches the launcher whole: launchers pass exceptions by pickle."""
    extra = {errors.RanksMissing: ((1, 2),), errors.StateMismatch: (("a", "b"),)}.get(kind, ())
    error = kind("what happened", *extra)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error)
