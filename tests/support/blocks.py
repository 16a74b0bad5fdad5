"""A model that compiles in a moment."""

from __future__ import annotations

import torch
from opgraft.ops import GatedMLP, RMSNorm, SiLU
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """A norm, and a gated feed-forward layer whose result is added to a residual stream, normed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RMSNorm(WIDTH, eps=1e-5)
        self.mlp = GatedMLP(
            WIDTH, 2 * WIDTH, "silu", act=SiLU(), names=("gate", "up", "down", "act")
        )
        self.second = RMSNorm(WIDTH, eps=1e-3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        summed = x + self.mlp(self.first(x)) * scale
        return {"normed": self.second(summed), "summed": summed}
