"""The structure of a state: what is in which container, scalars by value, arrays by name.

It is stored as a JSON document in the metadata of the safetensors file (key `tectonicfs.tree`):

    {"version": 1, "root": NODE}

    null, true, false, "text", 3, 0.5      scalars; integers beyond 2**53 and non-finite floats:
    {"int": "-0x1f"}  {"float": "0000000000f87f00"}   hexadecimal; IEEE 754 bytes, little-endian
    {"complex": [REAL, IMAG]}              two floats as above
    {"bytes": "base64"}
    {"numpy": ["F32", "0000803f"]}         NumPy scalar: element type, little-endian bytes in hex
    {"dict": [[KEY, NODE], ...]}           KEY is a string, or an integer as above
    {"ordered": [[KEY, NODE], ...]}        collections.OrderedDict
    {"list": [NODE, ...]}  {"tuple": [NODE, ...]}
    {"array": "name"}  {"tensor": "name"}  NumPy array, torch tensor: a tensor of the file

The document is ASCII, without spaces, and the same for equal trees. Pure.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from tectonic_client.checkpoint.dtypes import ELEMENT_TYPES
from tectonic_client.errors import CorruptCheckpoint, FormatTooNew
from tectonic_client.limits import MAX_STATE_DEPTH

TREE_VERSION: Final = 1

_EXACT_JSON_INT: Final = 1 << 53
"""Beyond it, JSON readers that hold numbers as doubles lose digits."""


class NumpyScalar(NamedTuple):
    """A NumPy scalar: safetensors element type and little-endian bytes."""

    dtype: str
    data: bytes


Scalar: TypeAlias = bool | int | float | complex | str | bytes | NumpyScalar | None
Key: TypeAlias = str | int
ArrayKind: TypeAlias = Literal["array", "tensor"]


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """A value that is kept in the tree itself."""

    value: Scalar


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """A reference to a tensor of the file; `kind` is what it was in the state."""

    name: str
    kind: ArrayKind


@dataclass(frozen=True, slots=True)
class DictNode:
    """A dict in its order."""

    items: tuple[tuple[Key, Node], ...]
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list or tuple."""

    items: tuple[Node, ...]
    kind: Literal["list", "tuple"]


Node: TypeAlias = ScalarNode | ArrayNode | DictNode | SequenceNode


def arrays_of(node: Node) -> Iterator[ArrayNode]:
    """All references to tensors, in order; a tied tensor appears more than once."""
    if isinstance(node, ArrayNode):
        yield node
    elif isinstance(node, DictNode):
        for _, child in node.items:
            yield from arrays_of(child)
    elif isinstance(node, SequenceNode):
        for child in node.items:
            yield from arrays_of(child)


# --- encoding ---------------------------------------------------------------------------------


def encode_tree(root: Node) -> str:
    """The document of a tree."""
    document = {"version": TREE_VERSION, "root": _encode(root)}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _encode(node: Node) -> Any:
    match node:
        case ScalarNode(value):
            return _encode_scalar(value)
        case ArrayNode(name, kind):
            return {kind: name}
        case DictNode(items, ordered):
            pairs = [[_encode_scalar(key), _encode(child)] for key, child in items]
            return {"ordered" if ordered else "dict": pairs}
        case SequenceNode(items, kind):
            return {kind: [_encode(child) for child in items]}


def _encode_scalar(value: Scalar) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if abs(value) <= _EXACT_JSON_INT else {"int": hex(value)}
        case float():
            return _encode_float(value)
        case complex():
            return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}
        case NumpyScalar(dtype, data):
            return {"numpy": [dtype, data.hex()]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode("ascii")}


def _encode_float(value: float) -> Any:
    finite = value - value == 0.0
    return value if finite else {"float": struct.pack("<d", value).hex()}


# --- decoding ---------------------------------------------------------------------------------


def decode_tree(document: str) -> Node:
    """The tree of a document. Raises CorruptCheckpoint, FormatTooNew."""
    try:
        value = json.loads(document, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"checkpoint tree is not JSON: {error}") from error
    if not isinstance(value, dict) or type(value.get("version")) is not int or "root" not in value:
        raise CorruptCheckpoint("checkpoint tree has no version or no root")
    if value["version"] > TREE_VERSION:
        raise FormatTooNew(
            f"checkpoint tree version {value['version']} was written by a newer release"
            f" (this one knows {TREE_VERSION}): upgrade tectonicfs"
        )
    try:
        return _decode(value["root"], 0)
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise CorruptCheckpoint(f"checkpoint tree: {error}") from error


def _decode(value: Any, depth: int) -> Node:
    if depth > MAX_STATE_DEPTH:
        raise ValueError(f"nested deeper than {MAX_STATE_DEPTH}")
    if not isinstance(value, dict):
        return ScalarNode(_decode_plain(value))
    tag, content = _single_item(value)
    if tag in _SCALAR_DECODERS:
        return ScalarNode(_SCALAR_DECODERS[tag](content))
    if tag in ("array", "tensor"):
        return ArrayNode(_text(content), tag)  # type: ignore[arg-type]  # checked just above
    if tag in ("list", "tuple"):
        children = tuple(_decode(child, depth + 1) for child in _items(content))
        return SequenceNode(children, tag)  # type: ignore[arg-type]  # checked just above
    if tag in ("dict", "ordered"):
        return _decode_dict(_items(content), tag == "ordered", depth)
    raise ValueError(f"unknown node {tag!r}")


def _decode_dict(pairs: list[Any], ordered: bool, depth: int) -> DictNode:
    items = tuple((_decode_key(key), _decode(child, depth + 1)) for key, child in pairs)
    if len({key for key, _ in items}) != len(items):
        raise ValueError("a dict has the same key twice")
    return DictNode(items, ordered)


def _decode_key(value: Any) -> Key:
    if isinstance(value, dict):
        tag, content = _single_item(value)
        if tag == "int":
            return _decode_int(content)
    elif type(value) in (str, int):
        return value  # type: ignore[no-any-return]  # checked just above
    raise ValueError("a key of a dict is neither a string nor an integer")


def _decode_plain(value: Any) -> Scalar:
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]  # checked just above
    raise ValueError(f"unexpected {type(value).__name__}")


def _decode_int(content: Any) -> int:
    return int(_text(content), 16)


def _decode_float_bytes(content: Any) -> float:
    return float(struct.unpack("<d", bytes.fromhex(_text(content)))[0])


def _decode_complex(content: Any) -> complex:
    real, imaginary = (_decode_part(part) for part in _items(content))
    return complex(real, imaginary)


def _decode_part(content: Any) -> float:
    if type(content) is float:
        return content
    return _decode_float_bytes(content["float"])


def _decode_bytes(content: Any) -> bytes:
    return base64.b64decode(_text(content), validate=True)


def _decode_numpy(content: Any) -> NumpyScalar:
    dtype, digits = _items(content)
    data = bytes.fromhex(_text(digits))
    if len(data) * 8 != ELEMENT_TYPES[dtype].bits:
        raise ValueError(f"{len(data)} bytes are not one {dtype}")
    return NumpyScalar(dtype, data)


_SCALAR_DECODERS: Final[dict[str, Callable[[Any], Scalar]]] = {
    "int": _decode_int,
    "float": _decode_float_bytes,
    "complex": _decode_complex,
    "bytes": _decode_bytes,
    "numpy": _decode_numpy,
}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _single_item(value: dict[Any, Any]) -> tuple[str, Any]:
    if len(value) != 1:
        raise ValueError(f"a node with {len(value)} tags")
    return next(iter(value.items()))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, found {type(value).__name__}")
    return value
