"""The tree document: every structure survives, hostile documents are refused."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectonic_client.checkpoint.tree import (
    ArrayNode,
    DictNode,
    Node,
    NumpyScalar,
    ScalarNode,
    SequenceNode,
    arrays_of,
    decode_tree,
    encode_tree,
)
from tectonic_client.errors import CorruptCheckpoint, FormatTooNew

text = st.text(st.characters(), max_size=8)
keys = text | st.integers()
numpy_scalars = st.sampled_from((("F32", 4), ("BOOL", 1), ("BF16", 2), ("C64", 8))).flatmap(
    lambda kind: st.binary(min_size=kind[1], max_size=kind[1]).map(
        lambda data: NumpyScalar(kind[0], data)
    )
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers().map(lambda n: n << 20_000), st.floats(),
    st.complex_numbers(), text, st.binary(max_size=8), numpy_scalars,
)  # fmt: skip
arrays = st.builds(ArrayNode, text, st.sampled_from(("array", "tensor")))


def containers(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    items = st.lists(children, max_size=4).map(tuple)
    dicts = st.dictionaries(keys, children, max_size=4).map(lambda d: tuple(d.items()))
    return st.builds(SequenceNode, items, st.sampled_from(("list", "tuple"))) | st.builds(
        DictNode, dicts, st.booleans()
    )


nodes = st.recursive(scalars.map(ScalarNode) | arrays, containers, max_leaves=12)


def exact(value: Any) -> Any:
    """A form that tells 1 from 1.0 and True, -0.0 from 0.0, and one NaN from another."""
    match value:
        case ScalarNode(v):
            return exact(v)
        case DictNode(items, ordered):
            return ordered, [(type(key), key, exact(node)) for key, node in items]
        case SequenceNode(items, kind):
            return kind, [exact(node) for node in items]
        case float():
            return struct.pack("<d", value)
        case complex():
            return "complex", exact(value.real), exact(value.imag)
        case _:
            return type(value), value


@given(nodes)
def test_every_tree_survives(node: Node) -> None:
    """Decoding an encoded tree gives the same tree, types and bits of scalars included."""
    document = encode_tree(node)
    assert document.isascii()
    assert exact(decode_tree(document)) == exact(node)


def test_the_document_is_plain_json() -> None:
    """A strict JSON parser in another language can read the document: no NaN, no huge numbers."""
    values = (math.nan, math.inf, 1 << 60, -(1 << 53), 0.1, None, "\ud800")
    document = encode_tree(SequenceNode(tuple(map(ScalarNode, values)), "list"))
    parsed = json.loads(document, parse_constant=pytest.fail)
    assert parsed["root"]["list"][1:] == [
        {"float": "000000000000f07f"}, {"int": "0x1000000000000000"}, -(1 << 53), 0.1, None,
        "\ud800",
    ]  # fmt: skip


def test_golden_document() -> None:
    """The bytes of version 1 of the format."""
    tree = DictNode(
        (
            ("model", DictNode((("w", ArrayNode("model.w", "tensor")),), ordered=True)),
            (0, SequenceNode((ScalarNode(1), ScalarNode(2.5), ScalarNode(None)), "tuple")),
            ("raw", ScalarNode(b"\x00\xff")),
            ("lr", ScalarNode(NumpyScalar("F32", b"\x00\x00\x80\x3f"))),
            ("rng", ArrayNode("rng", "array")),
        )
    )
    golden = (
        '{"version":1,"root":{"dict":[["model",{"ordered":[["w",{"tensor":"model.w"}]]}],'
        '[0,{"tuple":[1,2.5,null]}],["raw",{"bytes":"AP8="}],["lr",{"numpy":["F32","0000803f"]}],'
        '["rng",{"array":"rng"}]]}}'
    )
    assert encode_tree(tree) == golden
    assert decode_tree(golden) == tree


def test_arrays_in_order() -> None:
    """arrays_of names every reference, tied ones each time."""
    tied = ArrayNode("a", "array")
    tree = DictNode((("x", SequenceNode((tied, ScalarNode(1), tied), "list")), ("y", tied)))
    assert [node.name for node in arrays_of(tree)] == ["a", "a", "a"]


HOSTILE = (
    "", "[]", "{}", "null", '{"version":1}', '{"version":true,"root":1}', '{"version":1,"root":[]}',
    '{"version":1,"root":{}}', '{"version":1,"root":{"a":1,"b":2}}',
    '{"version":1,"root":{"object":"os.system"}}', '{"version":1,"root":NaN}',
    '{"version":1,"root":{"dict":[1]}}', '{"version":1,"root":{"dict":[["a",1],["a",2]]}}',
    '{"version":1,"root":{"dict":[[1.5,1]]}}', '{"version":1,"root":{"dict":[[true,1]]}}',
    '{"version":1,"root":{"dict":[["a"]]}}', '{"version":1,"root":{"dict":{"a":1}}}',
    '{"version":1,"root":{"int":"zz"}}', '{"version":1,"root":{"int":5}}',
    '{"version":1,"root":{"float":"00"}}', '{"version":1,"root":{"complex":[1.0]}}',
    '{"version":1,"root":{"complex":[1.0,{"int":"0x1"}]}}', '{"version":1,"root":{"bytes":"***"}}',
    '{"version":1,"root":{"numpy":["F32","00"]}}', '{"version":1,"root":{"numpy":["F4","00"]}}',
    '{"version":1,"root":{"numpy":[[],"00"]}}', '{"version":1,"root":{"numpy":["X","00"]}}',
    '{"version":1,"root":{"tensor":7}}', '{"version":1,"root":' + "9" * 10_000 + "}",
    '{"version":1,"root":' + '{"list":[' * 100 + "1" + "]}" * 100 + "}", "[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("document", HOSTILE, ids=lambda document: document[:60])
def test_hostile_documents(document: str) -> None:
    """Anything but a well-formed tree is CorruptCheckpoint, never another exception."""
    with pytest.raises(CorruptCheckpoint):
        decode_tree(document)


@given(nodes, st.data())
def test_damaged_documents(node: Node, data: st.DataObject) -> None:
    """A document with a character changed decodes to some tree or is CorruptCheckpoint."""
    document = encode_tree(node)
    place = data.draw(st.integers(0, len(document) - 1))
    damaged = document[:place] + data.draw(st.sampled_from('"[]{}:,0an')) + document[place + 1 :]
    with contextlib.suppress(CorruptCheckpoint, FormatTooNew):
        decode_tree(damaged)


def test_newer_versions_are_refused() -> None:
    """A tree of a newer release is not guessed at."""
    with pytest.raises(FormatTooNew, match="upgrade"):
        decode_tree('{"version":2,"root":{"set":[]}}')
