"""Activations, plain and gated.

A gated activation takes ``[..., 2·d]`` and returns ``[..., d]``. The activation applies to the
first half of the last dimension, the gate, and the product is with the second half, the up
(Shazeer, arXiv:2002.05202), unless a form states another order. All forms take any floating-point
dtype, and compute half types in float32 with one rounding, unless stated.
"""

from __future__ import annotations

import math

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_choice,
    expect_floating,
    expect_not_negative,
    expect_same_device,
    halves,
)
from opgraft.ops.fakes import like, nothing
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "fatrelu_and_mul",
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "gelu_tanh",
    "mul_and_silu",
    "quick_gelu",
    "relu",
    "relu2",
    "silu",
    "silu_",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
    "xielu",
]

APPROXIMATIONS = ("none", "tanh")


def half_of(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Make a contiguous tensor with half the last dimension of ``x``, as a fake rule."""
    *lead, width = x.shape
    return x.new_empty((*lead, width // 2))


def expect_sparsity(activation_sparsity: float) -> None:
    """Raise ``ValueError`` unless the sparsity of ``gelu_and_mul_sparse`` is between 0 and 1."""
    if not 0.0 < activation_sparsity < 1.0:
        raise ValueError(
            f"gelu_and_mul_sparse: activation_sparsity is {activation_sparsity}, expected a number "
            "between 0 and 1"
        )


def normal_quantile(probability: float) -> Tensor:
    """Return ``Φ⁻¹(probability)`` of the standard normal distribution, in float64 on the host."""
    # On the host, also for tensors of a device: not every device has the function or float64.
    value = torch.full((), probability, dtype=torch.float64, device="cpu")
    quantile: Tensor = torch.special.ndtri(value)
    return quantile


@register_functional("silu_and_mul", half_of)
def silu_and_mul(x: Tensor) -> Tensor:
    """Compute SwiGLU's gate, ``silu(gate) · up`` (arXiv:2002.05202).

    ``silu(t)`` is ``t · sigmoid(t)``. ``[..., 2·d]`` to ``[..., d]``. The form rounds
    ``silu(gate)`` to the dtype of ``x`` before the product.

    Raises:
        ValueError: the last dimension of ``x`` is odd, or the dtype is no floating-point dtype.
    """
    gate, up = halves("silu_and_mul", "x", x)
    activated = F.silu(gate)
    return activated * up


@register_functional("mul_and_silu", half_of)
def mul_and_silu(x: Tensor) -> Tensor:
    """Compute SwiGLU's gate with swapped halves (arXiv:2002.05202).

    The result is ``first half · silu(second half)``. ``[..., 2·d]`` to ``[..., d]``. The form
    rounds the activated half to the dtype of ``x`` before the product.

    Raises:
        ValueError: the last dimension of ``x`` is odd, or the dtype is no floating-point dtype.
    """
    plain, gate = halves("mul_and_silu", "x", x)
    activated = F.silu(gate)
    return plain * activated


@register_functional("gelu_and_mul", half_of)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GeGLU's gate, ``gelu(gate) · up`` (arXiv:2002.05202).

    ``[..., 2·d]`` to ``[..., d]``. ``approximate`` is ``"none"`` for the exact GELU, or ``"tanh"``.
    The form rounds ``gelu(gate)`` to the dtype of ``x`` before the product.

    Raises:
        ValueError: the last dimension of ``x`` is odd, or ``approximate`` is unknown.
    """
    expect_choice("gelu_and_mul", "approximate", approximate, APPROXIMATIONS)
    gate, up = halves("gelu_and_mul", "x", x)
    activated = F.gelu(gate, approximate=approximate)
    return activated * up


@register_functional("gelu_and_mul_sparse", half_of)
def gelu_and_mul_sparse(x: Tensor, activation_sparsity: float, approximate: str = "none") -> Tensor:
    """Compute GeGLU's gate, with the smaller gates of each row cut to zero (arXiv:2002.05202).

    This is the gate of Gemma 3n, ``gelu(relu(gate - c)) · up`` with ``c = mean(gate) + std(gate) ·
    Φ⁻¹(activation_sparsity)`` over the row, and the biased standard deviation. Of normally
    distributed gates the fraction ``activation_sparsity`` becomes zero. ``[..., 2·d]`` to ``[...,
    d]``.

    Raises:
        ValueError: the last dimension is odd, ``activation_sparsity`` is not inside (0, 1), or
            ``approximate`` is unknown.
    """
    expect_choice("gelu_and_mul_sparse", "approximate", approximate, APPROXIMATIONS)
    expect_sparsity(activation_sparsity)

    gate, up = halves("gelu_and_mul_sparse", "x", x)
    dtype = compute_dtype(x.dtype)
    gate = gate.to(dtype)
    up = up.to(dtype)

    mean = gate.mean(-1, keepdim=True)
    centred = gate - mean
    variance = centred.square().mean(-1, keepdim=True)
    deviation = _root(variance)

    cut = normal_quantile(activation_sparsity) * deviation
    kept = F.relu(centred - cut)
    activated = F.gelu(kept, approximate=approximate)
    y = activated * up
    return y.to(x.dtype)


def _root(variance: Tensor) -> Tensor:
    """Return the square root, with a gradient of zero at zero."""
    constant = variance == 0.0
    # The slope of the root at zero is infinite: times zero, the gradients of such rows would be
    # NaN.
    roots = variance.masked_fill(constant, 1.0).sqrt()
    return roots.masked_fill(constant, 0.0)


@register_functional("fatrelu_and_mul", half_of)
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """Compute a thresholded gate, ``(0 if gate <= threshold else gate) · up`` (arXiv:2402.10517).

    ``[..., 2·d]`` to ``[..., d]``. NaN stays NaN.

    Raises:
        ValueError: the last dimension of ``x`` is odd, or the dtype is no floating-point dtype.
    """
    gate, up = halves("fatrelu_and_mul", "x", x)
    kept = F.threshold(gate, threshold, 0.0)
    return kept * up


@register_functional("swigluoai_and_mul", half_of)
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Compute the clipped gate of gpt-oss, over *interleaved* gates and ups (arXiv:2508.10925).

    The result is ``(up + 1) · gate · sigmoid(alpha · gate)`` with ``gate = min(x[..., 0::2],
    limit)`` and ``up = clip(x[..., 1::2], ±limit)``. ``[..., 2·d]`` to ``[..., d]``.

    Raises:
        ValueError: the last dimension of ``x`` is odd, the dtype is no floating-point dtype, or
            ``limit`` is negative.
    """
    expect_not_negative("swigluoai_and_mul", "limit", limit)
    # Checks only: gates and ups are interleaved here, not halves.
    halves("swigluoai_and_mul", "x", x)
    dtype = compute_dtype(x.dtype)
    gate = x[..., 0::2].to(dtype).clamp(max=limit)
    up = x[..., 1::2].to(dtype).clamp(-limit, limit)

    share = torch.sigmoid(alpha * gate)
    y = (up + 1.0) * gate * share
    return y.to(x.dtype)


@register_functional("silu_and_mul_with_clamp", half_of)
def silu_and_mul_with_clamp(x: Tensor, limit: float) -> Tensor:
    """Compute SwiGLU's gate over clipped inputs (arXiv:2002.05202).

    The result is ``silu(min(gate, limit)) · clip(up, ±limit)``. ``[..., 2·d]`` to ``[..., d]``.

    Raises:
        ValueError: the last dimension of ``x`` is odd, the dtype is no floating-point dtype, or
            ``limit`` is negative.
    """
    expect_not_negative("silu_and_mul_with_clamp", "limit", limit)
    gate, up = halves("silu_and_mul_with_clamp", "x", x)
    dtype = compute_dtype(x.dtype)
    gate = gate.to(dtype).clamp(max=limit)
    up = up.to(dtype).clamp(-limit, limit)

    activated = F.silu(gate)
    y = activated * up
    return y.to(x.dtype)


@register_functional("swiglustep_and_mul", half_of)
def swiglustep_and_mul(x: Tensor, limit: float = 7.0) -> Tensor:
    """Compute SwiGLU's gate, clipped after the activation.

    The result is ``min(silu(gate), limit) · clip(up, ±limit)``. This is the gate of the model
    Step-3.5, from SwiGLU's gate (arXiv:2002.05202). ``[..., 2·d]`` to ``[..., d]``.

    Raises:
        ValueError: the last dimension of ``x`` is odd, the dtype is no floating-point dtype, or
            ``limit`` is negative.
    """
    expect_not_negative("swiglustep_and_mul", "limit", limit)
    gate, up = halves("swiglustep_and_mul", "x", x)
    dtype = compute_dtype(x.dtype)

    activated = F.silu(gate.to(dtype))
    activated = activated.clamp(max=limit)
    up = up.to(dtype).clamp(-limit, limit)
    y = activated * up
    return y.to(x.dtype)


@register_functional("gelu", like)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GELU (arXiv:1606.08415).

    Elementwise ``x · Φ(x)``, with Φ the standard normal distribution function. ``approximate`` is
    ``"none"``, or ``"tanh"`` for the tanh approximation.

    Raises:
        ValueError: ``approximate`` is unknown.
    """
    expect_choice("gelu", "approximate", approximate, APPROXIMATIONS)
    expect_floating("gelu", "x", x)
    return F.gelu(x, approximate=approximate)


@register_functional("gelu_tanh", like)
def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU in its tanh approximation (arXiv:1606.08415). Elementwise.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("gelu_tanh", "x", x)
    return F.gelu(x, approximate="tanh")


@register_functional("gelu_new", like)
def gelu_new(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU as GPT-2 writes it (arXiv:1606.08415).

    Elementwise: ``0.5 · x · (1 + tanh(sqrt(2/π) · (x + 0.044715 · x³)))``.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("gelu_new", "x", x)
    t = x.to(compute_dtype(x.dtype))
    # In GPT-2's order of operations: gelu_fast rounds otherwise.
    inner = math.sqrt(2.0 / math.pi) * (t + 0.044715 * t**3)
    y = 0.5 * t * (1.0 + torch.tanh(inner))
    return y.to(x.dtype)


@register_functional("gelu_fast", like)
def gelu_fast(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU with a factored argument (arXiv:1606.08415).

    Elementwise: ``0.5 · x · (1 + tanh(0.7978845608 · x · (1 + 0.044715 · x²)))``.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("gelu_fast", "x", x)
    t = x.to(compute_dtype(x.dtype))
    inner = t * 0.7978845608 * (1.0 + 0.044715 * t * t)
    y = 0.5 * t * (1.0 + torch.tanh(inner))
    return y.to(x.dtype)


@register_functional("quick_gelu", like)
def quick_gelu(x: Tensor) -> Tensor:
    """Compute the sigmoid approximation of GELU (arXiv:1606.08415).

    Elementwise ``x · sigmoid(1.702 · x)``.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("quick_gelu", "x", x)
    t = x.to(compute_dtype(x.dtype))
    y = t * torch.sigmoid(1.702 * t)
    return y.to(x.dtype)


@register_functional("relu", like)
def relu(x: Tensor) -> Tensor:
    """Compute the rectified linear unit, ``max(x, 0)`` (Nair and Hinton, ICML 2010). Elementwise.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("relu", "x", x)
    return F.relu(x)


@register_functional("relu2", like)
def relu2(x: Tensor) -> Tensor:
    """Compute squared ReLU, ``max(x, 0)²`` (So et al., Primer, arXiv:2109.08668). Elementwise.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("relu2", "x", x)
    return F.relu(x).square()


@register_functional("silu", like)
def silu(x: Tensor) -> Tensor:
    """Compute SiLU or swish, ``x · sigmoid(x)`` (arXiv:1702.03118). Elementwise.

    Raises:
        ValueError: the dtype of ``x`` is no floating-point dtype.
    """
    expect_floating("silu", "x", x)
    return F.silu(x)


@register_functional("silu", nothing, mutates=("x",))
def silu_(x: Tensor) -> None:
    """Write ``silu`` over ``x``."""
    expect_floating("silu_", "x", x)
    F.silu(x, inplace=True)


def expect_parameters_of_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> None:
    """Raise ``ValueError`` unless the parameters are one number each, on the device of ``x``."""
    expect_floating("xielu", "x", x)
    parameters = {"alpha_p": alpha_p, "alpha_n": alpha_n}
    for argument, alpha in parameters.items():
        expect_floating("xielu", argument, alpha)
        if alpha.numel() != 1:
            raise ValueError(
                f"xielu: {argument} has shape {tuple(alpha.shape)}, expected one element"
            )
        expect_same_device("xielu", argument, alpha, "x", x)


@register_functional("xielu", like)
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """Compute xIELU, the expanded integral of the exponential linear unit (arXiv:2411.13010).

    Elementwise (Huang and Schlag). With ``p = softplus(alpha_p)`` and ``n = beta +
    softplus(alpha_n)``, the result is ``p · x² + beta · x`` for ``x > 0``, else ``(expm1(min(x,
    eps)) - x) · n + beta · x``.

    Args:
        x: any shape.
        alpha_p: one element, the stored parameter.
        alpha_n: one element, the stored parameter.
        beta: the slope at zero.
        eps: upper bound of the argument of the exponential, a small negative number.

    Raises:
        ValueError: a dtype is no floating-point dtype, or a parameter has several elements or
            another device.
    """
    expect_parameters_of_xielu(x, alpha_p, alpha_n)
    t = x.to(compute_dtype(x.dtype))
    positive = F.softplus(alpha_p.to(t.dtype))
    negative = beta + F.softplus(alpha_n.to(t.dtype))

    # The bound keeps the branch that torch.where drops finite, and with it the gradients.
    exponential = torch.expm1(torch.clamp(t, max=eps))
    below = (exponential - t) * negative + beta * t
    above = positive * t * t + beta * t
    y = torch.where(t > 0, above, below)
    return y.to(x.dtype)
