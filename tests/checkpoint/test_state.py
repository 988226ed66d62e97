"""States: taking apart, matching against a checkpoint, loading in place, building anew."""

from __future__ import annotations

import copy
import enum
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tectonic_client.checkpoint.layout import Layout, Shaped, lay_out
from tectonic_client.checkpoint.state import FlatState, LoadPlan, build, flatten, match
from tectonic_client.checkpoint.tree import Node, decode_tree, encode_tree
from tectonic_client.errors import CorruptCheckpoint, StateMismatch, UnsupportedLeaf
from tests.checkpoint.samples import Pair, model_state, plain, serialised


class Saved:
    """A checkpoint in memory: tree, layout and the bytes of each tensor."""

    def __init__(self, state: Any) -> None:
        flat = flatten(state)
        self.tree: Node = decode_tree(encode_tree(flat.tree))
        shaped = [Shaped(leaf.name, leaf.dtype, leaf.shape) for leaf in flat.leaves]
        self.layout: Layout = lay_out(shaped, {})[0]
        self.data = {leaf.name: bytearray(leaf.nbytes) for leaf in flat.leaves}
        for leaf in flat.leaves:
            leaf.copy_out(0, leaf.nbytes, memoryview(self.data[leaf.name]))

    def plan(self, state: Any) -> LoadPlan:
        return match(flatten(state), self.tree, self.layout.by_name())

    def load(self, state: Any) -> None:
        plan = self.plan(state)
        for name, leaves in plan.targets:
            for leaf in leaves:
                leaf.copy_in(0, leaf.nbytes, memoryview(self.data[name]))
        plan.assign()

    def read(self) -> Any:
        state = build(self.tree, self.layout.by_name())
        self.load(state)
        return state


def test_a_training_state_survives() -> None:
    """A real torch state is read back with the same structure, types and bits."""
    state = model_state()
    back = Saved(state).read()
    expected = copy.deepcopy(state)
    for name in ("big_endian", "big_endian_strided", "big_endian_scalar"):
        array = expected["arrays"][name]
        expected["arrays"][name] = array.astype(array.dtype.newbyteorder("<"))
    assert plain(back) == plain(expected)


def test_loading_is_in_place() -> None:
    """Arrays, tensors and containers keep their identity; only tuples with scalars are replaced."""
    state = model_state()
    saved = Saved(state)
    target = model_state()
    weight, group = target["model"]["0.weight"], target["optimizer"]["param_groups"][0]
    with torch.no_grad():
        for tensor in target["tensors"].values():
            tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).zero_()
    group["betas"] = (0.1, 0.2)
    target["best"] = 5.0
    target["scalars"]["pair"] = Pair(7, (8, [9]))
    inner_list = target["scalars"]["pair"].right[1]
    saved.load(target)
    assert plain(target) == plain(state)
    assert target["model"]["0.weight"] is weight
    assert target["optimizer"]["param_groups"][0] is group
    assert group["betas"] == (0.9, 0.95)
    assert isinstance(target["scalars"]["pair"], Pair)
    assert isinstance(target["scalars"]["size"], torch.Size)
    assert target["scalars"]["pair"].right[1] is inner_list


def test_an_optimizer_goes_on() -> None:
    """A model and optimizer restored through their state_dicts take the same next step."""

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 3), float(seed))).sum().backward()
        optimizer.step()

    model, optimizer = start()
    step(model, optimizer, 1)
    saved = Saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer, 2)
    other, other_optimizer = start()
    state = saved.read()
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    step(other, other_optimizer, 2)
    assert plain(other.state_dict()) == plain(model.state_dict())


def test_tied_tensors_are_stored_once() -> None:
    """The same view of the same memory is one leaf, and tied again when read anew."""
    weight = torch.randn(4, 3)
    state = {"embed": weight, "head": torch.nn.Parameter(weight), "other": weight.clone()}
    state["view"] = weight.t()
    flat = flatten(state)
    assert [leaf.name for leaf in flat.leaves] == ["embed", "other", "view"]
    back = Saved(state).read()
    assert back["embed"] is back["head"]
    np_state = [np.zeros(3)] * 2
    assert len(flatten(np_state).leaves) == 1
    empties = [np.empty((0, 2)), np.empty((0, 2))]
    assert len(flatten([empties[0], empties[0], empties[1]]).leaves) == 3


def test_tied_in_one_place_only() -> None:
    """Loading a tied checkpoint into untied tensors fills both; the reverse is a mismatch."""
    tied = np.arange(3.0)
    untied = {"a": np.zeros(3), "b": np.zeros(3)}
    Saved({"a": tied, "b": tied}).load(untied)
    assert untied["a"].tolist() == untied["b"].tolist() == [0, 1, 2]
    shared = np.zeros(3)
    with pytest.raises(StateMismatch, match="b: the same memory as a in the state"):
        Saved({"a": np.ones(3), "b": np.zeros(3)}).plan({"a": shared, "b": shared})


def names(state: Any) -> list[str]:
    return [leaf.name for leaf in flatten(state).leaves]


def test_tensor_names() -> None:
    """Names are dotted paths; where paths read the same, a number tells them apart."""
    one = [np.zeros(1) for _ in range(9)]
    state = {"a": {"b": one[0], 0: one[1]}, "a.b": one[2], "a.b#2": one[3], "l": [one[4]]}
    assert names(state) == ["a.b", "a.0", "a.b#2", "a.b#2#2", "l.0"]
    assert names({"__metadata__": one[0], "": one[1]}) == ["__metadata__#2", "#2"]
    assert names({"\ud800": one[0], "?": one[1]}) == ["?", "?#2"]
    assert names({1: one[0], "1": one[1]}) == ["1", "1#2"]
    for awkward in (state, {1: one[0], "1": one[1]}, {"\ud800": one[0], "": one[1]}):
        assert plain(Saved(awkward).read()) == plain(awkward)


class Colour(enum.IntEnum):
    RED = 1


def test_every_unsupported_value_is_named() -> None:
    """One error lists the path and the reason of everything that cannot be stored."""
    loop: dict[str, Any] = {}
    loop["self"] = [loop]
    state = {
        "ok": np.zeros(2),
        "set": {1, 2},
        "objects": [object()],
        "sparse": {"grad": torch.eye(2).to_sparse()},
        "enum": Colour.RED,
        "keys": {(1, 2): 3, True: 4, 2.5: 5},
        "loop": loop,
        "dtype": torch.float32,
        "wide": np.longdouble(1),
    }
    with pytest.raises(UnsupportedLeaf) as caught:
        flatten(state)
    message = str(caught.value)
    for part in (
        "set is a set", "objects.0 is a object", "sparse.grad is sparse", "enum is a ",
        "keys.(1, 2) has a key of type tuple", "keys.True has a key of type bool",
        "keys.2.5 has a key of type float", "loop.self.0 contains itself",
        "dtype is a torch.dtype", "wide is a NumPy scalar of",
    ):  # fmt: skip
        assert part in message
    assert "\n" not in message
    assert "ok" not in message.split("stored: ")[1].split()


@pytest.mark.parametrize("state", [np.zeros(3), 5, (1, 2), None], ids=repr)
def test_the_state_must_be_mutable(state: Any) -> None:
    """Loading in place needs a dict or list to load into."""
    with pytest.raises(UnsupportedLeaf, match="the state itself is a"):
        flatten(state)


def test_absurd_depth() -> None:
    """Nesting beyond the limit is an error, not a stack overflow; up to it all is well."""
    deep: list[Any] = []
    for _ in range(63):
        deep = [deep]
    assert Saved(deep).read() == deep
    with pytest.raises(UnsupportedLeaf, match="nested deeper than 64"):
        flatten([deep])
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedLeaf, match="nested deeper than 64"):
        flatten(deep)
    while deep:
        deep = deep.pop()


def test_subclasses_of_containers() -> None:
    """defaultdict is read back as dict, OrderedDict as itself; loading keeps the caller's types."""
    target = defaultdict(int, a=1)
    saved = Saved(defaultdict(int, a=2))
    assert type(saved.read()) is dict
    saved.load(target)
    assert target == {"a": 2}
    assert type(target) is defaultdict


def mismatches(saved: Any, state: Any) -> tuple[str, ...]:
    with pytest.raises(StateMismatch) as caught:
        Saved(saved).plan(state)
    assert "\n" not in str(caught.value)
    return caught.value.problems


def test_all_mismatches_at_once() -> None:
    """Every difference is listed with its path, in one error."""
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    saved = {
        "gone": np.zeros(1), "shape": np.zeros((2, 3)), "dtype": torch.zeros(2), "kind": {"a": 1},
        "scalar": 1, "list": [1, 2, np.zeros(1)], "tuple": (1,), "frozen": np.zeros(2), 1: 0,
    }  # fmt: skip
    state = {
        "new": np.zeros(1), "shape": np.zeros((3, 2)), "dtype": torch.zeros(2).half(), "kind": [1],
        "scalar": np.zeros(1), "list": [1, np.zeros(1)], "tuple": [1], "frozen": frozen, "1": 0,
    }  # fmt: skip
    assert sorted(mismatches(saved, state)) == [
        "1: in the checkpoint, not in the state",
        "1: in the state, not in the checkpoint",
        "dtype: dtype F16 in the state, F32 in the checkpoint",
        "frozen: cannot be loaded into: it is read-only",
        "gone: in the checkpoint, not in the state",
        "kind: a list in the state, a dict in the checkpoint",
        "list.1: an array in the state, a scalar in the checkpoint",
        "list: 2 items in the state, 3 in the checkpoint",
        "new: in the state, not in the checkpoint",
        "scalar: an array in the state, a scalar in the checkpoint",
        "shape: shape (3, 2) in the state, (2, 3) in the checkpoint",
        "tuple: a list in the state, a tuple in the checkpoint",
    ]


def test_many_mismatches_keep_the_message_short() -> None:
    """A thousand differences give a readable message; the attribute has them all."""
    saved = {f"k{i}": np.zeros(1) for i in range(1000)}
    state: dict[str, Any] = {}
    problems = mismatches(saved, state)
    assert len(problems) == 1000
    with pytest.raises(StateMismatch, match=r"in 1000 places: .*; and 980 more$"):
        Saved(saved).plan(state)


def test_numpy_and_torch_are_interchangeable() -> None:
    """What was saved from torch loads into NumPy arrays of the same dtype, and back."""
    source = torch.randn(3, 4).bfloat16().t()
    target = np.zeros((4, 3), ml_dtypes.bfloat16)
    Saved({"x": source}).load({"x": target})
    assert serialised(target) == serialised(source)
    back = torch.zeros(4, 3, dtype=torch.bfloat16)
    Saved({"x": target}).load({"x": back})
    assert torch.equal(back, source)


def test_a_tree_that_lies_about_its_tensors() -> None:
    """A reference to a tensor that the file lacks is corruption, at load and at read."""
    saved = Saved({"x": np.zeros(2)})
    for use in (
        lambda: build(saved.tree, {}),
        lambda: match(flatten({"x": np.zeros(2)}), saved.tree, {}),
    ):
        with pytest.raises(CorruptCheckpoint, match="'x', which is not there"):
            use()


def test_without_torch() -> None:
    """Without torch installed, what was a torch tensor is read as a NumPy array."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'torch' else find(name)\n"
        "from tectonic_client.checkpoint.layout import TensorInfo\n"
        "from tectonic_client.checkpoint.state import build, flatten\n"
        "from tectonic_client.checkpoint.tree import ArrayNode, DictNode\n"
        "tree = DictNode((('x', ArrayNode('x', 'tensor')),))\n"
        "state = build(tree, {'x': TensorInfo('x', 'BF16', (2, 3), 0, 12)})\n"
        "assert state['x'].dtype.name == 'bfloat16' and state['x'].shape == (2, 3)\n"
        "assert flatten(state).leaves[0].nbytes == 12\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_building_what_no_library_holds() -> None:
    """Packed types and missing ml_dtypes are named with the tensors they hit."""
    saved = Saved({"x": np.zeros(2, np.uint8)})
    packed = {"x": saved.layout.by_name()["x"].__class__("x", "F4", (4,), 0, 2)}
    with pytest.raises(UnsupportedLeaf, match="x: NumPy has no arrays of F4"):
        build(saved.tree, packed)


def test_flat_state_reports_its_leaves() -> None:
    """Leaves carry name, safetensors dtype, shape and size in bytes."""
    flat: FlatState = flatten({"w": torch.zeros(2, 3, dtype=torch.float8_e4m3fn), "n": 1})
    (leaf,) = flat.leaves
    assert (leaf.name, leaf.dtype, leaf.shape, leaf.nbytes) == ("w", "F8_E4M3", (2, 3), 6)


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "list scalar": lambda state: state["l"].__setitem__(0, 9),
    "nested tuple": lambda state: state["l"].__setitem__(1, (7, (8, None))),
    "dict scalar": lambda state: state.__setitem__("n", "text"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_assign_restores_scalars_anywhere(name: str) -> None:
    """A changed scalar is put back, of whatever type it has become."""
    state: dict[str, Any] = {"l": [1, (2, (3, None))], "n": None}
    saved = Saved(copy.deepcopy(state))
    expected = copy.deepcopy(state)
    MUTATIONS[name](state)
    saved.load(state)
    assert state == expected
