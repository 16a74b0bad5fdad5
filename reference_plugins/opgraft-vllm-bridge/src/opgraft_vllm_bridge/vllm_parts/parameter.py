"""``vllm.model_executor.parameter``: parameters that say by their attributes how they are cut for ranks.

Those whose scales are of groups or blocks are not here: opgraft wants to know their size, and vLLM's have it not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class BasevLLMParameter(Parameter):
    """A parameter that is not cut.

    Args:
        data: its values.
        weight_loader: fills it from a checkpoint.
        **attributes: by which ``opgraft.ops.linear.sharding`` cuts it.
    """

    def __new__(cls, data: torch.Tensor, **attributes: Any) -> BasevLLMParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(
        self, data: torch.Tensor, weight_loader: Callable[..., Any], **attributes: Any
    ) -> None:
        self.weight_loader = weight_loader
        vars(self).update(attributes)


class RowvLLMParameter(BasevLLMParameter):
    """One that is cut along the layer's input."""

    def __init__(self, input_dim: int, **others: Any) -> None:
        super().__init__(input_dim=input_dim, **others)


class ChannelQuantScaleParameter(BasevLLMParameter):
    """Scales of rows, cut along the layer's output."""

    def __init__(self, output_dim: int, **others: Any) -> None:
        super().__init__(output_dim=output_dim, **others)


class ModelWeightParameter(BasevLLMParameter):
    """A weight, cut along either."""

    def __init__(self, output_dim: int, input_dim: int, **others: Any) -> None:
        super().__init__(output_dim=output_dim, input_dim=input_dim, **others)


class PackedvLLMParameter(ModelWeightParameter):
    """A weight of which an element holds several numbers along one dimension."""

    def __init__(self, packed_factor: int, packed_dim: int, **others: Any) -> None:
        super().__init__(packed_factor=packed_factor, packed_dim=packed_dim, **others)


class PerTensorScaleParameter(BasevLLMParameter):
    """Scales, one for each layer that a merged layer stands for."""

    def __init__(self, **others: Any) -> None:
        super().__init__(needs_scalar_to_array=True, **others)
