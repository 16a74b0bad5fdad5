"""The kernels. Each class replaces one of the catalogue; its ``forward_oot`` takes every call that the target takes."""

from __future__ import annotations

import math

import opgraft
import torch
from opgraft.ops import GELU, LayerNorm, RMSNorm, SiluAndMul


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Widen to float32, in which the device computes half types."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class ToyRMSNorm(RMSNorm):
    """Norm by dot product. It has no backward: where a gradient is required, the native definition runs."""

    @opgraft.inference_only
    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.variance_size_override is not None:
            return self.forward_native(x, residual)
        wide = _wide(x) if residual is None else _wide(x) + _wide(residual)
        length = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = math.sqrt(wide.shape[-1]) * torch.rsqrt(
            length + wide.shape[-1] * self.variance_epsilon
        )
        out = wide * scale
        if self.has_weight:
            out.mul_(self.weight)
        return out.to(x.dtype) if residual is None else (out.to(x.dtype), wide.to(x.dtype))


class ToyLayerNorm(LayerNorm):
    """Mean and variance from one pass over ``E[x]`` and a second over the centred values."""

    def forward_oot(self, input: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(-len(self.normalized_shape), 0))
        wide = _wide(input)
        centred = wide - wide.mean(dims, keepdim=True)
        out = centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + self.eps)
        if self.weight is not None:
            out = out * self.weight
        return (out if self.bias is None else out + self.bias).to(input.dtype)


class ToyGELU(GELU):
    """GELU through the complementary error function, or through a sigmoid for the tanh approximation."""

    def forward_oot(self, input: torch.Tensor) -> torch.Tensor:
        x = _wide(input)
        if self.approximate == "tanh":
            gate = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        else:
            gate = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
        return (x * gate).to(input.dtype)


class ToySiluAndMul(SiluAndMul):
    """SiLU of the first half times the second half, through exp."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = _wide(x).chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


REPLACEMENTS = {
    "RMSNorm": ToyRMSNorm,
    "LayerNorm": ToyLayerNorm,
    "GELU": ToyGELU,
    "SiluAndMul": ToySiluAndMul,
}
