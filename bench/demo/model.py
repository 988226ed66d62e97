"""The demo's language model and its text. Plain PyTorch: nothing here knows of checkpoints."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch import nn

CONTEXT_BYTES: Final = 64
"""Length of the text that the model sees at once."""

VOCABULARY: Final = 256
"""Tokens are bytes."""

HEAD_WIDTH: Final = 64

_TEXT_BYTES: Final = 4_000_000
"""About what the standard library's top-level modules have; more than the demo ever reads."""


class LanguageModel(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT_BYTES, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, max(1, width // HEAD_WIDTH), 4 * width, dropout=0.1, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, VOCABULARY) of the byte after each of `tokens` (batch, length)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def read_text() -> torch.Tensor:
    """The sources of Python's standard library, as bytes (uint8); the same at each call."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in modules)[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
