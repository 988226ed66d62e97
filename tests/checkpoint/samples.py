"""Arrays, tensors and states of every kind, for the tests of this directory."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import torch

Pair = namedtuple("Pair", "left right")

TORCH_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip

ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


def random_words(shape: tuple[int, ...], size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random unsigned words of `size` bytes."""
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * size)
    return np.frombuffer(bytearray(data), f"u{size}").reshape(shape)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """NumPy arrays of every layout; contents random."""
    base = random_words((6, 7, 5), 4)
    samples: dict[str, np.ndarray[Any, Any]] = {
        "contiguous": base.copy(),
        "fortran": np.asfortranarray(base),
        "transposed": base.transpose(2, 0, 1),
        "strided": base[::2, 1:6, ::3],
        "reversed": base[::-1, :, ::-1],
        "column": base[:, 3, 1],
        "scalar": np.array(3.5, np.float32),
        "empty": np.empty((3, 0, 2), np.int64),
        "one": np.arange(1, dtype=np.int8),
        "big_endian": base.astype(">u4"),
        "big_endian_strided": base.astype(">u4").view(">f4")[:, ::2].T,
        "big_endian_scalar": np.array(7, ">i2"),
        "bool": base % 2 == 0,
        "half_strided": random_words((8, 9), 2).view(np.float16)[1:, ::2],
    }
    for name in ML_DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name))
        samples[name] = random_words((5, 6), dtype.itemsize).view(dtype)
        samples[f"{name}_strided"] = samples[name].T[1:, ::-2]
    return samples


def tensors() -> dict[str, torch.Tensor]:
    """Torch tensors of every dtype and layout; contents random bits (bool: 0 and 1)."""
    samples: dict[str, torch.Tensor] = {}
    for dtype in TORCH_DTYPES:
        words = random_words((4, 5, 3), dtype.itemsize)
        bits = words % 2 if dtype == torch.bool else words
        signed = torch.from_numpy(bits.view(f"i{dtype.itemsize}").copy())
        tensor = signed.view(dtype) if dtype != torch.bool else signed.bool()
        name = str(dtype).removeprefix("torch.")
        samples[name] = tensor
        samples[f"{name}_strided"] = tensor.permute(2, 0, 1)[:, 1:, ::2]
        samples[f"{name}_scalar"] = tensor[1, 2, 0]
    samples["parameter"] = torch.nn.Parameter(torch.randn(3, 4))
    samples["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    samples["empty"] = torch.empty(0, 3)
    return samples


def serialised(value: Any) -> bytes:
    """The C-order, little-endian bytes of an array or tensor, made the plain way."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    order = ">" if value.dtype.byteorder == ">" else "<"
    words = np.ascontiguousarray(value).view(f"{order}u{value.itemsize}")
    return words.astype(f"<u{value.itemsize}").tobytes()


def plain(value: Any) -> Any:
    """A form that can be compared: containers by kind, arrays and scalars by type and bytes."""
    if isinstance(value, dict):
        return isinstance(value, OrderedDict), [(k, plain(v)) for k, v in value.items()]
    if isinstance(value, list):
        return "list", [plain(item) for item in value]
    if isinstance(value, tuple):
        return "tuple", [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), serialised(value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.name, value.shape, serialised(value)
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), repr(value)


def model_state() -> dict[str, Any]:
    """A state as a training loop has it: torch's model and optimizer, and what else is needed."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy_rng": np.random.default_rng(1).bit_generator.state,
        "step": 12,
        "best": None,
        "history": [1.5, float("nan"), float("inf")],
        "arrays": arrays(),
        "tensors": tensors(),
        "scalars": {
            "np": np.float32(1.5), "bf16": ml_dtypes.bfloat16(2.5), "bool": np.bool_(True),
            "complex": 1 + 2j, "bytes": b"\x00\xff", "text": "ü\n", "big": 1 << 100,
            "size": torch.Size([3, 4]), "pair": Pair(1, (2, [3])), "empty": {}, "none": [],
        },
    }  # fmt: skip
