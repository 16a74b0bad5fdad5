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


@CustomOp.register("short_conv")
class ShortConv(StateLayer):
    """Gated short convolution, ``out_proj(C ⊙ conv(B ⊙ x))`` with ``[B, C, x] = in_proj(h)`` (arXiv:2511.23404).

    The convolution is causal and by channel, and has no activation. Its state is the last inputs of a sequence.

    Args:
        config: has ``conv_L_cache``, the width of the convolution, and ``conv_bias``.
        dim: channels.
        layer_idx: number of the layer.
        model_config: an engine's settings, for replacements that read them.
        cache_config: likewise.
        quant_config: the quantization of the projections.
        prefix: the layer's path in its model, under which its states are found.

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
        self.conv = DepthwiseConv(
            rank_shards([(dim, dim)], "channels of a short convolution"), self.L_cache, self.bias
        )
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
        gated = b * x
        if batch.steps:
            y = torch.empty_like(gated)
            self.convolve_step(
                gated, batch.states[0], self.conv.taps, batch.slots, y, self.conv.bias
            )
        else:
            given = gated, self.conv.taps, batch.query_start_loc, batch.initial(0), self.conv.bias
            y, final = self.convolve(*given)
            batch.finish(final)
        output.copy_(self.out_proj(c * y))
