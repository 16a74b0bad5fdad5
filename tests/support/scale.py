"""A small op that tests replace, switch, copy and break."""

from __future__ import annotations

import pytest
import torch
from opgraft import CustomOp
from torch import nn


class Scale(CustomOp):
    """x * weight, with a kernel for two keys."""

    def __init__(self, size: int = 4, factor: float = 2.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.factor = factor
        self.weight = nn.Parameter(torch.full((size,), factor))

    def forward_native(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x * self.weight
        return out if bias is None else out + bias

    def forward_cpu(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.forward_native(x, bias) + 0

    def forward_cuda(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.forward_native(x, bias) - 0


class FastScale(Scale):
    """A replacement that can be pickled."""

    def forward_oot(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward_oot(x, bias) * 1


@pytest.fixture
def scale() -> type[Scale]:
    """The registered op."""
    CustomOp.register("scale")(Scale)
    return Scale


@pytest.fixture
def fast_scale(scale: type[Scale]) -> type[FastScale]:
    """A replacement of it, not yet registered."""
    return FastScale
