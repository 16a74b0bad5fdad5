"""Linear layers over bfloat16 weights in 12 bits, with the bits that ``linear`` gives.

The kernel decodes the numbers of a few rows in registers. With more rows it makes some rows of the
weight plain at a time. Rows beyond the limit ``FEW`` of linear layers go to the kernel of
``linear`` over the whole plain weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from opgraft import functional
from opgraft import kernels as parts
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import REFUSED, op
from opgraft_cpu_kernels.library import missing, path_or_none
from opgraft_cpu_kernels.linear import FEW


def lossless_linear(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.lossless_linear``, with the bits of this plugin's ``linear``."""
    if x.dtype is torch.bfloat16 and x.is_cpu and x.dim():
        given = {
            "x": x,
            "weight": weight,
            "exponents": exponents,
            "places": places,
            "units": units,
            "bias": bias,
        }
        # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
        if not (is_dynamo_compiling() and refusal("lossless_linear", given)):
            few = FEW.get((path_or_none(), torch.bfloat16), 0)
            try:
                return _lossless_linear(x, weight, exponents, places, units, bias, few)
            except REFUSED:
                pass
    return functional.lossless_linear.native(x, weight, exponents, places, units, bias)


class Lossless12LinearMethod(parts.Lossless12LinearMethod):
    """Packs weights and looks up rows by the library."""

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        if missing() or not weight.is_cpu:
            return super().quantize(weight)
        codes, exponents, places, units = _to_12_bits(weight)
        return {"weight": codes, "exponents": exponents, "places": places, "units": units}

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        if missing() or not input_.is_cpu:
            return super().embedding(layer, input_)
        tensors = (layer.weight, layer.exponents, layer.places, layer.units)
        return _lossless_rows(*tensors, layer.embedding_dim, input_.long())


_lossless_linear: Callable[..., Tensor] = op("lossless_linear")
_lossless_rows: Callable[..., Tensor] = op("lossless_rows")
_to_12_bits: Callable[..., tuple[Tensor, ...]] = op("to_12_bits")
