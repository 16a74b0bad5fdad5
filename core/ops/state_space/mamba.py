"""``MambaMixer``, the mixer of Mamba."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space.layer import (
    DepthwiseConv,
    StateBatch,
    StateLayer,
    by_channel,
    expect_sizes,
    negated_exponential,
    rank_shards,
    ranks_of,
)
from opgraft.ops.state_space.modules import (
    CausalConv1d,
    CausalConv1dUpdate,
    SelectiveScan,
    SelectiveStateUpdate,
)
from torch import Tensor


@CustomOp.register("mamba_mixer")
class MambaMixer(StateLayer):
    """Mixer of Mamba (Gu and Dao, arXiv:2312.00752).

    ``[u, z] = in_proj(h)``, ``x = act(conv(u))``, ``[dt, B, C] = x_proj(x)``, and the result is ``out_proj`` of the
    scan of ``x`` by ``dt_proj(dt)``, B and C, gated by ``z``. Its state is the last inputs of the convolution and the
    state of the scan, in float32.

    Args:
        hidden_size: elements of a token.
        ssm_state_size: elements of the state by channel.
        conv_kernel_size: width of the convolution.
        intermediate_size: channels.
        time_step_rank: elements of a token that step sizes are made of.
        use_conv_bias: the convolution has a bias.
        use_bias: the projections have one.
        use_rms_norm: ``dt``, B and C are normalised, as in Jamba.
        rms_norm_has_weight: by norms with a weight.
        rms_norm_eps: of these norms.
        activation: of the convolution, ``"silu"``.
        is_lora_enabled: for replacements that ask.
        model_config: an engine's settings, for replacements that read them.
        cache_config: likewise.
        prefix: the layer's path in its model, under which its states are found.
        quant_config: the quantization of the projections.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the channels.
        ValueError: a size is no positive integer, or another activation.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        time_step_rank: int,
        use_conv_bias: bool,
        use_bias: bool,
        use_rms_norm: bool,
        rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        is_lora_enabled: bool = False,
        model_config: Any = None,
        cache_config: Any = None,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__(prefix)
        sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "time_step_rank": time_step_rank,
        }
        expect_sizes(
            "mamba_mixer", **sizes, ssm_state_size=ssm_state_size, conv_kernel_size=conv_kernel_size
        )
        self.channels = intermediate_size // ranks_of(
            {"intermediate_size of a mixer": intermediate_size}
        )
        self.time_step_rank, self.ssm_state_size = time_step_rank, ssm_state_size
        self.conv_kernel_size, self.use_rms_norm = conv_kernel_size, use_rms_norm
        self.activation, self.is_lora_enabled = activation, is_lora_enabled
        self.model_config, self.cache_config = model_config, cache_config
        shards = rank_shards([(intermediate_size,) * 2], "channels of a mixer")
        self.conv1d = DepthwiseConv(shards, conv_kernel_size, use_conv_bias)
        self._make_projections(hidden_size, intermediate_size, use_bias, quant_config)
        self.A = by_channel(intermediate_size, ssm_state_size, load=negated_exponential)
        self.D = by_channel(intermediate_size)
        if use_rms_norm:
            self._make_norms(rms_norm_eps, rms_norm_has_weight)
        self.dtype = torch.get_default_dtype()
        self.convolve, self.convolve_step = CausalConv1d(activation), CausalConv1dUpdate(activation)
        self.scan, self.scan_step = SelectiveScan(True), SelectiveStateUpdate(True)

    def _make_projections(
        self,
        hidden_size: int,
        intermediate_size: int,
        use_bias: bool,
        quant_config: QuantizationConfig | None,
    ) -> None:
        def settings(name: str) -> dict[str, Any]:
            return {"quant_config": quant_config, "prefix": f"{self.prefix}.{name}"}

        parts, inner = self.time_step_rank + 2 * self.ssm_state_size, intermediate_size
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, [inner] * 2, bias=use_bias, return_bias=False, **settings("in_proj")
        )
        self.x_proj = RowParallelLinear(
            inner, parts, bias=False, return_bias=False, **settings("x_proj")
        )
        # The scan adds the bias, in float32.
        self.dt_proj = ColumnParallelLinear(
            self.time_step_rank, inner, bias=True, skip_bias_add=True, **settings("dt_proj")
        )
        self.out_proj = RowParallelLinear(
            inner, hidden_size, bias=use_bias, return_bias=False, **settings("out_proj")
        )

    def _make_norms(self, eps: float, has_weight: bool) -> None:
        self.dt_layernorm = RMSNorm(self.time_step_rank, eps=eps, has_weight=has_weight)
        self.b_layernorm = RMSNorm(self.ssm_state_size, eps=eps, has_weight=has_weight)
        self.c_layernorm = RMSNorm(self.ssm_state_size, eps=eps, has_weight=has_weight)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the last inputs and of the scan's state."""
        return ((self.channels, self.conv_kernel_size - 1), (self.channels, self.ssm_state_size))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype, and float32."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:
        """Mix ``hidden_states`` ``[tokens, hidden_size]`` into ``output``, of the same shape.

        Raises:
            LayerError: the current batch has no states for the layer.
        """
        batch = self.state_batch(hidden_states, output)
        mixed, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        y = self._stepped(batch, mixed, gate) if batch.steps else self._scanned(batch, mixed, gate)
        output.copy_(self.out_proj(y))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return step sizes ``[tokens, channels]`` without their bias, and B and C ``[tokens, state]``."""
        dt, b, c = self.x_proj(x).split(
            [self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=-1
        )
        if self.use_rms_norm:
            dt, b, c = (
                norm(part.contiguous())
                for norm, part in (
                    (self.dt_layernorm, dt),
                    (self.b_layernorm, b),
                    (self.c_layernorm, c),
                )
            )
        return self.dt_proj(dt)[0], b, c

    def _scanned(self, batch: StateBatch, mixed: Tensor, gate: Tensor) -> Tensor:
        bounds = batch.query_start_loc
        x, last = self.convolve(mixed, self.conv1d.taps, bounds, batch.initial(0), self.conv1d.bias)
        dt, b, c = self._parts(x)
        y, state = self.scan(
            x, dt, self.A, b, c, bounds, batch.initial(1), self.D, gate, self.dt_proj.bias
        )
        batch.finish(last, state)
        return y

    def _stepped(self, batch: StateBatch, mixed: Tensor, gate: Tensor) -> Tensor:
        x = torch.empty_like(mixed)
        self.convolve_step(
            mixed, batch.states[0], self.conv1d.taps, batch.slots, x, self.conv1d.bias
        )
        dt, b, c = (part[:, None] for part in self._parts(x))
        y, bias = torch.empty_like(x), self.dt_proj.bias
        state, decay = batch.states[1][:, None], self.A[None]
        one_head = self.D[None], gate[:, None], None if bias is None else bias[None]
        self.scan_step(state, x[:, None], dt, decay, b, c, batch.slots, y[:, None], *one_head)
        return y
