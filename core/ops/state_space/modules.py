"""The ops of state spaces without weights: a device brings kernels for these."""

from __future__ import annotations

from typing import Any

from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice, expect_positive, expect_size
from opgraft.ops.on_triton import on_triton
from opgraft.ops.state_space.causal_conv import ACTIVATIONS
from torch import Tensor

__all__ = [
    "CausalConv1d",
    "CausalConv1dUpdate",
    "MambaChunkScan",
    "SelectiveScan",
    "SelectiveStateUpdate",
]

CHUNKS = on_triton("opgraft.ops.state_space.triton_chunks")
SCANS = on_triton("opgraft.ops.state_space.triton_scan")
CONVOLUTIONS = on_triton("opgraft.ops.state_space.triton_conv")


@CustomOp.register("causal_conv1d")
class CausalConv1d(CustomOp):
    """Causal depthwise convolution over tokens, from the states of sequences (arXiv:2312.00752).

    Args:
        activation: ``"silu"``, also called ``"swish"``, or none.

    Raises:
        ValueError: the activation is unknown.
    """

    functional_cuda = functional_xpu = CONVOLUTIONS  # makes forward_cuda, forward_xpu

    def __init__(self, activation: str | None = None) -> None:
        super().__init__()
        expect_choice("causal_conv1d", "activation", activation, ACTIVATIONS)
        self.activation = activation

    @calls_functional
    def forward_native(
        self,
        x: Tensor,
        weight: Tensor,
        query_start_loc: Tensor,
        initial_states: Tensor,
        bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Convolve, as ``opgraft.functional.causal_conv1d`` does."""
        return functional.causal_conv1d(
            x, weight, query_start_loc, initial_states, bias, self.activation
        )


@CustomOp.register("causal_conv1d_update")
class CausalConv1dUpdate(CustomOp):
    """Step of a causal depthwise convolution: one token of each sequence (arXiv:2312.00752).

    The step writes to the states.

    Args:
        activation: ``"silu"``, also called ``"swish"``, or none.

    Raises:
        ValueError: the activation is unknown.
    """

    functional_cuda = functional_xpu = CONVOLUTIONS  # makes forward_cuda, forward_xpu

    def __init__(self, activation: str | None = None) -> None:
        super().__init__()
        expect_choice("causal_conv1d_update", "activation", activation, ACTIVATIONS)
        self.activation = activation

    @calls_functional
    def forward_native(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        slots: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> None:
        """Convolve into ``out``, as ``opgraft.functional.causal_conv1d_update`` does."""
        functional.causal_conv1d_update(x, conv_state, weight, slots, out, bias, self.activation)


@CustomOp.register("selective_scan")
class SelectiveScan(CustomOp):
    """Scan of Mamba over tokens, from the states of sequences (arXiv:2312.00752).

    Args:
        dt_softplus: step sizes are ``softplus(dt + dt_bias)``.
    """

    functional_cuda = functional_xpu = SCANS  # makes forward_cuda, forward_xpu

    def __init__(self, dt_softplus: bool = False) -> None:
        super().__init__()
        self.dt_softplus = dt_softplus

    @calls_functional
    def forward_native(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803  # the letters of the paper
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        query_start_loc: Tensor,
        initial_states: Tensor,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Scan, as ``opgraft.functional.selective_scan`` does."""
        return functional.selective_scan(
            x, dt, A, B, C, query_start_loc, initial_states, D, z, dt_bias, self.dt_softplus
        )


@CustomOp.register("mamba_chunk_scan")
class MambaChunkScan(CustomOp):
    """Scan of Mamba-2 over tokens, from the states of sequences (arXiv:2405.21060).

    Args:
        chunk_size: tokens of a chunk; the result does not depend on the size.
        dt_softplus: step sizes are ``softplus(dt + dt_bias)``.

    Raises:
        ValueError: the size of chunks is no positive integer.
    """

    functional_cuda = functional_xpu = CHUNKS  # makes forward_cuda, forward_xpu

    def __init__(self, chunk_size: int, dt_softplus: bool = False) -> None:
        super().__init__()
        expect_size("mamba_chunk_scan", "chunk_size", chunk_size)
        expect_positive("mamba_chunk_scan", "chunk_size", chunk_size)
        self.chunk_size = chunk_size
        self.dt_softplus = dt_softplus

    @calls_functional
    def forward_native(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803  # the letters of the paper
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        query_start_loc: Tensor,
        initial_states: Tensor,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Scan, as ``opgraft.functional.mamba_chunk_scan`` does."""
        given = x, dt, A, B, C, query_start_loc, initial_states, self.chunk_size, D, z, dt_bias
        return functional.mamba_chunk_scan(*given, self.dt_softplus)


@CustomOp.register("selective_state_update")
class SelectiveStateUpdate(CustomOp):
    """Step of a selective state space: one token of each sequence (arXiv:2312.00752).

    The step writes to the states.

    Args:
        dt_softplus: step sizes are ``softplus(dt + dt_bias)``.
    """

    functional_cuda = functional_xpu = SCANS  # makes forward_cuda, forward_xpu

    def __init__(self, dt_softplus: bool = False) -> None:
        super().__init__()
        self.dt_softplus = dt_softplus

    @calls_functional
    def forward_native(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803  # the letters of the paper
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        slots: Tensor,
        out: Tensor,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> None:
        """Compute into ``out``, as ``opgraft.functional.selective_state_update`` does."""
        functional.selective_state_update(
            state, x, dt, A, B, C, slots, out, D, z, dt_bias, self.dt_softplus
        )
