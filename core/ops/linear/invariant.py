"""Linear layers that compute each row alike, however many there are."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.ops.linear.methods import (
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from opgraft.platform import cpu_features
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.nn import functional as F

IN_BLOCKS = {"amx_bf16": torch.bfloat16}
"""Instruction set → dtype for which oneDNN sums in another order for other numbers of rows."""

BLOCK = 32
"""Rows of such a block: as many as AMX computes at a time."""


class InvariantMethod(QuantizeMethodBase):
    """Computes over a packed weight so that a row has the same bits whatever the others are.

    From two rows on most kernels do, so a single row is computed as two. Where that depends on their number, blocks of
    one size are computed, of which the last is filled with zeros.

    Args:
        method: of the layer, whose weight is packed.
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
        """Map ``[..., in_features]``, with what follows the map."""
        rows = x.reshape(-1, x.shape[-1])
        others = None if residual is None else residual.reshape(-1, residual.shape[-1])
        size = self.block or max(len(rows), 2)
        blocks = []
        for start in range(0, len(rows), size):
            if others is not None:
                options["residual"] = _filled(others[start : start + size], size)
            blocks.append(
                self.method.apply(layer, _filled(rows[start : start + size], size), bias, **options)
            )
        computed = torch.cat(blocks) if blocks else self.method.apply(layer, rows, bias, **options)
        return computed[: len(rows)].reshape(*x.shape[:-1], computed.shape[-1])


def _filled(rows: Tensor, size: int) -> Tensor:
    """Return a block of that size that begins with these rows."""
    return rows if len(rows) == size else F.pad(rows, (0, 0, 0, size - len(rows)))


def compute_rows_alike(layer: Any) -> str | None:
    """Have a layer with a weight method compute each row alike, or say why it cannot."""
    method = layer.quant_method
    if not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return f"its weight method is {type(method).__name__}"
    layer.hold_packed()
    if layer._packed is None:
        return "its weight cannot be packed here"
    features = cpu_features(current_platform())
    blocks = any(
        layer.weight.dtype is dtype for feature, dtype in IN_BLOCKS.items() if feature in features
    )
    layer.quant_method = InvariantMethod(method, BLOCK if blocks else None)
    return None
