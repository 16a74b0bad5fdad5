"""Activations, plain and gated, as modules. The forms of ``functional`` have the maths.

A gated activation takes ``[..., 2·d]`` and returns ``[..., d]`` in any floating-point dtype. A
plain activation keeps shape and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.activation import functional as forms
from opgraft.ops.checks import expect_choice, expect_not_negative, halves
from opgraft.ops.on_triton import on_triton
from opgraft.ops.precision import compute_dtype
from torch import Tensor, nn

__all__ = [
    "FastGELU",
    "FatreluAndMul",
    "GELU",
    "GELUTanh",
    "GeluAndMul",
    "GeluAndMulSparse",
    "MulAndSilu",
    "NewGELU",
    "QuickGELU",
    "ReLU",
    "ReLUSquaredActivation",
    "SiLU",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
]

TRITON = on_triton("opgraft.ops.activation.triton", "opgraft.ops.fused.quantization.triton")


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """SwiGLU's gate, ``silu(gate) · up`` (arXiv:2002.05202).

    Args:
        compile_native: ignored; callers of vLLM's class pass the argument. The native definition
            compiles with the caller.
    """

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    # vLLM's is static too, and some callers use the class without an instance.
    @staticmethod
    @calls_functional
    def forward_native(x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.silu_and_mul(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("mul_and_silu")
class MulAndSilu(CustomOp):
    """SwiGLU's gate with the roles swapped, ``first half · silu(second half)`` (arXiv:2002.05202).

    ``custom_ops`` switches the op on every platform. vLLM's constructor overrides the switch on
    some.
    """

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.mul_and_silu(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """GeGLU's gate, ``gelu(gate) · up`` (arXiv:2002.05202).

    Every platform honours ``approximate``. On one platform vLLM's native definition takes the exact
    form for ``"tanh"``.

    Args:
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for its tanh approximation.

    Raises:
        ValueError: ``approximate`` is unknown.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        expect_choice("gelu_and_mul", "approximate", approximate, forms.APPROXIMATIONS)
        self.approximate = approximate

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.gelu_and_mul(x, self.approximate)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


@CustomOp.register("gelu_and_mul_sparse")
class GeluAndMulSparse(CustomOp):
    """GeGLU's gate with the smaller gates of each row cut to zero (Gemma 3n; arXiv:2002.05202).

    Args:
        activation_sparsity: the fraction between 0 and 1 of normally distributed gates to cut.
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for its tanh approximation.

    Raises:
        ValueError: ``activation_sparsity`` is not between 0 and 1, or ``approximate`` is unknown.
            For 0 use ``GeluAndMul``.
    """

    def __init__(self, activation_sparsity: float, approximate: str = "none") -> None:
        super().__init__()
        expect_choice("gelu_and_mul_sparse", "approximate", approximate, forms.APPROXIMATIONS)
        forms.expect_sparsity(activation_sparsity)
        self.activation_sparsity = activation_sparsity
        self.approximate = approximate

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.gelu_and_mul_sparse(x, self.activation_sparsity, self.approximate)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"activation_sparsity={self.activation_sparsity}, approximate={self.approximate!r}"


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(CustomOp):
    """A thresholded gate, ``(0 if gate <= threshold else gate) · up`` (arXiv:2402.10517).

    NaN stays NaN. ``custom_ops`` switches the op on every platform. vLLM's constructor overrides
    the switch on some.

    Args:
        threshold: the largest gate that becomes zero.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.fatrelu_and_mul(x, self.threshold)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


@CustomOp.register("swigluoai_and_mul")
class SwigluOAIAndMul(CustomOp):
    """The clipped gate of gpt-oss, over interleaved gates and ups (arXiv:2508.10925).

    Args:
        alpha: steepness of the sigmoid.
        limit: the largest gate; ups are clipped to ``±limit``.

    Raises:
        ValueError: ``limit`` is negative.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        expect_not_negative("swigluoai_and_mul", "limit", limit)
        self.alpha = alpha
        self.limit = limit

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.swigluoai_and_mul(x, self.alpha, self.limit)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"


@CustomOp.register("silu_and_mul_with_clamp")
class SiluAndMulWithClamp(CustomOp):
    """SwiGLU's gate over clipped inputs (arXiv:2002.05202).

    The result is ``silu(min(gate, limit)) · clip(up, ±limit)``. There are kernels for the defaults
    of ``alpha`` and ``beta``.

    Args:
        swiglu_limit: the largest gate; ups are clipped to ``±swiglu_limit``.
        alpha: factor of the gate inside the sigmoid of ``silu``.
        beta: added to the up.
        compile_native: ignored, as in ``SiluAndMul``.

    Raises:
        ValueError: ``swiglu_limit`` is negative.
    """

    def __init__(
        self,
        swiglu_limit: float,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        compile_native: bool = True,
    ) -> None:
        super().__init__()
        expect_not_negative("silu_and_mul_with_clamp", "swiglu_limit", swiglu_limit)

        self.swiglu_limit = swiglu_limit
        self.alpha = alpha
        self.beta = beta
        self.is_plain = alpha == 1.0 and beta == 0.0

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        # No kernel takes other factors, so the definition stands here.
        if self.is_plain:
            return functional.silu_and_mul_with_clamp(x, self.swiglu_limit)

        gate, up = halves("silu_and_mul_with_clamp", "x", x)
        dtype = compute_dtype(x.dtype)
        limit = self.swiglu_limit
        gate = gate.to(dtype).clamp(max=limit)
        up = up.to(dtype).clamp(-limit, limit)

        y = gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)
        return y.to(x.dtype)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        limit = f"swiglu_limit={self.swiglu_limit}"
        if self.is_plain:
            return limit
        return f"{limit}, alpha={self.alpha}, beta={self.beta}"


@CustomOp.register("swiglustep_and_mul")
class SwigluStepAndMul(CustomOp):
    """SwiGLU's gate, clipped after the activation: ``min(silu(gate), limit) · clip(up, ±limit)``.

    This is the gate of the model Step-3.5, from SwiGLU's gate (arXiv:2002.05202).

    Args:
        limit: the largest activated gate; ups are clipped to ``±limit``.

    Raises:
        ValueError: ``limit`` is negative.
    """

    def __init__(self, limit: float = 7.0) -> None:
        super().__init__()
        expect_not_negative("swiglustep_and_mul", "limit", limit)
        self.limit = limit

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the gated activation.

        Raises:
            ValueError: the last dimension of ``x`` is odd.
        """
        return functional.swiglustep_and_mul(x, self.limit)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"limit={self.limit}"


@CustomOp.register("gelu_new")
class NewGELU(CustomOp):
    """The tanh approximation of GELU as GPT-2 writes it (arXiv:1606.08415)."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.gelu_new(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("gelu_fast")
class FastGELU(CustomOp):
    """The tanh approximation of GELU with a factored argument (arXiv:1606.08415)."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.gelu_fast(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("quick_gelu")
class QuickGELU(CustomOp):
    """The sigmoid approximation of GELU, ``x · sigmoid(1.702 · x)`` (arXiv:1606.08415)."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.quick_gelu(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("gelu_tanh")
class GELUTanh(CustomOp):
    """The tanh approximation of GELU, by torch's own function (arXiv:1606.08415)."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.gelu_tanh(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("gelu")
class GELU(CustomOp, nn.GELU):
    """GELU, a subclass of ``torch.nn.GELU`` and a drop-in for that class (arXiv:1606.08415).

    Raises:
        ValueError: ``approximate`` is neither ``"none"`` nor ``"tanh"``.
    """

    def __init__(self, approximate: str = "none") -> None:
        expect_choice("gelu", "approximate", approximate, forms.APPROXIMATIONS)
        super().__init__(approximate)

    @calls_functional
    def forward_native(self, input: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.gelu(input, self.approximate)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("silu")
class SiLU(CustomOp, nn.SiLU):
    """SiLU or swish, ``x · sigmoid(x)``, a drop-in for ``torch.nn.SiLU`` (arXiv:1702.03118).

    The class is a subclass of torch's. With ``inplace=True`` a call writes to the input.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(inplace)

    @calls_functional
    def forward_native(self, input: Tensor, *, functional: Any = NATIVE) -> Tensor:
        if not self.inplace:
            return functional.silu(input)
        functional.silu_(input)
        return input

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("relu")
class ReLU(CustomOp, nn.ReLU):
    """Rectified linear unit, ``max(x, 0)``, a drop-in for ``torch.nn.ReLU``.

    The source is Nair and Hinton, ICML 2010. The class is a subclass of torch's. With
    ``inplace=True`` a call writes to the input.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(inplace)

    @calls_functional
    def forward_native(self, input: Tensor, *, functional: Any = NATIVE) -> Tensor:
        if self.inplace:
            return input.relu_()
        return functional.relu(input)


@CustomOp.register("relu2")
class ReLUSquaredActivation(CustomOp):
    """Squared ReLU, ``max(x, 0)²`` (So et al., Primer, arXiv:2109.08668).

    Args:
        compile_native: ignored; callers of vLLM's class pass the argument. The native definition
            compiles with the caller.
    """

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.relu2(x)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu
