"""``Plamo2MambaMixer``, the mixer of PLaMo 2."""

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
from opgraft.ops.state_space.mamba2 import CHUNK_SIZE, step_heads
from opgraft.ops.state_space.modules import (
    CausalConv1d,
    CausalConv1dUpdate,
    MambaChunkScan,
    SelectiveStateUpdate,
)
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Plamo2MambaMixer"]


@CustomOp.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(StateLayer):
    """Mixer of PLaMo 2 (arXiv:2509.04897): Mamba-2's scan with Mamba's projections.

    From a token ``h`` the mixer computes ``[z, x] = in_proj(h)``, ``x = silu(conv(x))`` and ``[B,
    C, dt] = bcdt_proj(x)``, and normalises each of the three. The result is ``out_proj(y ·
    silu(z))``, with ``y`` the scan of ``x`` by ``dt_proj(dt)``, ``B`` and ``C``. All heads share
    ``B`` and ``C``. The state has the last inputs of the convolution, and the state of the scan in
    float32.

    Args:
        vllm_config: ``vllm_config.model_config.hf_config`` has ``hidden_size``,
            ``mamba_num_heads``, ``hidden_size_per_head``, ``mamba_d_state``, ``mamba_d_conv`` and
            ``rms_norm_eps``. An optional ``vllm_config.quant_config`` is the quantization of the
            projections.
        prefix: the layer's path in the model. The states are found by this path.
        kwargs: ignored; callers of vLLM's class pass further ones.

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

        heads = config.mamba_num_heads
        inner = heads * config.hidden_size_per_head

        self.config = config
        self.num_heads = heads // ranks_of({"mamba_num_heads": heads})
        self.head_dim = config.hidden_size_per_head
        self.ssm_state_size = config.mamba_d_state
        self.conv_kernel_size = config.mamba_d_conv

        # As the model's authors choose the rank.
        self.time_step_rank = max(64, config.hidden_size // 16)
        shards = rank_shards([(inner, heads)], "mamba_num_heads")
        self.conv1d = DepthwiseConv(shards, self.conv_kernel_size, False)
        self._make_projections(config, inner, getattr(vllm_config, "quant_config", None))

        self.A = by_channel(heads, load=negated_exponential)
        self.D = by_channel(heads)
        self.dt_bias = by_channel(heads)
        self.dt_norm = RMSNorm(self.time_step_rank, eps=config.rms_norm_eps)
        self.B_norm = RMSNorm(self.ssm_state_size, eps=config.rms_norm_eps)
        self.C_norm = RMSNorm(self.ssm_state_size, eps=config.rms_norm_eps)

        # The default while a model is built is the dtype of its weights.
        self.dtype = torch.get_default_dtype()
        self.convolve = CausalConv1d("silu")
        self.convolve_step = CausalConv1dUpdate("silu")
        self.scan = MambaChunkScan(CHUNK_SIZE, True)
        self.scan_step = SelectiveStateUpdate(True)

    def _make_projections(
        self, config: Any, inner: int, quant_config: QuantizationConfig | None
    ) -> None:
        def settings(name: str) -> dict[str, Any]:
            return {
                "bias": False,
                "quant_config": quant_config,
                "prefix": f"{self.prefix}.{name}",
                "return_bias": False,
            }

        hidden_size = config.hidden_size
        parts = self.time_step_rank + 2 * self.ssm_state_size
        self.in_proj = MergedColumnParallelLinear(hidden_size, [inner] * 2, **settings("in_proj"))
        self.bcdt_proj = RowParallelLinear(inner, parts, **settings("bcdt_proj"))
        self.dt_proj = ColumnParallelLinear(
            self.time_step_rank, config.mamba_num_heads, **settings("dt_proj")
        )
        self.out_proj = RowParallelLinear(inner, hidden_size, **settings("out_proj"))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the last inputs and of the scan's state."""
        conv = (self.conv1d.channels, self.conv_kernel_size - 1)
        return (conv, (self.num_heads, self.head_dim, self.ssm_state_size))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype and float32: steps add up in the state of the scan."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, output: Tensor, **kwargs: Any) -> None:
        """Mix ``hidden_states`` ``[tokens, hidden_size]`` into ``output``, of the same shape.

        ``kwargs`` are ignored.

        Raises:
            LayerError: the current batch has no states for the layer.
        """
        batch = self.state_batch(hidden_states, output)
        gate, mixed = self.in_proj(hidden_states).chunk(2, dim=-1)
        mix = self._step_tokens if batch.steps else self._scan_prompts
        y = mix(batch, mixed)
        output.copy_(self.out_proj(y * F.silu(gate)))

    def _step_and_state_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return step sizes ``[tokens, heads]``, and B and C ``[tokens, 1, state]``."""
        sizes = [self.ssm_state_size, self.ssm_state_size, self.time_step_rank]
        b, c, dt = self.bcdt_proj(x).split(sizes, dim=-1)
        # Parts of one projection are not contiguous, as kernels of norms want them.
        b = self.B_norm(b.contiguous())
        c = self.C_norm(c.contiguous())
        dt = self.dt_norm(dt.contiguous())
        return self.dt_proj(dt), b[:, None], c[:, None]

    def _scan_prompts(self, batch: StateBatch, mixed: Tensor) -> Tensor:
        bounds = batch.query_start_loc
        convolved, last = self.convolve(mixed, self.conv1d.taps, bounds, batch.initial(0))

        dt, b, c = self._step_and_state_inputs(convolved)
        x = convolved.view(-1, self.num_heads, self.head_dim)
        initial = batch.initial(1)
        y, state = self.scan(x, dt, self.A, b, c, bounds, initial, self.D, None, self.dt_bias)
        batch.finish(last, state)
        return y.flatten(1)

    def _step_tokens(self, batch: StateBatch, mixed: Tensor) -> Tensor:
        convolved = torch.empty_like(mixed)
        self.convolve_step(mixed, batch.states[0], self.conv1d.taps, batch.slots, convolved)

        dt, b, c = self._step_and_state_inputs(convolved)
        x = convolved.view(-1, self.num_heads, self.head_dim)
        y = step_heads(self.scan_step, batch, x, dt, self.A, b, c, self.D, self.dt_bias)
        return y.flatten(1)
