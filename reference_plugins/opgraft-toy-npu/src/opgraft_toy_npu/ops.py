"""The kernels. Each class replaces one class of opgraft's catalogue.

The host calls ``forward_oot`` with every call of the replaced class. A kernel hands a call that
the device cannot compute to ``forward_native``, opgraft's own definition.
"""

from __future__ import annotations

import math

import opgraft
import torch
from opgraft.ops import GELU, LayerNorm, RMSNorm, SiluAndMul
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the device's arithmetic: float32 for half types."""
    if x.dtype in HALF_TYPES:
        return x.float()
    return x


class ToyRMSNorm(RMSNorm):
    """RMS norm by a dot product. If a gradient is required, opgraft's definition runs."""

    @opgraft.inference_only
    def forward_oot(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise ``x``, ``[..., hidden_size]``.

        With a residual, return the norm of ``x + residual`` and that sum, both in ``x.dtype``.
        """
        if self.variance_size_override is not None:
            return self.forward_native(x, residual)

        summed = _wide(x)
        if residual is not None:
            summed = summed + _wide(residual)
        normed = self._norm(summed).to(x.dtype)
        if residual is None:
            return normed
        return normed, summed.to(x.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        # sqrt(size) / sqrt(sum + size * eps) equals 1 / sqrt(sum / size + eps).
        square_sum = torch.linalg.vecdot(x, x).unsqueeze(-1)
        inverse_length = torch.rsqrt(square_sum + size * self.variance_epsilon)
        normed = x * (math.sqrt(size) * inverse_length)
        if self.has_weight:
            normed.mul_(self.weight)
        return normed


class ToyLayerNorm(LayerNorm):
    """Layer norm in two passes: one for the mean, one for the variance of centred values."""

    def forward_oot(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions of ``input``, as many as ``normalized_shape`` has."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        wide = _wide(input)
        mean = wide.mean(dims, keepdim=True)
        centred = wide - mean
        variance = centred.square().mean(dims, keepdim=True)
        normed = centred / torch.sqrt(variance + self.eps)

        if self.weight is not None:
            normed = normed * self.weight
        if self.bias is not None:
            normed = normed + self.bias
        return normed.to(input.dtype)


class ToyGELU(GELU):
    """GELU by the complementary error function. The tanh approximation goes by a sigmoid."""

    def forward_oot(self, input: Tensor) -> Tensor:
        """Return GELU of each element, in the shape and dtype of ``input``."""
        x = _wide(input)
        if self.approximate == "tanh":
            # 0.5 * (1 + tanh(y)) equals sigmoid(2 * y).
            cubic = x + 0.044715 * x * x * x
            slope = 2 * math.sqrt(2 / math.pi)
            gate = torch.sigmoid(slope * cubic)
        else:
            # Unlike 1 + erf, erfc keeps its digits far below zero.
            gate = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
        return (x * gate).to(input.dtype)


class ToySiluAndMul(SiluAndMul):
    """SiLU of the first half of the columns, times the second half."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Return ``[..., d]`` for ``x`` of ``[..., 2 * d]``, in ``x.dtype``."""
        gate, up = _wide(x).chunk(2, dim=-1)
        silu = gate / (1 + torch.exp(-gate))
        return (silu * up).to(x.dtype)


REPLACEMENTS = {
    "RMSNorm": ToyRMSNorm,
    "LayerNorm": ToyLayerNorm,
    "GELU": ToyGELU,
    "SiluAndMul": ToySiluAndMul,
}
"""Name of a class in the catalogue → the class of this plugin that replaces it."""
