"""Small models to graft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

Mlp = Callable[[], nn.Sequential]


@pytest.fixture
def mlp() -> Mlp:
    """A model of torch's own modules, each time with the same random parameters, in evaluation mode."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16, bias=False),
            nn.RMSNorm(16), nn.SiLU(), nn.Dropout(0.5),
        )  # fmt: skip
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


@pytest.fixture
def x() -> torch.Tensor:
    """Input for ``mlp``."""
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))
