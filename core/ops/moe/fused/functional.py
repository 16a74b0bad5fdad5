"""Experts of a mixture, of which each token visits few (Shazeer et al., arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": activations.silu_and_mul.native,
    "gelu": activations.gelu_and_mul.native,
    "swigluoai": activations.swigluoai_and_mul.native,
}
"""Gated activations by the names that models give them; each maps ``[..., 2·d]`` to ``[..., d]``."""


def _like_x(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Make a tensor of the shape and dtype of ``x``; a fake rule."""
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
    """Sum what the chosen experts make of each token: ``Σ weight · w2[e] · act(w13[e] · x)`` over its ids ``e``.

    Tokens are sorted by expert, so that of the weights only those of chosen experts are read, once each. Where values
    cannot be looked at, as in compiled code, all experts compute all tokens. Products have the dtype of ``x``; they are
    weighted and summed in float32 (float64 for float64 input) and rounded once.

    Args:
        x: ``[tokens, hidden_size]``.
        w13: ``[experts, 2 · intermediate_size, hidden_size]``: rows of the gate, then those of up; for
            ``"swigluoai"`` in turn.
        w2: ``[experts, hidden_size, intermediate_size]``.
        topk_weights: ``[tokens, topk]`` in any floating-point dtype.
        topk_ids: ``[tokens, topk]``, int32 or int64. An id of -1 is an expert that another rank has, and adds nothing.
        activation: ``"silu"``, ``"gelu"`` (exact), or ``"swigluoai"``, that of gpt-oss.
        w13_bias: ``[experts, 2 · intermediate_size]``.
        w2_bias: ``[experts, hidden_size]``.

    Returns:
        ``[tokens, hidden_size]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or an id names no expert.
    """
    expect_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    if not values_are_known(topk_ids) or not values_are_known(x):
        return _by_all_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    rows, order, bounds = sorted_by_expert(x, topk_ids, w13.shape[0])
    outputs = grouped_experts(rows, bounds, w13, w2, activation, w13_bias, w2_bias)
    return combined(outputs, order, bounds, topk_weights)


def sorted_by_expert(
    x: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Repeat each token for its experts, and sort the copies by expert; those for experts elsewhere come first.

    Args:
        x: ``[tokens, hidden_size]``.
        topk_ids: ``[tokens, topk]``.
        num_experts: how many there are.

    Returns:
        The rows ``[tokens · topk, hidden_size]``, the pair of token and choice that each is for, ``[tokens · topk]``,
        and where the rows of each expert begin: ``num_experts + 1`` numbers.
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
    """Let each expert compute its rows, of which ``bounds`` says where they begin; zeros before the first's.

    ``[rows, hidden_size]`` to the same shape.
    """
    outputs = [rows.new_zeros(bounds[0], rows.shape[1])]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            gate_up = F.linear(
                rows[begin:end], w13[expert], None if w13_bias is None else w13_bias[expert]
            )
            hidden = ACTIVATIONS[activation](gate_up)
            outputs.append(
                F.linear(hidden, w2[expert], None if w2_bias is None else w2_bias[expert])
            )
    return torch.cat(outputs)


def combined(outputs: Tensor, order: Tensor, bounds: list[int], topk_weights: Tensor) -> Tensor:
    """Bring outputs of experts back into the order of tokens, and sum those of each by its weights.

    ``[tokens · topk, hidden_size]`` to ``[tokens, hidden_size]``. Weights of experts elsewhere do not count, be they
    NaN.
    """
    dtype = compute_dtype(outputs.dtype)
    pairs = outputs[order.argsort()].reshape(*topk_weights.shape, outputs.shape[1])
    weights = topk_weights.to(dtype).flatten().index_fill(0, order[: bounds[0]], 0.0)
    return (pairs.to(dtype) * weights.view(*topk_weights.shape, 1)).sum(1).to(outputs.dtype)


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
    gate_up = torch.einsum("th,eih->eti", x, w13)
    hidden = ACTIVATIONS[activation](
        gate_up if w13_bias is None else gate_up + w13_bias.unsqueeze(1)
    )
    outputs = torch.bmm(hidden, w2.transpose(1, 2))
    outputs = outputs if w2_bias is None else outputs + w2_bias.unsqueeze(1)
    dtype = compute_dtype(x.dtype)
    experts = torch.arange(w13.shape[0], dtype=topk_ids.dtype, device=topk_ids.device)
    chosen = topk_ids.unsqueeze(-1) == experts  # [tokens, topk, experts]
    weights = torch.where(chosen, topk_weights.to(dtype).unsqueeze(-1), 0.0).sum(1)
    weighted = weights.t().unsqueeze(-1) * outputs.to(dtype)
    # Left out, not weighted by zero, which makes NaN of infinities that nobody chose.
    return torch.where(chosen.any(1).t().unsqueeze(-1), weighted, 0.0).sum(0).to(x.dtype)


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
    expect_choice("fused_experts", "activation", activation, tuple(ACTIVATIONS))
    expect_floating("fused_experts", "x", x)
    for name, tensor, dimensions in (
        ("x", x, 2),
        ("w13", w13, 3),
        ("w2", w2, 3),
        ("topk_ids", topk_ids, 2),
    ):
        if tensor.dim() != dimensions:
            raise ValueError(
                f"fused_experts: {name} has shape {tuple(tensor.shape)}, expected {dimensions} dimensions"
            )
    tokens, hidden = x.shape
    experts, rows, intermediate = w13.shape[0], w13.shape[1], w2.shape[2]
    _expect_shape("w13", w13, (experts, 2 * intermediate, hidden))
    _expect_shape("w2", w2, (experts, hidden, intermediate))
    _expect_shape("topk_ids", topk_ids, (tokens, topk_ids.shape[1]))
    _expect_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    for name, bias, shape in (
        ("w13_bias", w13_bias, (experts, rows)),
        ("w2_bias", w2_bias, (experts, hidden)),
    ):
        if bias is not None:
            _expect_shape(name, bias, shape)
            _expect_like_x(name, bias, x)
    _expect_like_x("w13", w13, x)
    _expect_like_x("w2", w2, x)
    expect_floating("fused_experts", "topk_weights", topk_weights)
    expect_integers("fused_experts", "topk_ids", topk_ids)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        expect_same_device("fused_experts", name, tensor, "x", x)
    expect_ids("fused_experts", topk_ids, experts)


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"fused_experts: {name} has shape {tuple(tensor.shape)}, expected {shape}")


def _expect_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    expect_same_dtype("fused_experts", name, tensor, "x", x)
    expect_same_device("fused_experts", name, tensor, "x", x)


def expect_ids(op: str, ids: Tensor, experts: int) -> None:
    """Raise ``ValueError`` for ids that are no expert's, nor -1, where values are checked."""
    if ids.numel() and values_are_checked(ids):
        lowest, highest = (int(bound) for bound in ids.aminmax())
        if lowest < -1 or highest >= experts:
            raise ValueError(
                f"{op}: topk_ids reach from {lowest} to {highest}, expected those of {experts} experts, 0 to "
                f"{experts - 1}, or -1 for none"
            )
