"""The element types of safetensors and what they are called in NumPy and torch.

Pure. Torch and ml_dtypes are known by name only: neither is imported here, except ml_dtypes when an
array of one of its types is to be made.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

import numpy as np

from tectonic_client.errors import UnsupportedLeaf


class ElementType(NamedTuple):
    """One element type; None where NumPy (with ml_dtypes) or torch has no such type."""

    code: str
    bits: int
    numpy: str | None
    torch: str | None


ELEMENT_TYPES: Final = {
    element.code: element
    for element in (
        ElementType("BOOL", 8, "bool", "bool"),
        ElementType("U8", 8, "uint8", "uint8"),
        ElementType("I8", 8, "int8", "int8"),
        ElementType("F8_E5M2", 8, "float8_e5m2", "float8_e5m2"),
        ElementType("F8_E4M3", 8, "float8_e4m3fn", "float8_e4m3fn"),
        ElementType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        ElementType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "float8_e4m3fnuz"),
        ElementType("F8_E8M0", 8, "float8_e8m0fnu", "float8_e8m0fnu"),
        ElementType("U16", 16, "uint16", "uint16"),
        ElementType("I16", 16, "int16", "int16"),
        ElementType("F16", 16, "float16", "float16"),
        ElementType("BF16", 16, "bfloat16", "bfloat16"),
        ElementType("U32", 32, "uint32", "uint32"),
        ElementType("I32", 32, "int32", "int32"),
        ElementType("F32", 32, "float32", "float32"),
        ElementType("U64", 64, "uint64", "uint64"),
        ElementType("I64", 64, "int64", "int64"),
        ElementType("F64", 64, "float64", "float64"),
        ElementType("C64", 64, "complex64", "complex64"),
        # Legal in a file, but packed: no array library holds them as elements.
        ElementType("F4", 4, None, None),
        ElementType("F6_E2M3", 6, None, None),
        ElementType("F6_E3M2", 6, None, None),
    )
}

_CODE_OF_NUMPY: Final = {
    element.numpy: element.code for element in ELEMENT_TYPES.values() if element.numpy
}
_CODE_OF_TORCH: Final = {
    element.torch: element.code for element in ELEMENT_TYPES.values() if element.torch
}


def code_of_numpy(dtype: np.dtype[Any]) -> str | None:
    """The safetensors name of a NumPy dtype of either byte order; None if there is none."""
    if dtype.kind == "V" and dtype.type.__module__ != "ml_dtypes":
        return None
    return _CODE_OF_NUMPY.get(dtype.name)


def code_of_torch(dtype: object) -> str | None:
    """The safetensors name of a torch dtype; None if there is none."""
    return _CODE_OF_TORCH.get(str(dtype).removeprefix("torch."))


def numpy_dtype(code: str) -> np.dtype[Any]:
    """The NumPy dtype of a safetensors name.

    Raises UnsupportedLeaf when NumPy has no such type or ml_dtypes, which adds it, is missing.
    """
    name = ELEMENT_TYPES[code].numpy
    if name is None:
        raise UnsupportedLeaf(f"NumPy has no arrays of {code}")
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        module = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise UnsupportedLeaf(
            f"NumPy arrays of {code} need the package ml_dtypes: pip install ml_dtypes"
        ) from error
    added: np.dtype[Any] = np.dtype(getattr(module, name))
    return added
