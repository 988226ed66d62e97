"""States: nested dicts, lists and tuples of arrays and scalars, as the caller has them.

`flatten` takes a state apart into leaves and a tree, `match` holds a state against the tree of a
checkpoint, `build` makes a new state from such a tree. Bytes of arrays are moved by others, through
the leaves. Rules:

* Containers are dict (keys: str, int), list and tuple, subclasses included (OrderedDict,
  namedtuple, torch.Size); of a subclass only its being ordered is stored.
* An array that appears twice (same memory, type, shape and strides) is one leaf: tied tensors.
* Loading is in place: arrays keep their identity, containers too; a tuple whose scalars change is
  replaced in the innermost list or dict around it. Scalars take whatever scalar was saved, of any
  type: a counter that is None before training is an integer in the checkpoint.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tectonic_client.checkpoint.dtypes import ELEMENT_TYPES, code_of_numpy, numpy_dtype
from tectonic_client.checkpoint.layout import METADATA_KEY, TensorInfo
from tectonic_client.checkpoint.leaves import Leaf, Refused, as_leaf
from tectonic_client.checkpoint.tree import (
    ArrayKind,
    ArrayNode,
    DictNode,
    Key,
    Node,
    NumpyScalar,
    Scalar,
    ScalarNode,
    SequenceNode,
)
from tectonic_client.errors import CorruptCheckpoint, StateMismatch, UnsupportedLeaf
from tectonic_client.limits import MAX_STATE_DEPTH

_PLAIN_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)

_MESSAGE_PROBLEMS: Final = 20
"""Problems spelled out in an error's message; its attribute has all."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: its tree, and the arrays that the tree refers to, each once."""

    state: Any
    tree: Node
    leaves: tuple[Leaf, ...]


def flatten(state: Any) -> FlatState:
    """Take a state apart. Raises UnsupportedLeaf naming every value that cannot be stored."""
    work = _Flattening()
    tree = work.node(state, ())
    if not isinstance(state, dict | list):
        work.problems.insert(0, f"the state itself is a {_type_name(state)}, not a dict or list")
    if work.problems:
        heading = "the state holds values that cannot be stored"
        raise UnsupportedLeaf(_listed(heading, work.problems))
    return FlatState(state, tree, tuple(work.leaves))


def _listed(heading: str, problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_MESSAGE_PROBLEMS])
    more = len(problems) - _MESSAGE_PROBLEMS
    return f"{heading}: {shown}" + (f"; and {more} more" if more > 0 else "")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else (
        f"{kind.__module__}.{kind.__qualname__}"
    )  # fmt: skip


Path = tuple[Key, ...]


def _dotted(path: Path) -> str:
    """The path as a tensor's name. Lone surrogates, which no JSON reader need accept, become ?."""
    return ".".join(map(str, path)).encode("utf-8", "replace").decode("utf-8")


@dataclass(slots=True)
class _Flattening:
    """One run of `flatten`."""

    leaves: list[Leaf] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=lambda: {"", METADATA_KEY})
    _known: dict[Any, Leaf] = field(default_factory=dict)
    _around: set[int] = field(default_factory=set)

    def node(self, value: Any, path: Path) -> Node:
        if type(value) in _PLAIN_SCALARS:
            return ScalarNode(value)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if isinstance(value, dict | list | tuple):
            return self._container(value, path)
        try:
            return self._array(value, path)
        except Refused as reason:
            return self._refuse(path, str(reason))

    def _refuse(self, path: Path, reason: str) -> Node:
        self.problems.append(f"{_dotted(path) or 'the state'} {reason}")
        return ScalarNode(None)

    def _numpy_scalar(self, value: np.generic, path: Path) -> Node:
        dtype = code_of_numpy(value.dtype)
        if dtype is None:
            return self._refuse(path, f"is a NumPy scalar of {value.dtype}")
        return ScalarNode(NumpyScalar(dtype, value.tobytes()))

    def _container(self, value: Any, path: Path) -> Node:
        if id(value) in self._around:
            return self._refuse(path, "contains itself")
        if len(path) >= MAX_STATE_DEPTH:
            return self._refuse(path, f"is nested deeper than {MAX_STATE_DEPTH} levels")
        self._around.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            items = tuple(self.node(item, (*path, index)) for index, item in enumerate(value))
            return SequenceNode(items, "list" if isinstance(value, list) else "tuple")
        finally:
            self._around.remove(id(value))

    def _dict(self, value: dict[Any, Any], path: Path) -> Node:
        items = []
        for key, item in value.items():
            if type(key) not in (str, int):
                self._refuse((*path, repr(key)), f"has a key of type {_type_name(key)}")
                continue
            items.append((key, self.node(item, (*path, key))))
        return DictNode(tuple(items), isinstance(value, OrderedDict))

    def _array(self, value: Any, path: Path) -> Node:
        name = self._unique(_dotted(path))
        leaf = as_leaf(value, name)
        if leaf is None:
            raise Refused(f"is a {_type_name(value)}")
        kind: ArrayKind = "array" if isinstance(value, np.ndarray) else "tensor"
        known = self._known.get(leaf.identity)
        if known is not None and leaf.nbytes:
            return ArrayNode(known.name, kind)
        self._names.add(name)
        self._known[leaf.identity] = leaf
        self.leaves.append(leaf)
        return ArrayNode(name, kind)

    def _unique(self, name: str) -> str:
        """`name`; name#2, name#3, ... where other paths read the same (a.b, or a key "a.b")."""
        unique, number = name, 1
        while unique in self._names:
            number += 1
            unique = f"{name}#{number}"
        return unique


# --- matching ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a checkpoint goes into a state: each tensor of the file with the leaves that take it."""

    flat: FlatState
    saved: Node
    targets: tuple[tuple[str, tuple[Leaf, ...]], ...]

    def assign(self) -> None:
        """Put the saved scalars into the state, after the arrays were read."""
        _assigned(self.flat.state, self.saved)


def match(flat: FlatState, saved: Node, tensors: Mapping[str, TensorInfo]) -> LoadPlan:
    """Hold a state against a checkpoint's tree and the tensors of its file.

    Raises StateMismatch with every difference at once, CorruptCheckpoint when the tree refers to a
    tensor that the file does not have.
    """
    work = _Matching({leaf.name: leaf for leaf in flat.leaves}, tensors)
    work.compare(flat.tree, saved, ())
    if work.problems:
        problems = tuple(work.problems)
        heading = f"the state differs from the checkpoint in {len(problems)} places"
        raise StateMismatch(_listed(heading, problems), problems)
    targets = tuple((name, tuple(leaves)) for name, leaves in work.targets.items())
    return LoadPlan(flat, saved, targets)


def _tensor(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise CorruptCheckpoint(f"checkpoint tree refers to tensor {name!r}, which is not there")
    return info


@dataclass(slots=True)
class _Matching:
    """One run of `match`; names on the left are the state's, on the right the checkpoint's."""

    leaves: Mapping[str, Leaf]
    tensors: Mapping[str, TensorInfo]
    problems: list[str] = field(default_factory=list)
    targets: dict[str, list[Leaf]] = field(default_factory=dict)
    _source: dict[str, str] = field(default_factory=dict)

    def compare(self, mine: Node, saved: Node, path: Path) -> None:
        match mine, saved:
            case ScalarNode(), ScalarNode():
                pass
            case ArrayNode(), ArrayNode():
                self._compare_arrays(mine, saved, path)
            case DictNode(), DictNode():
                self._compare_dicts(mine, saved, path)
            case SequenceNode(), SequenceNode() if mine.kind == saved.kind:
                self._compare_sequences(mine, saved, path)
            case _:
                self._differ(path, f"{_kind(mine)} in the state, {_kind(saved)} in the checkpoint")

    def _differ(self, path: Path, difference: str) -> None:
        self.problems.append(f"{_dotted(path) or 'the state'}: {difference}")

    def _compare_dicts(self, mine: DictNode, saved: DictNode, path: Path) -> None:
        left, right = dict(mine.items), dict(saved.items)
        for key, node in left.items():
            if key in right:
                self.compare(node, right[key], (*path, key))
            else:
                self._differ((*path, key), "in the state, not in the checkpoint")
        for key in right:
            if key not in left:
                self._differ((*path, key), "in the checkpoint, not in the state")

    def _compare_sequences(self, mine: SequenceNode, saved: SequenceNode, path: Path) -> None:
        left, right = len(mine.items), len(saved.items)
        if left != right:
            self._differ(path, f"{left} items in the state, {right} in the checkpoint")
        for index, (node, other) in enumerate(zip(mine.items, saved.items, strict=False)):
            self.compare(node, other, (*path, index))

    def _compare_arrays(self, mine: ArrayNode, saved: ArrayNode, path: Path) -> None:
        leaf, info = self.leaves[mine.name], _tensor(self.tensors, saved.name)
        if leaf.dtype != info.dtype:
            self._differ(path, f"dtype {leaf.dtype} in the state, {info.dtype} in the checkpoint")
        if leaf.shape != info.shape:
            shapes = f"shape {leaf.shape} in the state, {info.shape} in the checkpoint"
            self._differ(path, shapes)
        if leaf.load_problem is not None:
            self._differ(path, f"cannot be loaded into: it {leaf.load_problem}")
        source = self._source.setdefault(leaf.name, saved.name)
        if source != saved.name:
            tied = f"the same memory as {leaf.name} in the state, not in the checkpoint"
            self._differ(path, tied)
        leaves = self.targets.setdefault(saved.name, [])
        if leaf not in leaves:
            leaves.append(leaf)


def _kind(node: Node) -> str:
    match node:
        case ArrayNode():
            return "an array"
        case DictNode():
            return "a dict"
        case SequenceNode():
            return f"a {node.kind}"
        case ScalarNode():
            return "a scalar"


def _assigned(value: Any, saved: Node) -> Any:
    """The value with the saved scalars in it: itself where it can be changed in place."""
    match saved:
        case ArrayNode():
            return value
        case ScalarNode():
            return _scalar(saved.value)
        case DictNode():
            _assign_items(value, saved.items)
            return value
        case SequenceNode(kind="list"):
            _assign_items(value, enumerate(saved.items))
            return value
        case SequenceNode():
            items = [_assigned(item, node) for item, node in zip(value, saved.items, strict=True)]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return _same_tuple(value, items) if changed else value


def _assign_items(container: Any, items: Any) -> None:
    for key, node in items:
        old = container[key]
        new = _assigned(old, node)
        if new is not old:
            container[key] = new


def _same_tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the type of `value`, which may be a namedtuple."""
    make = getattr(type(value), "_make", type(value))
    return make(items)


def _scalar(value: Scalar) -> Any:
    if not isinstance(value, NumpyScalar):
        return value
    return np.frombuffer(value.data, numpy_dtype(value.dtype).newbyteorder("<"))[0]


# --- building ---------------------------------------------------------------------------------


def build(saved: Node, tensors: Mapping[str, TensorInfo]) -> Any:
    """A new state of this structure, its arrays uninitialised: load into it next.

    What was a torch tensor becomes one again where torch is installed, else a NumPy array.
    Raises UnsupportedLeaf naming every tensor that cannot be made, CorruptCheckpoint.
    """
    work = _Building(tensors)
    state = work.value(saved)
    if work.problems:
        raise UnsupportedLeaf(_listed("the checkpoint cannot be read", sorted(work.problems)))
    return state


@dataclass(slots=True)
class _Building:
    """One run of `build`."""

    tensors: Mapping[str, TensorInfo]
    problems: set[str] = field(default_factory=set)
    _made: dict[str, Any] = field(default_factory=dict)

    def value(self, node: Node) -> Any:
        match node:
            case ScalarNode():
                return self._attempt("a scalar", _scalar, node.value)
            case ArrayNode():
                if node.name not in self._made:
                    info = _tensor(self.tensors, node.name)
                    self._made[node.name] = self._attempt(node.name, _new_array, info, node.kind)
                return self._made[node.name]
            case DictNode():
                items = ((key, self.value(child)) for key, child in node.items)
                return OrderedDict(items) if node.ordered else dict(items)
            case SequenceNode():
                children = (self.value(child) for child in node.items)
                return list(children) if node.kind == "list" else tuple(children)

    def _attempt(self, what: str, make: Any, *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except UnsupportedLeaf as reason:
            self.problems.add(f"{what}: {reason}")
            return None


def _new_array(info: TensorInfo, kind: ArrayKind) -> Any:
    element = ELEMENT_TYPES[info.dtype]
    if kind == "tensor" and element.torch and importlib.util.find_spec("torch"):
        torch: Any = importlib.import_module("torch")
        return torch.empty(info.shape, dtype=getattr(torch, element.torch))
    return np.empty(info.shape, numpy_dtype(info.dtype))
