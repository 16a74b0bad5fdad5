"""Parameters that ranks cut by attributes: ``vllm.model_executor.parameter``.

Scales of groups and of blocks are left out. opgraft needs the size of a group to cut them, and
vLLM's classes do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class BasevLLMParameter(Parameter):
    """A parameter that is not cut.

    Args:
        data: the values.
        weight_loader: the function that fills the parameter from a checkpoint.
        **attributes: read by ``opgraft.ops.linear.sharding`` to cut the parameter.
    """

    def __new__(cls, data: torch.Tensor, **attributes: Any) -> BasevLLMParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(
        self, data: torch.Tensor, weight_loader: Callable[..., Any], **attributes: Any
    ) -> None:
        self.weight_loader = weight_loader
        vars(self).update(attributes)


class RowvLLMParameter(BasevLLMParameter):
    """A parameter that is cut along the layer's input."""

    def __init__(self, input_dim: int, **others: Any) -> None:
        super().__init__(input_dim=input_dim, **others)


class ChannelQuantScaleParameter(BasevLLMParameter):
    """Scales of rows, cut along the layer's output."""

    def __init__(self, output_dim: int, **others: Any) -> None:
        super().__init__(output_dim=output_dim, **others)


class ModelWeightParameter(BasevLLMParameter):
    """A weight. Some layers cut it along the output, others along the input."""

    def __init__(self, output_dim: int, input_dim: int, **others: Any) -> None:
        super().__init__(output_dim=output_dim, input_dim=input_dim, **others)


class PackedvLLMParameter(ModelWeightParameter):
    """A weight with several numbers in an element, packed along one dimension."""

    def __init__(self, packed_factor: int, packed_dim: int, **others: Any) -> None:
        super().__init__(packed_factor=packed_factor, packed_dim=packed_dim, **others)


class PerTensorScaleParameter(BasevLLMParameter):
    """Scales: one for each of the layers that are merged into one."""

    def __init__(self, **others: Any) -> None:
        super().__init__(needs_scalar_to_array=True, **others)
