"""The state that checkpoint benchmarks save: the tensors of a transformer, sharded over ranks.

Each matrix is cut along its first dimension, as fully sharded data parallelism does, so a rank
holds many tensors of a few MiB and some of a few KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

_ELEMENT_BYTES: Final = 2
"""bfloat16."""

_WIDTHS: Final = (8192, 4096, 2048, 1024, 512, 256, 128, 64)

_MIN_LAYERS: Final = 8

_WEIGHT_DEVIATION: Final = 0.02
"""Standard deviation that transformers' weights are initialised with."""


def shard_shapes(total_bytes: int, world_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one rank's tensors, so that all ranks hold about `total_bytes` of bfloat16.

    The width is the largest one that leaves room for some layers; the embedding takes what the
    layers leave.
    """
    rank_elements = total_bytes // _ELEMENT_BYTES // world_size
    for width in _WIDTHS:
        layer = _layer_shapes(width, world_size)
        layers = rank_elements // _elements(layer) - 1
        if layers >= _MIN_LAYERS or width == _WIDTHS[-1]:
            break
    layers = max(layers, 0)
    shapes = {
        f"layers.{number}.{name}": shape
        for number in range(layers)
        for name, shape in layer.items()
    }
    rows = (rank_elements - layers * _elements(layer)) // width
    return {"embedding.weight": (max(rows, 1), width), **shapes}


def _layer_shapes(width: int, world_size: int) -> dict[str, tuple[int, ...]]:
    rows = max(1, width // world_size)
    hidden = 8 * width // 3 // 64 * 64
    return {
        "attention_norm.weight": (rows,),
        "attention.query.weight": (rows, width),
        "attention.key.weight": (rows, width),
        "attention.value.weight": (rows, width),
        "attention.output.weight": (rows, width),
        "feed_forward_norm.weight": (rows,),
        "feed_forward.gate.weight": (max(1, hidden // world_size), width),
        "feed_forward.up.weight": (max(1, hidden // world_size), width),
        "feed_forward.down.weight": (rows, hidden),
    }


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def size_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of tensors with these shapes."""
    return _elements(shapes) * _ELEMENT_BYTES


def make_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of random weights, bfloat16, each in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(
            std=_WEIGHT_DEVIATION, generator=generator
        )
        for name, shape in shapes.items()
    }


def make_destination(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors to load into, their memory touched."""
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def first_difference(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> str | None:
    """Name of a tensor that is missing or differs in any bit; None if all are the same."""
    for name, tensor in expected.items():
        other = found.get(name)
        if other is None or not torch.equal(other.view(torch.int16), tensor.view(torch.int16)):
            return name
    return None
