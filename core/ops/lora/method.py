"""``LoRAMethod``: the weight method of a layer while rows of a call have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from opgraft.errors import LayerError
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.lora.modules import LoRA
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F


class _Rows(NamedTuple):
    """The rows of a call.

    Attributes:
        bounds: as of ``add_lora_``.
        number: of rows. To read it from the bounds would wait for a device.
    """

    bounds: Tensor
    number: int


_ROWS: ContextVar[_Rows | None] = ContextVar("opgraft_lora_rows", default=None)


@contextmanager
def adapting(bounds: Sequence[int], device: torch.device) -> Iterator[None]:
    """Within the block, the rows of a called model have adapters, see ``add_lora_``."""
    sent = torch.tensor(bounds, dtype=torch.int32, device=device)
    token = _ROWS.set(_Rows(sent, bounds[-1]))
    try:
        yield
    finally:
        _ROWS.reset(token)


def has_adapters() -> bool:
    """Return True within ``adapting``. Code that passes by the weight methods must not run then."""
    # Compiled models are not called with adapters.
    return not is_dynamo_compiling() and _ROWS.get() is not None


class LoRAMethod(QuantizeMethodBase):
    """Computes by the method of the layer, and adds the adapters of the rows.

    Args:
        method: the layer's own method.
        op: adds the adapters. For a layer that looks up, the inputs are the rows of the embedding.
    """

    def __init__(self, method: QuantizeMethodBase, op: LoRA) -> None:
        self.method = method
        self.op = op

    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        self.method.create_weights(layer, *weight_args, **extra_weight_attrs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        y = self.method.apply(layer, x, bias)
        # A tied embedding computes logits, and its adapter changes look-ups only.
        if getattr(layer, "looks_up", False):
            return y
        rows = x.reshape(-1, x.shape[-1])
        self.op(y.view(-1, y.shape[-1]), rows, _bounds_of(layer, len(rows)))
        return y

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows of ids."""
        vectors = self.method.embedding(layer, input_)
        ids = input_.reshape(-1)
        rows = vectors.view(-1, vectors.shape[-1])
        bounds = _bounds_of(layer, len(ids)).tolist()
        for slot, (start, end) in enumerate(pairwise(bounds)):
            if start == end:
                continue
            table = self.op.a[slot].t()
            narrow = F.embedding(ids[start:end], table)
            matrix = self.op.b[slot].t()
            rows[start:end].addmm_(narrow, matrix)
        return vectors


def _bounds_of(layer: Any, rows: int) -> Tensor:
    """Return the bounds of the present call.

    Raises:
        LayerError: the layer is called with other rows than those of the call.
    """
    present = _ROWS.get()
    if present is None or present.number != rows:
        known = "none" if present is None else present.number
        raise LayerError(
            f"{layer.name} has {rows} rows, and the adapters are known for {known}: an adapter "
            "cannot be applied to a layer that computes other rows than the model"
        )
    return present.bounds
