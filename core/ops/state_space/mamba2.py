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

__all__ = ["MambaMixer2"]

CHUNK_SIZE = 64
"""Tokens of a chunk of a prompt; the result does not depend on the size."""


@CustomOp.register("mamba_mixer2")
class MambaMixer2(StateLayer):
    """Mixer of Mamba-2 (Dao and Gu, arXiv:2405.21060).

    From a token ``h`` the mixer computes ``[z, xBC, dt] = in_proj(h)`` and ``x, B, C =
    act(conv(xBC))``. The result is ``out_proj(norm(y, z))``, with ``y`` the scan of ``x``. A rank
    has a part of the heads, and the groups of these heads. If there are fewer groups than ranks,
    several ranks share a group. The state has the last inputs of the convolution, and the state of
    the scan in float32.

    Args:
        hidden_size: elements of a token.
        ssm_state_size: elements of the state of each element of a head.
        conv_kernel_size: taps of the convolution.
        intermediate_size: ``num_heads · head_dim``.
        use_conv_bias: the convolution has a bias.
        use_bias: the projections have a bias.
        n_groups: groups of heads with one B and C.
        num_heads: heads of the scan.
        head_dim: elements of a head.
        rms_norm_eps: the ``eps`` of the gated norm.
        activation: ``"silu"``, after the convolution.
        use_rms_norm: normalise behind the gate.
        model_config: an engine's settings, kept for replacements.
        cache_config: an engine's settings, kept for replacements.
        quant_config: the quantization of the projections.
        prefix: the layer's path in the model. The states are found by this path.

    Raises:
        LayerError: the tensor-parallel ranks do not divide the heads; or the ranks do not divide
            the groups, and the groups do not divide the ranks.
        ValueError: the sizes contradict each other, or the activation is unknown.
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
        expect_sizes(
            "mamba_mixer2",
            hidden_size=hidden_size,
            ssm_state_size=ssm_state_size,
            conv_kernel_size=conv_kernel_size,
        )
        _expect_heads(num_heads, head_dim, n_groups, intermediate_size)
        self.tp_size = ranks_of({"num_heads of a mixer": num_heads})
        self.head_dim = head_dim
        self.ssm_state_size = ssm_state_size
        self.conv_kernel_size = conv_kernel_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.model_config = model_config
        self.cache_config = cache_config
        heads = (intermediate_size, num_heads)
        groups = (n_groups * ssm_state_size, n_groups)

        # The rows of in_proj: the gate, x, B, C and dt.
        projected = [heads, heads, groups, groups, (num_heads, num_heads)]
        shards = rank_shards(projected, "heads and groups of a mixer")
        self.num_heads = shards[4].size
        self.n_groups = shards[2].size // ssm_state_size

        # The convolution takes x, B and C only.
        convolved = rank_shards([heads, groups, groups], "heads and groups of a mixer")
        self.conv1d = DepthwiseConv(convolved, conv_kernel_size, use_conv_bias)
        self.in_proj = GroupedColumnParallelLinear(
            hidden_size, shards, use_bias, quant_config, f"{prefix}.in_proj"
        )
        self.A = by_channel(num_heads, load=negated_exponential)
        self.D = by_channel(num_heads)
        self.dt_bias = by_channel(num_heads)
        self.norm = Mixer2RMSNormGated(intermediate_size, n_groups, use_rms_norm, rms_norm_eps)
        self.out_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=use_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )

        # The default while a model is built is the dtype of its weights.
        self.dtype = torch.get_default_dtype()
        self._make_ops(activation)

    def _make_ops(self, activation: str) -> None:
        """Create the ops of prompts, and those of steps."""
        self.convolve = CausalConv1d(activation)
        self.convolve_step = CausalConv1dUpdate(activation)
        self.scan = MambaChunkScan(CHUNK_SIZE, True)
        self.scan_step = SelectiveStateUpdate(True)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the last inputs and of the scan's state."""
        conv = (self.conv1d.channels, self.conv_kernel_size - 1)
        return (conv, (self.num_heads, self.head_dim, self.ssm_state_size))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the layer's dtype and float32: steps add up in the state of the scan."""
        return (self.dtype, torch.float32)

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        """Mix ``hidden_states`` ``[tokens, hidden_size]``.

        Args:
            hidden_states: the tokens of all sequences, one sequence after another.
            mup_vector: factors of the outputs of ``in_proj``, one for each element of the last
                dimension.

        Raises:
            LayerError: the current batch has no states for the layer.
            ValueError: ``mup_vector`` has another last dimension.
        """
        batch = self.state_batch(hidden_states)
        projected = self.in_proj(hidden_states)
        if mup_vector is not None:
            expect_last_dim("mamba_mixer2", "mup_vector", mup_vector, projected.shape[-1])
            projected = projected * mup_vector

        sizes = [self.num_heads * self.head_dim, self.conv1d.channels, self.num_heads]
        gate, mixed, dt = torch.split(projected, sizes, dim=-1)
        mix = self._step_tokens if batch.steps else self._scan_prompts
        return self.out_proj(self.norm(mix(batch, mixed, dt), gate))

    def _heads_and_groups(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x ``[tokens, heads, head_dim]``, and B and C ``[tokens, groups, state]``."""
        tokens = len(mixed)
        grouped = self.n_groups * self.ssm_state_size
        sizes = [self.num_heads * self.head_dim, grouped, grouped]
        x, b, c = torch.split(mixed, sizes, dim=-1)

        x = x.view(tokens, self.num_heads, self.head_dim)
        b = b.view(tokens, self.n_groups, self.ssm_state_size)
        c = c.view(tokens, self.n_groups, self.ssm_state_size)
        return x, b, c

    def _scan_prompts(self, batch: StateBatch, mixed: Tensor, dt: Tensor) -> Tensor:
        bounds = batch.query_start_loc

        conv = self.conv1d
        mixed, last = self.convolve(mixed, conv.taps, bounds, batch.initial(0), conv.bias)
        x, b, c = self._heads_and_groups(mixed)
        initial = batch.initial(1)
        y, state = self.scan(x, dt, self.A, b, c, bounds, initial, self.D, None, self.dt_bias)
        batch.finish(last, state)
        return y.flatten(1)

    def _step_tokens(self, batch: StateBatch, mixed: Tensor, dt: Tensor) -> Tensor:
        conv = self.conv1d
        convolved = torch.empty_like(mixed)
        self.convolve_step(mixed, batch.states[0], conv.taps, batch.slots, convolved, conv.bias)

        x, b, c = self._heads_and_groups(convolved)
        y = step_heads(self.scan_step, batch, x, dt, self.A, b, c, self.D, self.dt_bias)
        return y.flatten(1)


def _expect_heads(num_heads: int, head_dim: int, n_groups: int, intermediate_size: int) -> None:
    expect_sizes("mamba_mixer2", num_heads=num_heads, head_dim=head_dim, n_groups=n_groups)
    if num_heads * head_dim != intermediate_size or num_heads % n_groups:
        raise ValueError(
            f"mamba_mixer2: {num_heads} heads of {head_dim} in {n_groups} groups, expected "
            f"{intermediate_size} elements and a divisor of the heads"
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
    """Compute one more token of each sequence, with one number per head for ``A``, ``D`` and steps.

    Args:
        update: the op, which takes one number per element.
        batch: the sequences; their second state is the state of the scan.
        x: ``[sequences, heads, head_dim]``, as the result.
        dt: ``[sequences, heads]``.
        A: ``[heads]``.
        B: ``[sequences, groups, state]``.
        C: as ``B``.
        D: ``[heads]``.
        dt_bias: ``[heads]``.
    """
    head = x.shape[-1]
    y = torch.empty_like(x)
    # Views with stride zero, by which a kernel knows numbers per head: nothing is copied.
    step = dt[..., None].expand(-1, -1, head)
    decay = A[:, None, None].expand(-1, head, B.shape[-1])
    weight = D[:, None].expand(-1, head)
    bias = dt_bias[:, None].expand(-1, head)
    update(batch.states[1], x, step, decay, B, C, batch.slots, y, weight, None, bias)
    return y
