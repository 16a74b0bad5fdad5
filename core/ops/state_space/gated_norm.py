"""``Mixer2RMSNormGated``, the gated norm of Mamba-2's mixer; ranks may share a group."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from opgraft.ops.checks import expect_alike, expect_last_dim, expect_not_negative, expect_size
from opgraft.ops.layernorm.functional import expect_group_size
from opgraft.ops.linear.sharding import divide
from opgraft.ops.on_triton import on_triton
from opgraft.ops.precision import compute_dtype
from opgraft.ops.state_space.layer import load_channels, rank_shards
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Mixer2RMSNormGated"]


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(CustomOp):
    """Gated root mean square norm by groups, ``rms(x · silu(gate)) · weight`` (arXiv:2405.21060).

    A rank has a part of the elements. If there is one group, the ranks add up their squares. If the
    ranks do not divide several groups, each rank gathers all elements, normalises, and keeps its
    part.

    Args:
        full_hidden_size: elements of all ranks.
        full_n_groups: groups of all ranks, each with a mean square of its own.
        use_rms_norm: False applies the gate only, without the norm.
        eps: added to the mean square.

    Shapes:
        ``x``, ``gate`` and the result are ``[..., full_hidden_size / tp_size]`` in any
        floating-point dtype.

    Raises:
        LayerError: the ranks do not divide the elements.
        ValueError: the groups do not divide the elements.
    """

    def __init__(
        self,
        full_hidden_size: int,
        full_n_groups: int,
        use_rms_norm: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        op = "mixer2_gated_rms_norm"
        expect_size(op, "full_hidden_size", full_hidden_size)
        expect_size(op, "full_n_groups", full_n_groups)
        expect_not_negative(op, "eps", eps)

        self.tp_size = get_tensor_model_parallel_world_size()
        self.tp_rank = get_tensor_model_parallel_rank()
        self.full_hidden_size = full_hidden_size
        self.n_groups = full_n_groups
        self.group_size = full_hidden_size // max(full_n_groups, 1)
        if self.group_size * full_n_groups != full_hidden_size:
            raise ValueError(
                f"{op}: full_n_groups is {full_n_groups}, expected a divisor of {full_hidden_size}"
            )

        expect_group_size(self.group_size, full_hidden_size)
        what = "full_hidden_size of a gated norm"

        self.per_rank_hidden_size = divide(full_hidden_size, self.tp_size, what)
        self.variance_epsilon = eps
        self.use_rms_norm = use_rms_norm

        self.weight: nn.Parameter | None = None
        if use_rms_norm:
            self.weight = nn.Parameter(torch.ones(self.per_rank_hidden_size), requires_grad=False)
            set_weight_attrs(self.weight, {"weight_loader": self.weight_loader})

    def weight_loader(self, param: Tensor, loaded_weight: LoadedTensor) -> None:
        """Load this rank's elements of a weight ``[full_hidden_size]``.

        Raises:
            WeightError: the loaded tensor has another shape.
        """
        size = self.full_hidden_size
        load_channels(param, loaded_weight, rank_shards([(size, size)], "a gated norm"))

    # This table makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = on_triton("opgraft.ops.state_space.triton_norm")

    @calls_functional
    def forward_native(self, x: Tensor, gate: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the norm of ``x`` gated by ``gate``.

        Raises:
            ValueError: the last dimension of ``x`` has not the rank's elements, or ``gate`` has
                another shape, dtype or device.
        """
        expect_last_dim("mixer2_gated_rms_norm", "x", x, self.per_rank_hidden_size)
        expect_alike("mixer2_gated_rms_norm", "gate", gate, "x", x)
        # The rank has whole groups, or nothing is normalised: no other rank is needed.
        if self.weight is None or self.n_groups % self.tp_size == 0:
            normalised: Tensor = functional.mixer2_gated_rms_norm(
                x, gate, self.weight, self.variance_epsilon, self.group_size
            )
            return normalised

        dtype = compute_dtype(x.dtype)
        gated = x.to(dtype) * F.silu(gate.to(dtype))
        return (self._normalised(gated) * self.weight.to(dtype)).to(x.dtype)

    def _normalised(self, gated: Tensor) -> Tensor:
        """Normalise by groups that ranks share."""
        if self.n_groups == 1:
            total = tensor_model_parallel_all_reduce(gated.square().sum(-1, keepdim=True))
            return gated * torch.rsqrt(total / self.full_hidden_size + self.variance_epsilon)

        gathered = tensor_model_parallel_all_gather(gated)
        groups = gathered.reshape(*gated.shape[:-1], self.n_groups, self.group_size)
        variance = groups.square().mean(-1, keepdim=True)
        normalised = groups * torch.rsqrt(variance + self.variance_epsilon)
        return normalised.flatten(-2).chunk(self.tp_size, dim=-1)[self.tp_rank]

    def extra_repr(self) -> str:
        sizes = f"{self.full_hidden_size}, groups={self.n_groups}"
        return f"{sizes}, eps={self.variance_epsilon}, tp={self.tp_size}"
