"""The replacements. None has a backward: if a gradient is required, the native definition runs.

Signatures: intel_extension_for_pytorch/llm/functional/fusions.py of release 2.8. The same functions
serve CPUs and XPUs. They take float32 and half types. For other dtypes the native definition runs.
"""

from __future__ import annotations

import opgraft
import torch
from intel_extension_for_pytorch.llm import functional as ipex
from opgraft.ops import RMSNorm, RotaryEmbedding, SiluAndMul
from torch import Tensor
from torch.library import Library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _served(*tensors: Tensor) -> bool:
    """Return True if all tensors have one dtype that the kernels take, and none is empty."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    return all(x.dtype == dtype and x.numel() for x in tensors)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and the sum.

    The extension's own operator writes the sum to the residual, and its schema does not say so. A
    compiler would read the former residual afterwards. This operator writes to a copy.
    """
    total = residual.clone(memory_format=torch.contiguous_format)
    normed = ipex.add_rms_norm(total, x.contiguous(), weight, None, eps, True)
    return normed, total


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    # The kernel's results are contiguous, whatever the inputs are.
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(residual, memory_format=contiguous),
    )


# In a namespace of the plugin's own, the operator is judged by the conformance kit.
opgraft.direct_register_custom_op(
    "add_rms_norm",
    add_rms_norm,
    fake_impl=_fake_add_rms_norm,
    target_lib=Library("opgraft_ipex", "FRAGMENT"),  # type: ignore[no-untyped-call]
)


@opgraft.CustomOp.register_oot("RMSNorm")
class IpexRMSNorm(RMSNorm):
    """With a residual, the kernel is for float32 alone.

    In half types, the kernel rounds the sum before the norm. The definition takes the norm of the
    sum in float32, so the definition runs.
    """

    @opgraft.inference_only
    def forward_cpu(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.variance_size_override is not None or not self._served(x, residual):
            return self.forward_native(x, residual)

        # The kernel reads the weight's memory in one row, whatever its strides.
        weight = self.weight.contiguous()
        normed: Tensor
        if residual is None:
            normed = ipex.rms_norm(x.contiguous(), weight, self.variance_epsilon)
            return normed

        # In half types, the kernel rounds the sum too early.
        if x.dtype is not torch.float32:
            return self.forward_native(x, residual)
        total: Tensor
        normed, total = torch.ops.opgraft_ipex.add_rms_norm(
            x, residual, weight, self.variance_epsilon
        )
        return normed, total

    forward_xpu = forward_cpu

    def _served(self, x: Tensor, residual: Tensor | None) -> bool:
        """Return True if the kernels take these tensors."""
        summands = [x] if residual is None else [x, residual]
        if not _served(*summands, self.weight):
            return False
        # For wrong shapes the native definition raises an error that names them.
        if x.shape[-1] != self.hidden_size:
            return False
        return all(summand.shape == x.shape for summand in summands)


@opgraft.CustomOp.register_oot("RotaryEmbedding")
class IpexRotaryEmbedding(RotaryEmbedding):
    """Rotates whole heads of query and key in place, as the op allows."""

    @opgraft.inference_only
    def forward_cpu(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        tokens = positions.numel()
        if key is None or not self._served(tokens, query, key):
            return self.forward_native(positions, query, key)

        angles = self.cos_sin_cache[positions.flatten()]
        cos, sin = angles.chunk(2, dim=-1)
        # The kernel reads memory in one row, whatever the strides.
        rotated_query, rotated_key = ipex.rotary_embedding(
            query.reshape(tokens, -1, self.head_size).contiguous(),
            key.reshape(tokens, -1, self.head_size).contiguous(),
            sin.contiguous(),
            cos.contiguous(),
            self.rotary_dim,
            self.is_neox_style,
        )
        return rotated_query.reshape(query.shape), rotated_key.reshape(key.shape)

    forward_xpu = forward_cpu

    def _served(self, tokens: int, query: Tensor, key: Tensor) -> bool:
        """Return True if the kernel takes these tensors of so many tokens."""
        if self.rotary_dim != self.head_size:
            return False
        if not tokens or not _served(query, key):
            return False
        # For wrong shapes the native definition raises an error that names them.
        size_of_head = tokens * self.head_size
        return query.numel() % size_of_head == 0 and key.numel() % size_of_head == 0


@opgraft.CustomOp.register_oot("SiluAndMul")
class IpexSiluAndMul(SiluAndMul):
    """On CPUs the extension compiles this kernel with Inductor when it is first called."""

    @opgraft.inference_only
    def forward_cpu(self, x: Tensor) -> Tensor:
        if not _served(x) or x.shape[-1] % 2:
            return self.forward_native(x)

        gate, up = x.chunk(2, dim=-1)
        gated: Tensor = ipex.silu_mul(gate, up)
        return gated

    forward_xpu = forward_cpu
