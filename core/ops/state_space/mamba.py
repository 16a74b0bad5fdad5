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

__all__ = ["MambaMixer"]


@CustomOp.register("mamba_mixer")
class MambaMixer(StateLayer):
    """Mixer of Mamba (Gu and Dao, arXiv:2312.00752).

    From a token ``h`` the mixer computes ``[u, z] = in_proj(h)``, ``x = act(conv(u))`` and ``[dt,
    B, C] = x_proj(x)``. The result is ``out_proj(y)``, with ``y`` the scan of ``x`` by
    ``dt_proj(dt)``, ``B`` and ``C``, gated by ``z``. The state has the last inputs of the
    convolution, and the state of the scan in float32.

    Args:
        hidden_size: elements of a token.
        ssm_state_size: elements of the state of each channel.
        conv_kernel_size: taps of the convolution.
        intermediate_size: channels.
        time_step_rank: elements of a token that step sizes are computed from.
        use_conv_bias: the convolution has a bias.
        use_bias: ``in_proj`` and ``out_proj`` have a bias.
        use_rms_norm: ``dt``, ``B`` and ``C`` are normalised, as in Jamba.
        rms_norm_has_weight: these norms have a weight.
        rms_norm_eps: the ``eps`` of these norms.
        activation: ``"silu"``, after the convolution.
        is_lora_enabled: kept for replacements.
        model_config: an engine's settings, kept for replacements.
        cache_config: an engine's settings, kept for replacements.
        prefix: the layer's path in the model. The states are found by this path.
        quant_config: the quantization of the projections.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the channels.
        ValueError: a size is no positive integer, or the activation is unknown.
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
        expect_sizes(
            "mamba_mixer",
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            time_step_rank=time_step_rank,
            ssm_state_size=ssm_state_size,
            conv_kernel_size=conv_kernel_size,
        )

        ranks = ranks_of({"intermediate_size of a mixer": intermediate_size})
        self.channels = intermediate_size // ranks
        self.time_step_rank = time_step_rank
        self.ssm_state_size = ssm_state_size
        self.conv_kernel_size = conv_kernel_size

        self.use_rms_norm = use_rms_norm
        self.activation = activation
        self.is_lora_enabled = is_lora_enabled
        self.model_config = model_config
        self.cache_config = cache_config

        shards = rank_shards([(intermediate_size,) * 2], "channels of a mixer")
        self.conv1d = DepthwiseConv(shards, conv_kernel_size, use_conv_bias)
        self._make_projections(hidden_size, intermediate_size, use_bias, quant_config)

        self.A = by_channel(intermediate_size, ssm_state_size, load=negated_exponential)
        self.D = by_channel(intermediate_size)
        if use_rms_norm:
            self._make_norms(rms_norm_eps, rms_norm_has_weight)

        # The default while a model is built is the dtype of its weights.
        self.dtype = torch.get_default_dtype()
        self.convolve = CausalConv1d(activation)
        self.convolve_step = CausalConv1dUpdate(activation)
        self.scan = SelectiveScan(True)
        self.scan_step = SelectiveStateUpdate(True)

    def _make_projections(
        self,
        hidden_size: int,
        intermediate_size: int,
        use_bias: bool,
        quant_config: QuantizationConfig | None,
    ) -> None:
        def settings(name: str) -> dict[str, Any]:
            return {"quant_config": quant_config, "prefix": f"{self.prefix}.{name}"}

        inner = intermediate_size
        parts = self.time_step_rank + 2 * self.ssm_state_size
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
        """Return the layer's dtype and float32: steps add up in the state of the scan."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:
        """Mix ``hidden_states`` ``[tokens, hidden_size]`` into ``output``, of the same shape.

        Raises:
            LayerError: the current batch has no states for the layer.
        """
        batch = self.state_batch(hidden_states, output)
        mixed, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        mix = self._step_tokens if batch.steps else self._scan_prompts
        output.copy_(self.out_proj(mix(batch, mixed, gate)))

    def _step_and_state_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return steps ``[tokens, channels]`` without the bias, and B and C ``[tokens, state]``."""
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, b, c = self.x_proj(x).split(sizes, dim=-1)
        # Parts of one projection are not contiguous, as kernels of norms want them.
        if self.use_rms_norm:
            dt = self.dt_layernorm(dt.contiguous())
            b = self.b_layernorm(b.contiguous())
            c = self.c_layernorm(c.contiguous())
        return self.dt_proj(dt)[0], b, c

    def _scan_prompts(self, batch: StateBatch, mixed: Tensor, gate: Tensor) -> Tensor:
        bounds = batch.query_start_loc
        conv = self.conv1d
        x, last = self.convolve(mixed, conv.taps, bounds, batch.initial(0), conv.bias)

        dt, b, c = self._step_and_state_inputs(x)
        bias = self.dt_proj.bias
        y, state = self.scan(x, dt, self.A, b, c, bounds, batch.initial(1), self.D, gate, bias)
        batch.finish(last, state)
        return y

    def _step_tokens(self, batch: StateBatch, mixed: Tensor, gate: Tensor) -> Tensor:
        conv = self.conv1d
        x = torch.empty_like(mixed)
        self.convolve_step(mixed, batch.states[0], conv.taps, batch.slots, x, conv.bias)

        dt, b, c = self._step_and_state_inputs(x)
        bias = self.dt_proj.bias
        y = torch.empty_like(x)

        # The step takes heads: all channels are one head here.
        self.scan_step(
            batch.states[1][:, None],
            x[:, None],
            dt[:, None],
            self.A[None],
            b[:, None],
            c[:, None],
            batch.slots,
            y[:, None],
            self.D[None],
            gate[:, None],
            None if bias is None else bias[None],
        )
        return y
