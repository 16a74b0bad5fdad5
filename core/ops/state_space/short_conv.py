"""``ShortConv``, the gated short convolution of LFM2."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.ops.linear import MergedColumnParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space.layer import DepthwiseConv, StateLayer, expect_sizes, rank_shards
from opgraft.ops.state_space.modules import CausalConv1d, CausalConv1dUpdate
from torch import Tensor

__all__ = ["ShortConv"]


@CustomOp.register("short_conv")
class ShortConv(StateLayer):
    """Gated short convolution of LFM2 (arXiv:2511.23404).

    The result is ``out_proj(C ⊙ conv(B ⊙ x))`` with ``[B, C, x] = in_proj(h)``. The convolution is
    causal and depthwise, without an activation. The state is the last inputs of a sequence.

    Args:
        config: ``conv_L_cache`` is the number of taps; ``conv_bias`` adds a bias to the convolution
            and the projections.
        dim: channels.
        layer_idx: number of the layer.
        model_config: an engine's settings, kept for replacements.
        cache_config: an engine's settings, kept for replacements.
        quant_config: the quantization of the projections.
        prefix: the layer's path in the model. The states are found by this path.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the channels.
        ValueError: a size is not positive.
    """

    def __init__(
        self,
        config: Any,
        dim: int,
        layer_idx: int,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(prefix)
        expect_sizes("short_conv", dim=dim, conv_L_cache=config.conv_L_cache)

        self.config = config
        self.layer_idx = layer_idx
        self.conv_dim = dim
        self.L_cache = config.conv_L_cache
        self.bias = config.conv_bias
        self.model_config = model_config
        self.cache_config = cache_config

        shards = rank_shards([(dim, dim)], "channels of a short convolution")
        self.conv = DepthwiseConv(shards, self.L_cache, self.bias)

        self.in_proj = MergedColumnParallelLinear(
            dim,
            [dim] * 3,
            bias=self.bias,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )

        self.out_proj = RowParallelLinear(
            dim,
            dim,
            bias=self.bias,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )

        # The default while a model is built is the dtype of its weights.
        self.dtype = torch.get_default_dtype()
        self.convolve = CausalConv1d()
        self.convolve_step = CausalConv1dUpdate()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the last inputs, ``((channels, width - 1),)``."""
        return ((self.conv.channels, self.L_cache - 1),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype."""
        return (self.dtype,)

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:
        """Mix ``hidden_states`` ``[tokens, dim]`` into ``output``, of the same shape.

        Raises:
            LayerError: the current batch has no states for the layer.
        """
        batch = self.state_batch(hidden_states, output)
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        # The first gate comes before the convolution, so states hold gated inputs.
        gated = b * x

        taps = self.conv.taps
        bias = self.conv.bias

        if batch.steps:
            y = torch.empty_like(gated)
            self.convolve_step(gated, batch.states[0], taps, batch.slots, y, bias)
        else:
            initial = batch.initial(0)
            y, final = self.convolve(gated, taps, batch.query_start_loc, initial, bias)
            batch.finish(final)
        output.copy_(self.out_proj(c * y))
