"""``MambaMixer2``, the mixer of Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.ops.checks import expect_last_dim
from opgraft.ops.linear import RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.state_space.gated_norm import Mixer2RMSNormGated
from opgraft.ops.state_space.layer import (
    DepthwiseConv,
    GroupedColumnParallelLinear,
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
    MambaChunkScan,
    SelectiveStateUpdate,
)
from torch import Tensor

CHUNK_SIZE = 64
"""Tokens that a prompt is scanned in at once; the result does not depend on it."""


@CustomOp.register("mamba_mixer2")
class MambaMixer2(StateLayer):
    """Mixer of Mamba-2 (Dao and Gu, arXiv:2405.21060).

    ``[z, xBC, dt] = in_proj(h)``, ``x, B, C = act(conv(xBC))``, ``y`` is the scan of ``x``, and the result is
    ``out_proj(norm(y, z))``. A rank has a part of the heads, and the groups of these: several ranks have the same group
    where there are fewer groups than ranks. The state is the last inputs of the convolution, and the state of the scan
    in float32.

    Args:
        hidden_size: elements of a token.
        ssm_state_size: elements of the state by element of a head.
        conv_kernel_size: width of the convolution.
        intermediate_size: ``num_heads · head_dim``.
        use_conv_bias: the convolution has a bias.
        use_bias: the projections have one.
        n_groups: groups of heads with one B and C.
        num_heads: of the scan.
        head_dim: elements of a head.
        rms_norm_eps: of the gated norm.
        activation: of the convolution, ``"silu"``.
        use_rms_norm: normalise behind the gate.
        model_config: an engine's settings, for replacements that read them.
        cache_config: likewise.
        quant_config: the quantization of the projections.
        prefix: the layer's path in its model, under which its states are found.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the heads; or neither do they divide the groups, nor the
            groups them.
        ValueError: the sizes contradict each other, or another activation.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        use_rms_norm: bool = True,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(prefix)
        sizes = {
            "hidden_size": hidden_size,
            "ssm_state_size": ssm_state_size,
            "conv_kernel_size": conv_kernel_size,
        }
        expect_sizes("mamba_mixer2", **sizes)
        _expect_heads(num_heads, head_dim, n_groups, intermediate_size)
        self.tp_size = ranks_of({"num_heads of a mixer": num_heads})
        heads, groups = (intermediate_size, num_heads), (n_groups * ssm_state_size, n_groups)
        shards = rank_shards(
            [heads, heads, groups, groups, (num_heads, num_heads)], "heads and groups of a mixer"
        )
        self.num_heads, self.n_groups = shards[4].size, shards[2].size // ssm_state_size
        self.head_dim = head_dim
        self.ssm_state_size = ssm_state_size
        self.conv_kernel_size = conv_kernel_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.model_config, self.cache_config = model_config, cache_config
        convolved = rank_shards([heads, groups, groups], "heads and groups of a mixer")
        self.conv1d = DepthwiseConv(convolved, conv_kernel_size, use_conv_bias)
        self.in_proj = GroupedColumnParallelLinear(
            hidden_size, shards, use_bias, quant_config, f"{prefix}.in_proj"
        )
        self.A = by_channel(num_heads, load=negated_exponential)
        self.D = by_channel(num_heads)
        self.dt_bias = by_channel(num_heads)
        self.norm = Mixer2RMSNormGated(intermediate_size, n_groups, use_rms_norm, rms_norm_eps)
        others: dict[str, Any] = {
            "quant_config": quant_config,
            "prefix": f"{prefix}.out_proj",
            "return_bias": False,
        }
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, bias=use_bias, **others)
        self.dtype = torch.get_default_dtype()
        self.convolve, self.convolve_step = CausalConv1d(activation), CausalConv1dUpdate(activation)
        self.scan, self.scan_step = MambaChunkScan(CHUNK_SIZE, True), SelectiveStateUpdate(True)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the last inputs and of the scan's state."""
        conv = (self.conv1d.channels, self.conv_kernel_size - 1)
        return (conv, (self.num_heads, self.head_dim, self.ssm_state_size))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype, and float32."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        """Mix ``hidden_states`` ``[tokens, hidden_size]``.

        Args:
            hidden_states: of the tokens of all sequences.
            mup_vector: multiplies what ``in_proj`` gives, by its last dimension.

        Raises:
            LayerError: the current batch has no states for the layer.
            ValueError: ``mup_vector`` has another last dimension.
        """
        batch = self.state_batch(hidden_states)
        projected = self.in_proj(hidden_states)
        if mup_vector is not None:
            expect_last_dim("mamba_mixer2", "mup_vector", mup_vector, projected.shape[-1])
            projected = projected * mup_vector
        inner = self.num_heads * self.head_dim
        gate, mixed, dt = torch.split(
            projected, [inner, self.conv1d.channels, self.num_heads], dim=-1
        )
        y = self._stepped(batch, mixed, dt) if batch.steps else self._scanned(batch, mixed, dt)
        return self.out_proj(self.norm(y, gate))

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x ``[tokens, heads, head_dim]``, and B and C ``[tokens, groups, state]``."""
        grouped = self.n_groups * self.ssm_state_size
        sizes = [self.num_heads * self.head_dim, grouped, grouped]
        x, b, c = torch.split(mixed, sizes, dim=-1)
        tokens, groups = len(mixed), (self.n_groups, self.ssm_state_size)
        return (
            x.view(tokens, self.num_heads, self.head_dim),
            b.view(tokens, *groups),
            c.view(tokens, *groups),
        )

    def _scanned(self, batch: StateBatch, mixed: Tensor, dt: Tensor) -> Tensor:
        bounds = batch.query_start_loc
        mixed, last = self.convolve(
            mixed, self.conv1d.taps, bounds, batch.initial(0), self.conv1d.bias
        )
        x, b, c = self._parts(mixed)
        y, state = self.scan(
            x, dt, self.A, b, c, bounds, batch.initial(1), self.D, None, self.dt_bias
        )
        batch.finish(last, state)
        return y.flatten(1)

    def _stepped(self, batch: StateBatch, mixed: Tensor, dt: Tensor) -> Tensor:
        convolved = torch.empty_like(mixed)
        self.convolve_step(
            mixed, batch.states[0], self.conv1d.taps, batch.slots, convolved, self.conv1d.bias
        )
        x, b, c = self._parts(convolved)
        return step_heads(self.scan_step, batch, x, dt, self.A, b, c, self.D, self.dt_bias).flatten(
            1
        )


def _expect_heads(num_heads: int, head_dim: int, n_groups: int, intermediate_size: int) -> None:
    expect_sizes("mamba_mixer2", num_heads=num_heads, head_dim=head_dim, n_groups=n_groups)
    if num_heads * head_dim != intermediate_size or num_heads % n_groups:
        raise ValueError(
            f"mamba_mixer2: {num_heads} heads of {head_dim} in {n_groups} groups, expected {intermediate_size} "
            "elements and a divisor of the heads"
        )


def step_heads(
    update: SelectiveStateUpdate,
    batch: StateBatch,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # the letters of the paper
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
) -> Tensor:
    """Compute one more token of each sequence, with one number per head where the update takes one per element.

    Args:
        update: the op.
        batch: whose second state is that of the scan.
        x: ``[sequences, heads, head_dim]``; so is the result.
        dt: ``[sequences, heads]``.
        A: ``[heads]``.
        B: ``[sequences, groups, state]``.
        C: as ``B``.
        D: ``[heads]``.
        dt_bias: ``[heads]``.
    """
    y, head = torch.empty_like(x), x.shape[-1]
    decay = A[:, None, None].expand(-1, head, B.shape[-1])
    per_head = D[:, None].expand(-1, head), None, dt_bias[:, None].expand(-1, head)
    update(
        batch.states[1],
        x,
        dt[..., None].expand(-1, -1, head),
        decay,
        B,
        C,
        batch.slots,
        y,
        *per_head,
    )
    return y
