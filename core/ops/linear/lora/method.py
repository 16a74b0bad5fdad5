"""``LoRAMethod``: the weight method of a layer while rows of a call have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from opgraft.errors import LayerError
from opgraft.ops.linear.lora.modules import LoRA
from opgraft.ops.linear.methods import QuantizeMethodBase
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling


class _Rows(NamedTuple):
    """The rows of a call.

    Attributes:
        bounds: as of ``add_lora_``, on the host.
        number: of rows.
    """

    bounds: Tensor
    number: int


_ROWS: ContextVar[_Rows | None] = ContextVar("opgraft_lora_rows", default=None)


@contextmanager
def adapting(bounds: Sequence[int]) -> Iterator[None]:
    """Within the block, the rows of a called model have adapters, see ``add_lora_``."""
    token = _ROWS.set(_Rows(torch.tensor(bounds, dtype=torch.int32, device="cpu"), bounds[-1]))
    try:
        yield
    finally:
        _ROWS.reset(token)


def adapter_bounds() -> Tensor | None:
    """Return the first row of each adapter in the present call, or ``None`` without adapters.

    The tensor is as ``add_lora_`` takes it. Code that computes a layer without its weight method
    must add the adapters itself.
    """
    # Compiled models are not called with adapters.
    present = None if is_dynamo_compiling() else _ROWS.get()
    return None if present is None else present.bounds


class LoRAMethod(QuantizeMethodBase):
    """Computes by the method of the layer, and adds the adapters of the rows.

    Args:
        method: the layer's own method.
        op: adds the adapters.
        embeds: the layer is an embedding. If its weight is the weight of the output layer, too, the
            logits have no adapter.
    """

    adapters: LoRA

    def __init__(self, method: QuantizeMethodBase, op: LoRA, embeds: bool) -> None:
        self.method = method
        self.adapters = op
        self.embeds = embeds

    @property
    def own(self) -> QuantizeMethodBase:
        return self.method

    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        self.method.create_weights(layer, *weight_args, **extra_weight_attrs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        y = self.method.apply(layer, x, bias)
        if not self.embeds:
            self._add(layer, y, x.reshape(-1, x.shape[-1]))
        return y

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows of ids."""
        vectors = self.method.embedding(layer, input_)
        self._add(layer, vectors, input_.reshape(-1))
        return vectors

    def _add(self, layer: Any, y: Tensor, x: Tensor) -> None:
        """Add the adapters of the present call.

        Raises:
            LayerError: the layer computes other rows than the model.
        """
        present = _ROWS.get()
        if present is None or present.number != len(x):
            known = "none" if present is None else present.number
            raise LayerError(
                f"{layer.name} has {len(x)} rows, and the adapters are known for {known}: an "
                "adapter cannot be applied to a layer that computes other rows than the model"
            )
        self.adapters(y.view(-1, y.shape[-1]), x, present.bounds)
