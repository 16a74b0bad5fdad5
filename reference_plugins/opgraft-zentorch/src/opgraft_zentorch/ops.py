"""The op classes of this plugin. Each class replaces the catalogue's class of the same name.

The kernels have no backward. If a gradient is required, opgraft's native definition runs, or
opgraft's own kernel for linear layers.
"""

from __future__ import annotations

from typing import ClassVar

import opgraft
from opgraft import ops as catalogue
from opgraft.kernels import compiled_packed_linear
from torch import Tensor

from opgraft_zentorch import attention, integers, linear, norms


class ZenLinear(catalogue.Linear):
    """Multiplies by a weight in zentorch's own layout, packed once if the weight is frozen."""

    functional_cpu: ClassVar = opgraft.FunctionalKernels(
        {"linear": linear.linear}, compiled={"linear": compiled_packed_linear}
    )

    def forward_cpu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.quant_method.apply(
            self,
            input,
            self.bias,
            activation=self.activation,
            residual=residual,
            kernel=linear.linear,
        )


class ZenInt8DynamicLinear(catalogue.Int8DynamicLinear):
    functional_cpu = opgraft.FunctionalKernels(
        {"int8_dynamic_linear": integers.int8_dynamic_linear}, inference_only=True
    )


class ZenRMSNorm(catalogue.RMSNorm):
    """With a residual, the kernel writes to copies of both arguments."""

    functional_cpu = opgraft.FunctionalKernels(
        {"rms_norm": norms.rms_norm, "fused_add_rms_norm": norms.fused_add_rms_norm},
        inference_only=True,
    )


class ZenScaledDotProductAttention(catalogue.ScaledDotProductAttention):
    functional_cpu = opgraft.FunctionalKernels(
        {"scaled_dot_product_attention": attention.scaled_dot_product_attention},
        inference_only=True,
    )


REPLACEMENTS = (ZenLinear, ZenInt8DynamicLinear, ZenRMSNorm, ZenScaledDotProductAttention)
