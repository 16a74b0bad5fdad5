"""``Plamo2MambaMixer``, the mixer of PLaMo 2."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
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
from opgraft.ops.state_space.mamba2 import CHUNK_SIZE, step_heads
from opgraft.ops.state_space.modules import (
    CausalConv1d,
    CausalConv1dUpdate,
    MambaChunkScan,
    SelectiveStateUpdate,
)
from torch import Tensor
from torch.nn import functional as F


@CustomOp.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(StateLayer):
    """Mixer of PLaMo 2 (arXiv:2509.04897), which is Mamba-2's scan with Mamba's projections.

    ``[z, x] = in_proj(h)``, ``x = silu(conv(x))``, ``[B, C, dt] = bcdt_proj(x)``, each normalised, and the result is
    ``out_proj(y · silu(z))`` of the scan ``y`` by ``dt_proj(dt)``, B and C, which all heads share. Its state is the
    last inputs of the convolution and the state of the scan, in float32.

    Args:
        vllm_config: its ``model_config.hf_config`` has ``hidden_size``, ``mamba_num_heads``, ``hidden_size_per_head``,
            ``mamba_d_state``, ``mamba_d_conv`` and ``rms_norm_eps``; its ``quant_config``, if it has one, is the
            quantization of the projections.
        prefix: the layer's path in its model, under which its states are found.
        kwargs: further ones, as callers of vLLM's class give them, are not read.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the heads.
        ValueError: a size is not positive.
    """

    def __init__(self, vllm_config: Any, *, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(prefix)
        config = vllm_config.model_config.hf_config
        names = (
            "hidden_size",
            "mamba_num_heads",
            "hidden_size_per_head",
            "mamba_d_state",
            "mamba_d_conv",
        )
        expect_sizes("plamo2_mamba_mixer", **{name: getattr(config, name) for name in names})
        heads, self.head_dim = config.mamba_num_heads, config.hidden_size_per_head
        inner = heads * self.head_dim
        self.config = config
        self.num_heads = heads // ranks_of({"mamba_num_heads": heads})
        self.ssm_state_size, self.conv_kernel_size = config.mamba_d_state, config.mamba_d_conv
        self.time_step_rank = max(64, config.hidden_size // 16)
        quantized: dict[str, Any] = {
            "quant_config": getattr(vllm_config, "quant_config", None),
            "return_bias": False,
        }
        self.conv1d = DepthwiseConv(
            rank_shards([(inner, heads)], "mamba_num_heads"), self.conv_kernel_size, False
        )
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, [inner] * 2, bias=False, prefix=f"{prefix}.in_proj", **quantized
        )
        projected = self.time_step_rank + 2 * self.ssm_state_size
        self.bcdt_proj = RowParallelLinear(
            inner, projected, bias=False, prefix=f"{prefix}.bcdt_proj", **quantized
        )
        self.dt_proj = ColumnParallelLinear(
            self.time_step_rank, heads, bias=False, prefix=f"{prefix}.dt_proj", **quantized
        )
        self.out_proj = RowParallelLinear(
            inner, config.hidden_size, bias=False, prefix=f"{prefix}.out_proj", **quantized
        )
        self.A = by_channel(heads, load=negated_exponential)
        self.D = by_channel(heads)
        self.dt_bias = by_channel(heads)
        self.dt_norm = RMSNorm(self.time_step_rank, eps=config.rms_norm_eps)
        self.B_norm = RMSNorm(self.ssm_state_size, eps=config.rms_norm_eps)
        self.C_norm = RMSNorm(self.ssm_state_size, eps=config.rms_norm_eps)
        self.dtype = torch.get_default_dtype()
        self.convolve, self.convolve_step = CausalConv1d("silu"), CausalConv1dUpdate("silu")
        self.scan, self.scan_step = MambaChunkScan(CHUNK_SIZE, True), SelectiveStateUpdate(True)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the last inputs and of the scan's state."""
        conv = (self.conv1d.channels, self.conv_kernel_size - 1)
        return (conv, (self.num_heads, self.head_dim, self.ssm_state_size))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype, and float32."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, output: Tensor, **kwargs: Any) -> None:
        """Mix ``hidden_states`` ``[tokens, hidden_size]`` into ``output``, of the same shape; read nothing else.

        Raises:
            LayerError: the current batch has no states for the layer.
        """
        batch = self.state_batch(hidden_states, output)
        gate, mixed = self.in_proj(hidden_states).chunk(2, dim=-1)
        y = self._stepped(batch, mixed) if batch.steps else self._scanned(batch, mixed)
        output.copy_(self.out_proj(y * F.silu(gate)))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return step sizes ``[tokens, heads]``, and B and C ``[tokens, 1, state]``."""
        sizes = [self.ssm_state_size, self.ssm_state_size, self.time_step_rank]
        b, c, dt = (part.contiguous() for part in self.bcdt_proj(x).split(sizes, dim=-1))
        return self.dt_proj(self.dt_norm(dt)), self.B_norm(b)[:, None], self.C_norm(c)[:, None]

    def _scanned(self, batch: StateBatch, mixed: Tensor) -> Tensor:
        bounds = batch.query_start_loc
        convolved, last = self.convolve(mixed, self.conv1d.taps, bounds, batch.initial(0))
        dt, b, c = self._parts(convolved)
        x = convolved.view(-1, self.num_heads, self.head_dim)
        y, state = self.scan(
            x, dt, self.A, b, c, bounds, batch.initial(1), self.D, None, self.dt_bias
        )
        batch.finish(last, state)
        return y.flatten(1)

    def _stepped(self, batch: StateBatch, mixed: Tensor) -> Tensor:
        convolved = torch.empty_like(mixed)
        self.convolve_step(mixed, batch.states[0], self.conv1d.taps, batch.slots, convolved)
        dt, b, c = self._parts(convolved)
        x = convolved.view(-1, self.num_heads, self.head_dim)
        return step_heads(self.scan_step, batch, x, dt, self.A, b, c, self.D, self.dt_bias).flatten(
            1
        )
