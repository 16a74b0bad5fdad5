"""Mixtures of experts, where each token visits few experts (Shazeer et al., arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.activation import functional as activations
from opgraft.ops.checks import (
    expect_choice,
    expect_floating,
    expect_integers,
    expect_same_device,
    expect_same_dtype,
    values_are_checked,
    values_are_known,
)
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["fused_experts"]

# Traced code reads the dictionary: Dynamo refuses a proxy after a change of any dictionary.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": activations.silu_and_mul.native,
    "gelu": activations.gelu_and_mul.native,
    "swigluoai": activations.swigluoai_and_mul.native,
}

ACTIVATIONS = MappingProxyType(_ACTIVATIONS)
"""Gated activations by their names in models; each maps ``[..., 2·d]`` to ``[..., d]``."""


def _like_x(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Return an empty tensor like ``x``; the fake rule of ``fused_experts``."""
    return x.new_empty(x.shape)


@register_functional("unquantized_fused_moe", _like_x)
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Sum the outputs of each token's experts ``e``: ``Σ weight · w2[e] · act(w13[e] · x)``.

    Tokens are sorted by expert, so the weights of each chosen expert are read once, and no others.
    In compiled code the ids are unknown, so all experts compute all tokens. Products have the
    dtype of ``x``. The weighted sum is computed in float32 (float64 for float64 input) and rounded
    once.

    Args:
        x: ``[tokens, hidden_size]``.
        w13: ``[experts, 2 · intermediate_size, hidden_size]``: the rows of the gate, then the rows
            of up; for ``"swigluoai"`` in turn.
        w2: ``[experts, hidden_size, intermediate_size]``.
        topk_weights: ``[tokens, topk]`` in any floating-point dtype.
        topk_ids: ``[tokens, topk]``, int32 or int64. An id of -1 means an expert of another rank,
            and adds nothing.
        activation: ``"silu"``, ``"gelu"`` (exact), or ``"swigluoai"`` of gpt-oss.
        w13_bias: ``[experts, 2 · intermediate_size]``.
        w2_bias: ``[experts, hidden_size]``.

    Returns:
        ``[tokens, hidden_size]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or an id names no
            expert.
    """
    expect_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    # Without values, the host does not know where the rows of an expert end.
    if not values_are_known(topk_ids) or not values_are_known(x):
        return _by_all_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)

    rows, order, bounds = sorted_by_expert(x, topk_ids, w13.shape[0])
    outputs = grouped_experts(rows, bounds, w13, w2, activation, w13_bias, w2_bias)
    return combined(outputs, order, bounds, topk_weights)


def sorted_by_expert(
    x: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Repeat each token for its experts, and sort the copies by expert; ids of -1 come first.

    Args:
        x: ``[tokens, hidden_size]``.
        topk_ids: ``[tokens, topk]``.
        num_experts: the number of experts of this rank.

    Returns:
        ``(rows, order, bounds)``: the rows ``[tokens · topk, hidden_size]``; for each row the pair
        of token and choice, ``token · topk + choice``; and ``num_experts + 1`` bounds, so that
        expert ``e`` has the rows ``bounds[e]`` to ``bounds[e + 1]``.
    """
    ids, order = topk_ids.flatten().sort(stable=True)
    edges = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    bounds: list[int] = torch.searchsorted(ids, edges).tolist()
    return x[order // topk_ids.shape[1]], order, bounds


def grouped_experts(
    rows: Tensor,
    bounds: list[int],
    w13: Tensor,
    w2: Tensor,
    activation: str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Return the outputs of the experts, ``[rows, hidden_size]``, for rows of the same shape.

    Expert ``e`` computes the rows ``bounds[e]`` to ``bounds[e + 1]``. Rows before ``bounds[0]``
    become zeros.
    """
    outputs = [rows.new_zeros(bounds[0], rows.shape[1])]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        gate_up_bias = None if w13_bias is None else w13_bias[expert]
        gate_up = F.linear(rows[begin:end], w13[expert], gate_up_bias)
        hidden = _ACTIVATIONS[activation](gate_up)
        down_bias = None if w2_bias is None else w2_bias[expert]
        outputs.append(F.linear(hidden, w2[expert], down_bias))
    return torch.cat(outputs)


def combined(outputs: Tensor, order: Tensor, bounds: list[int], topk_weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, ``[tokens, hidden_size]``.

    ``outputs`` ``[tokens · topk, hidden_size]``, ``order`` and ``bounds`` are as
    :func:`sorted_by_expert` sorts them. A weight for an id of -1 does not count, even NaN.
    """
    dtype = compute_dtype(outputs.dtype)
    by_token = outputs[order.argsort()].reshape(*topk_weights.shape, outputs.shape[1])

    elsewhere = order[: bounds[0]]
    weights = topk_weights.to(dtype).flatten().index_fill(0, elsewhere, 0.0)
    weighted = by_token.to(dtype) * weights.view(*topk_weights.shape, 1)
    return weighted.sum(1).to(outputs.dtype)


def _by_all_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:
    """Return ``fused_experts`` without a look at the ids: all experts compute all tokens."""
    gate_up = torch.einsum("th,eih->eti", x, w13)
    if w13_bias is not None:
        gate_up = gate_up + w13_bias.unsqueeze(1)

    hidden = _ACTIVATIONS[activation](gate_up)
    outputs = torch.bmm(hidden, w2.transpose(1, 2))
    if w2_bias is not None:
        outputs = outputs + w2_bias.unsqueeze(1)

    dtype = compute_dtype(x.dtype)
    experts = torch.arange(w13.shape[0], dtype=topk_ids.dtype, device=topk_ids.device)
    chosen = topk_ids.unsqueeze(-1) == experts  # [tokens, topk, experts]
    weights = torch.where(chosen, topk_weights.to(dtype).unsqueeze(-1), 0.0).sum(1)
    weighted = weights.t().unsqueeze(-1) * outputs.to(dtype)

    # A weight of zero would make NaN of an infinite output that no token chose.
    is_chosen = chosen.any(1).t().unsqueeze(-1)
    return torch.where(is_chosen, weighted, 0.0).sum(0).to(x.dtype)


def expect_activation(op: str, activation: str) -> None:
    """Raise ``ValueError`` unless ``activation`` is one of ``ACTIVATIONS``."""
    expect_choice(op, "activation", activation, tuple(_ACTIVATIONS))


def expect_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``fused_experts`` fit each other."""
    op = "fused_experts"
    expect_activation(op, activation)
    expect_floating(op, "x", x)
    for name, tensor, count in (
        ("x", x, 2),
        ("w13", w13, 3),
        ("w2", w2, 3),
        ("topk_ids", topk_ids, 2),
    ):
        if tensor.dim() != count:
            shape = tuple(tensor.shape)
            raise ValueError(f"{op}: {name} has shape {shape}, expected {count} dimensions")

    tokens, hidden = x.shape
    experts, rows, _ = w13.shape
    intermediate = w2.shape[2]
    _expect_shape("w13", w13, (experts, 2 * intermediate, hidden))
    _expect_shape("w2", w2, (experts, hidden, intermediate))
    _expect_shape("topk_ids", topk_ids, (tokens, topk_ids.shape[1]))
    _expect_shape("topk_weights", topk_weights, tuple(topk_ids.shape))

    if w13_bias is not None:
        _expect_shape("w13_bias", w13_bias, (experts, rows))
        _expect_like_x("w13_bias", w13_bias, x)
    if w2_bias is not None:
        _expect_shape("w2_bias", w2_bias, (experts, hidden))
        _expect_like_x("w2_bias", w2_bias, x)

    _expect_like_x("w13", w13, x)
    _expect_like_x("w2", w2, x)

    expect_floating(op, "topk_weights", topk_weights)
    expect_integers(op, "topk_ids", topk_ids)
    expect_same_device(op, "topk_weights", topk_weights, "x", x)
    expect_same_device(op, "topk_ids", topk_ids, "x", x)
    expect_ids(op, topk_ids, experts)


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"fused_experts: {name} has shape {tuple(tensor.shape)}, expected {shape}")


def _expect_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    expect_same_dtype("fused_experts", name, tensor, "x", x)
    expect_same_device("fused_experts", name, tensor, "x", x)


def expect_ids(op: str, ids: Tensor, experts: int) -> None:
    """Raise ``ValueError`` for an id that names no expert and is not -1, if values are checked."""
    # aminmax refuses an empty tensor.
    if not ids.numel() or not values_are_checked(ids):
        return

    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest < -1 or highest >= experts:
        raise ValueError(
            f"{op}: topk_ids reach from {lowest} to {highest}, expected those of {experts} "
            f"experts, 0 to {experts - 1}, or -1 for none"
        )
