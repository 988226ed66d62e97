"""Arrays and tensors of every kind that a state may hold, for the tests of this directory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

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
