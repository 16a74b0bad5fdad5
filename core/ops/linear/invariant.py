"""Linear layers with the same bits for a row, whatever the number of rows."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from opgraft.ops.linear.methods import (
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from opgraft.ops.linear.packed import obstacle
from opgraft.platform import cpu_features
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.nn import functional as F

IN_BLOCKS = MappingProxyType({"amx_bf16": torch.bfloat16})
"""Instruction set → dtype: there, the order of oneDNN's sums depends on the number of rows."""

BLOCK = 32
"""Rows of a block for ``IN_BLOCKS``: AMX computes as many at a time."""

_TRIED_BLOCKS = (None, 6)
"""Rows of a block elsewhere, the first that a trial finds alike.

In float32 without AVX-512, oneDNN computes six rows at a time. In torch 2.11 it sums one to three
rows left over in another order.
"""

_ROWS_OF_TRIAL = 26
_FEWER_ROWS = (1, 2, 3, 4, 5, 7, 13)
"""Rows of a trial, and numbers of rows to compare with: blocks, and any number left over."""


class InvariantMethod(QuantizeMethodBase):
    """Computes over a packed weight. A row has the same bits in every batch.

    Most kernels compute rows alike from two rows on, so one row is computed as two. Other kernels
    need blocks of one size, the last filled up with zeros.

    Args:
        method: the weight method of the layer with the packed weight.
        block: rows of a block; ``None`` for any number.
    """

    def __init__(
        self, method: UnquantizedLinearMethod | UnquantizedEmbeddingMethod, block: int | None = None
    ) -> None:
        self.method = method
        self.block = block

    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        self.method.create_weights(layer, *weight_args, **extra_weight_attrs)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, plus ``residual``."""
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if not count:
            empty = self.method.apply(layer, rows, bias, **options)
            return empty.reshape(*x.shape[:-1], empty.shape[-1])

        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        # A single row runs another kernel than several rows.
        size = self.block or max(count, 2)
        outputs = []
        for start in range(0, count, size):
            block = _filled_up(rows[start : start + size], size)
            if added is not None:
                options["residual"] = _filled_up(added[start : start + size], size)
            outputs.append(self.method.apply(layer, block, bias, **options))

        computed = torch.cat(outputs)
        return computed[:count].reshape(*x.shape[:-1], computed.shape[-1])


def _filled_up(rows: Tensor, size: int) -> Tensor:
    """Return ``size`` rows: the given ones, then zeros."""
    lacking = size - len(rows)
    return F.pad(rows, (0, 0, 0, lacking)) if lacking else rows


def compute_rows_alike(layer: Any) -> str | None:
    """Make a layer compute rows alike, or return the reason why that is impossible."""
    method = layer.quant_method
    if not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return f"its weight method is {type(method).__name__}"

    layer.hold_packed()
    if layer._packed is None:
        return f"its weight cannot be packed: {obstacle(layer.weight)}"

    dtype = layer._packed.dtype
    features = cpu_features(current_platform())
    if any(IN_BLOCKS.get(feature) is dtype for feature in features):
        layer.quant_method = InvariantMethod(method, BLOCK)
        return None

    for block in _TRIED_BLOCKS:
        invariant = InvariantMethod(method, block)
        if _rows_are_alike(invariant, layer):
            layer.quant_method = invariant
            return None
    return f"oneDNN of torch {torch.__version__} sums a row in another order beside other rows"


@torch.no_grad()
def _rows_are_alike(method: InvariantMethod, layer: Any) -> bool:
    """Return True if rows have the same bits among fewer rows, and at other places among them."""
    weight = layer.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS_OF_TRIAL, weight.shape[1], generator=generator).to(weight.dtype)
    whole = method.apply(layer, x)

    for rows in _FEWER_ROWS:
        first = method.apply(layer, x[:rows])
        last = method.apply(layer, x[-rows:])
        if not torch.equal(first, whole[:rows]) or not torch.equal(last, whole[-rows:]):
            return False
    return True
