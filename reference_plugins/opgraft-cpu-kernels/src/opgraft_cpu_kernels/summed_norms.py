"""Norms of sums over the ranks of a host. A row is normed while its sum is in the cache.

There are three ways:

1. Ranks with memory in common sum and norm in one call.
2. Ranks without memory in common, and calls that the library refuses, take two steps: the
   collective of the group, then the kernel of the norm.
3. A rank alone has nothing to sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft import functional
from opgraft.distributed import (
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
)
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels import kernels
from opgraft_cpu_kernels.communicator import SharedMemoryCommunicator
from opgraft_cpu_kernels.kernels import DTYPES, FP8, REFUSED

GROUPS = {
    "world": get_world_group,
    "tensor": get_tp_group,
    "pipeline": get_pp_group,
    "data": get_dp_group,
    "expert": get_ep_group,
}
"""Kind of a group of ranks → the function that returns the group."""


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.all_reduce_rms_norm``."""
    shared = _shared(kind, x, residual, weight)
    if shared is not None:
        try:
            normed, summed = shared.all_reduce_rms_norm(x, residual, weight, eps, False)
            return normed, summed
        except REFUSED:
            pass
    if kind not in GROUPS:
        return functional.all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    summed = _summed(x, kind)
    if residual is None:
        return kernels.rms_norm(summed, weight, eps), summed
    return kernels.fused_add_rms_norm(summed, residual, weight, eps)  # type: ignore[no-any-return]


def all_reduce_gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.all_reduce_gemma_rms_norm``."""
    shared = _shared(kind, x, residual, weight)
    if shared is not None:
        try:
            normed, summed = shared.all_reduce_rms_norm(x, residual, weight, eps, True)
            return normed, summed
        except REFUSED:
            pass
    if kind not in GROUPS:
        return functional.all_reduce_gemma_rms_norm.native(x, residual, weight, eps, kind)
    summed = _summed(x, kind)
    if residual is None:
        return kernels.gemma_rms_norm(summed, weight, eps), summed
    normed, total = kernels.fused_add_gemma_rms_norm(summed, residual, weight, eps)
    return normed, total


def all_reduce_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.all_reduce_rms_norm_quant_fp8_static``."""
    shared = _shared(kind, x, residual, weight, scale)
    taken = kernels.by_given_scales(x, scale, group_shape, dtype, x.shape)
    if taken and shared is not None:
        try:
            quantised, summed = shared.all_reduce_rms_norm_quant_fp8_static(
                x, residual, scale, list(group_shape), weight, eps
            )
            return quantised, summed
        except REFUSED:
            pass
    normed, summed = all_reduce_rms_norm(x, residual, weight, eps, kind)
    return kernels.quant_fp8_static(normed, scale, group_shape, dtype), summed


def all_reduce_rms_norm_quant_fp8_dynamic(
    x: Tensor,
    residual: Tensor | None,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``opgraft.functional.all_reduce_rms_norm_quant_fp8_dynamic``."""
    shared = _shared(kind, x, residual, weight, scale_ub)
    taken = kernels.by_own_scales(x, group_shape, scale_ub, dtype)
    if taken and shared is not None:
        try:
            quantised, scales, summed = shared.all_reduce_rms_norm_quant_fp8_dynamic(
                x, residual, list(group_shape), weight, eps, scale_ub, use_ue8m0
            )
            return quantised, scales, summed
        except REFUSED:
            pass
    normed, summed = all_reduce_rms_norm(x, residual, weight, eps, kind)
    quantised, scales = kernels.quant_fp8_dynamic(normed, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales, summed


def _shared(kind: str, x: Tensor, *others: Tensor | None) -> Any:
    """Return the library's group for a kind of ranks, or None if the library cannot take the call.

    Args:
        kind: a key of GROUPS.
        x: the tensor to sum.
        others: the other tensors of the call.
    """
    # torch.compile cannot trace calls of the library's group.
    if kind not in GROUPS or x.dtype not in DTYPES or is_dynamo_compiling():
        return None
    # The group refuses wrong dtypes, but it would read other devices' memory, and ignore that a
    # view is negated.
    for each in (x, *others):
        if each is not None and (not each.is_cpu or each.is_neg()):
            return None
    communicator = GROUPS[kind]().communicator
    if isinstance(communicator, SharedMemoryCommunicator):
        return communicator.shared
    return None


def _summed(x: Tensor, kind: str) -> Tensor:
    """Return the sum over ranks, in new memory."""
    group = GROUPS[kind]()
    if group.world_size == 1:
        return x.clone()
    return group.all_reduce(x)
