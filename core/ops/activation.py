"""Activations, plain and gated.

A gated activation takes ``[..., 2·d]`` and returns ``[..., d]``: the first half of the last dimension is the gate, to
which the activation applies, the second half is what it multiplies (Shazeer, arXiv:2002.05202).
"""

from __future__ import annotations

import math

import torch
from opgraft.custom_op import CustomOp
from opgraft.ops.checks import halves
from opgraft.ops.precision import compute_dtype
from torch import Tensor, nn
from torch.nn import functional as F

APPROXIMATIONS = ("none", "tanh")


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """SwiGLU's gate: ``silu(gate) · up``, with ``silu(t) = t · sigmoid(t)`` (arXiv:2002.05202).

    ``silu(gate)`` is rounded to the input's dtype before it is multiplied, as by an activation followed by a product.

    Args:
        compile_native: taken so that classes which pass it construct; the native definition compiles with its caller.

    Shapes:
        ``[..., 2·d]`` to ``[..., d]``, any floating-point dtype.
    """

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        """Raises ``ValueError`` if the last dimension of ``x`` is odd."""
        gate, up = halves("silu_and_mul", "x", x)
        return F.silu(gate) * up


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """GeGLU's gate: ``gelu(gate) · up`` (arXiv:2002.05202).

    ``approximate`` is honoured on every platform; in vLLM the native definition takes the exact form for ``"tanh"`` on
    one of them. ``gelu(gate)`` is rounded to the input's dtype before it is multiplied.

    Args:
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for its tanh approximation.

    Shapes:
        ``[..., 2·d]`` to ``[..., d]``, any floating-point dtype.

    Raises:
        ValueError: another ``approximate``.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = _checked_approximation("gelu_and_mul", approximate)

    def forward_native(self, x: Tensor) -> Tensor:
        """Raises ``ValueError`` if the last dimension of ``x`` is odd."""
        gate, up = halves("gelu_and_mul", "x", x)
        return F.gelu(gate, approximate=self.approximate) * up

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


@CustomOp.register("gelu_new")
class NewGELU(CustomOp):
    """The tanh approximation of GELU as GPT-2 writes it (Hendrycks and Gimpel, arXiv:1606.08415).

    ``0.5 · x · (1 + tanh(sqrt(2/π) · (x + 0.044715 · x³)))``, elementwise, any shape and floating-point dtype; half
    types are computed in float32 and rounded once.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        t = x.to(compute_dtype(x.dtype))
        inner = math.sqrt(2.0 / math.pi) * (t + 0.044715 * t**3)
        return (0.5 * t * (1.0 + torch.tanh(inner))).to(x.dtype)


@CustomOp.register("gelu_fast")
class FastGELU(CustomOp):
    """The tanh approximation of GELU with its argument factored (Hendrycks and Gimpel, arXiv:1606.08415).

    ``0.5 · x · (1 + tanh(0.7978845608 · x · (1 + 0.044715 · x²)))``, elementwise, any shape and floating-point dtype;
    half types are computed in float32 and rounded once. ``NewGELU`` up to rounding.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        t = x.to(compute_dtype(x.dtype))
        inner = t * 0.7978845608 * (1.0 + 0.044715 * t * t)
        return (0.5 * t * (1.0 + torch.tanh(inner))).to(x.dtype)


@CustomOp.register("quick_gelu")
class QuickGELU(CustomOp):
    """The sigmoid approximation of GELU, ``x · sigmoid(1.702 · x)`` (Hendrycks and Gimpel, arXiv:1606.08415).

    Elementwise, any shape and floating-point dtype; half types are computed in float32 and rounded once.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        t = x.to(compute_dtype(x.dtype))
        return (t * torch.sigmoid(1.702 * t)).to(x.dtype)


@CustomOp.register("gelu")
class GELU(CustomOp, nn.GELU):
    """GELU, a drop-in for ``torch.nn.GELU``, of which it is a subclass (arXiv:1606.08415).

    ``x · Φ(x)``, Φ the standard normal distribution function, or its tanh approximation; elementwise, any shape.

    Raises:
        ValueError: ``approximate`` is neither ``"none"`` nor ``"tanh"``.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(_checked_approximation("gelu", approximate))

    def forward_native(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate=self.approximate)


@CustomOp.register("silu")
class SiLU(CustomOp, nn.SiLU):
    """SiLU or swish, ``x · sigmoid(x)``, a drop-in for ``torch.nn.SiLU``, of which it is a subclass (arXiv:1702.03118).

    Elementwise, any shape. With ``inplace=True`` it writes to its input, as torch's does.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(inplace)

    def forward_native(self, input: Tensor) -> Tensor:
        return F.silu(input, inplace=self.inplace)


def _checked_approximation(op: str, approximate: str) -> str:
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"{op}: approximate is {approximate!r}, expected one of {APPROXIMATIONS}")
    return approximate
