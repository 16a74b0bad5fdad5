"""Normalisation ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice, expect_last_dim, expect_not_negative, expect_size
from opgraft.ops.layernorm import functional as forms
from opgraft.ops.on_triton import on_triton
from torch import Tensor, nn

__all__ = ["GemmaRMSNorm", "LayerNorm", "RMSNorm", "RMSNormGated", "UnscaledRMSNorm"]

TRITON = on_triton("opgraft.ops.layernorm.triton", "opgraft.ops.fused.quantization.triton")


class _EpsByTwoNames:
    """A norm with two names of one epsilon, vLLM's ``variance_epsilon`` and torch's ``eps``."""

    variance_epsilon: float

    @property
    def eps(self) -> float:
        """Return ``variance_epsilon`` under the name in torch's norms."""
        return self.variance_epsilon

    @eps.setter
    def eps(self, eps: float) -> None:
        self.variance_epsilon = eps


class _EpsOfInput:
    """A norm with an optional epsilon: without one the dtype of the computation decides.

    ``torch.nn.RMSNorm`` decides in the same way at each call.
    """

    weight: Tensor
    eps: float | None
    """The epsilon, as given."""

    @property
    def variance_epsilon(self) -> float:
        """Return ``eps``, or the epsilon for inputs of the weight's dtype."""
        return _epsilon(self.eps, self.weight.dtype)

    @variance_epsilon.setter
    def variance_epsilon(self, eps: float | None) -> None:
        self.eps = eps


def _epsilon(eps: float | None, dtype: torch.dtype) -> float:
    """Return ``eps`` if given, else the epsilon of the dtype of the computation for inputs."""
    if eps is not None:
        return eps
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


@CustomOp.register("rms_norm")
class RMSNorm(_EpsOfInput, CustomOp):
    """Root mean square norm, also of a sum with a residual (Zhang and Sennrich, arXiv:1910.07467).

    ``y = x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in float32, or
    float64 for float64 input. The norm rounds the normalised value to the weight's dtype,
    multiplies, and rounds to the input's dtype. If weight and input have one dtype, the result
    equals that of Llama's norm in transformers bit for bit.

    With a residual the norm takes the exact sum ``s = x + residual``, and ``new_residual`` is ``s``
    rounded to the input's dtype. The native definition returns new memory and leaves both arguments
    alone; a platform's kernel may reuse the memory of both.

    Without a weight, ``weight`` is a buffer of ones: kernels that always multiply stay right, and
    the buffer moves with the module.

    Args:
        hidden_size: elements of the last dimension.
        eps: added to the mean square; ``None`` takes the epsilon of the dtype of each computation.
        var_hidden_size: the number of first elements that count in the mean; all if not given.
        has_weight: True adds a learnt weight.
        dtype: dtype of the weight; the default dtype if not given.

    Shapes:
        ``x``, ``residual`` and the results are ``[..., hidden_size]`` in any floating-point dtype.
    """

    weight: Tensor

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_size("rms_norm", "hidden_size", hidden_size)
        if eps is not None:
            expect_not_negative("rms_norm", "eps", eps)
        if var_hidden_size is not None and not 0 < var_hidden_size <= hidden_size:
            raise ValueError(
                f"rms_norm: var_hidden_size is {var_hidden_size}, expected 1 to "
                f"hidden_size={hidden_size}"
            )

        self.hidden_size = hidden_size
        self.eps = eps

        # None lets kernels take the plain norm.
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        self.has_weight = has_weight
        weight = torch.ones(hidden_size, dtype=dtype)
        if has_weight:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight, persistent=False)

    @calls_functional
    def forward_native(
        self, x: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of ``x``, or ``(norm, new_residual)`` of ``x + residual``.

        Raises:
            ValueError: the last dimension of ``x`` is not ``hidden_size``, or ``residual`` has
                another shape, dtype or device.
        """
        expect_last_dim("rms_norm", "x", x, self.hidden_size)
        # The buffer of ones is for kernels that always multiply; the form can do without.
        weight = self.weight if self.has_weight else None
        eps = _epsilon(self.eps, x.dtype)
        size = self.variance_size_override
        if residual is None:
            return functional.rms_norm(x, weight, eps, size)
        return functional.fused_add_rms_norm(x, residual, weight, eps, size)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, has_weight={self.has_weight}"


@CustomOp.register("unscaled_rms_norm")
class UnscaledRMSNorm(_EpsByTwoNames, PluggableLayer):
    """Root mean square norm of rows of any size, without a weight (arXiv:1910.07467).

    ``y = x / sqrt(mean(x²) + eps)`` over the last dimension, by the functional form ``rms_norm``.
    ``RMSNorm`` without a weight computes the same for rows of one size.

    Args:
        eps: added to the mean square.

    Shapes:
        ``[..., hidden_size]`` to ``[..., hidden_size]`` in any floating-point dtype.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        expect_not_negative("unscaled_rms_norm", "eps", eps)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        # Not the argument ``functional`` of a ``forward_native``: each call looks up the kernel.
        return forms.rms_norm(x, None, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(_EpsByTwoNames, CustomOp):
    """Gemma's root mean square norm; the weight is the distance from one (arXiv:2403.08295).

    ``y = x / sqrt(mean(x²) + eps) · (1 + weight)``, computed in float32, or float64 for float64
    input. The norm applies the weight before it rounds, bit for bit as Gemma's norm in
    transformers. The residual plays the same part as in ``RMSNorm``.

    Args:
        hidden_size: elements of the last dimension; the weight starts as zeros.
        eps: added to the mean square.

    Shapes:
        ``x``, ``residual`` and the results are ``[..., hidden_size]`` in any floating-point dtype.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        expect_size("gemma_rms_norm", "hidden_size", hidden_size)
        expect_not_negative("gemma_rms_norm", "eps", eps)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        # Zeros are the distance of ones from one.
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    @calls_functional
    def forward_native(
        self, x: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of ``x``, or ``(norm, new_residual)`` of ``x + residual``.

        Raises:
            ValueError: the last dimension of ``x`` is not ``hidden_size``, or ``residual`` has
                another shape, dtype or device.
        """
        expect_last_dim("gemma_rms_norm", "x", x, self.hidden_size)
        if residual is None:
            return functional.gemma_rms_norm(x, self.weight, self.variance_epsilon)
        return functional.fused_add_gemma_rms_norm(x, residual, self.weight, self.variance_epsilon)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp, nn.LayerNorm):
    """Layer norm, a drop-in for ``torch.nn.LayerNorm`` (Ba et al., arXiv:1607.06450).

    ``y = (x - mean) / sqrt(variance + eps) · weight + bias`` over the last dimensions
    ``normalized_shape``, with the biased variance. The class is a subclass of
    ``torch.nn.LayerNorm``, with the same arguments, attributes and state.

    Shapes:
        ``input`` and the result are ``[..., *normalized_shape]``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )

    @calls_functional
    def forward_native(self, input: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return the norm of ``input``.

        Raises:
            ValueError: the shape, dtype or device of ``input`` does not fit.
        """
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("rms_norm_gated")
class RMSNormGated(_EpsByTwoNames, CustomOp):
    """Gated root mean square norm of state-space models (Dao and Gu, arXiv:2405.21060).

    Args:
        hidden_size: elements of the last dimension.
        eps: added to the mean square.
        group_size: elements of a group with one mean square; the whole row if not given.
        norm_before_gate: gate after the norm instead of before the norm.
        device: device of the weight, which starts as ones.
        dtype: dtype of the weight; the default dtype if not given.
        activation: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``.

    Shapes:
        ``x``, ``z`` and the result are ``[..., hidden_size]`` in any floating-point dtype.

    Raises:
        ValueError: ``group_size`` does not divide ``hidden_size``, or the activation is unknown.
            vLLM's class asserts the activation in ``forward``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__()
        expect_choice("rms_norm_gated", "activation", activation, forms.GATES)
        expect_size("rms_norm_gated", "hidden_size", hidden_size)
        expect_not_negative("rms_norm_gated", "eps", eps)
        forms.expect_group_size(group_size, hidden_size)

        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    @calls_functional
    def forward_native(
        self, x: Tensor, z: Tensor | None = None, *, functional: Any = NATIVE
    ) -> Tensor:
        """Return the norm of ``x``, gated by ``z`` if given, of any floating-point dtype.

        Raises:
            ValueError: the last dimension of ``x`` is not ``hidden_size``, or ``z`` has another
                shape or device.
        """
        expect_last_dim("rms_norm_gated", "x", x, self.hidden_size)
        # Scans of mixers return float32, also in half-precision models.
        if z is not None and z.dtype is not x.dtype and z.is_floating_point():
            z = z.to(x.dtype)
        return functional.rms_norm_gated(
            x,
            self.weight,
            z,
            self.variance_epsilon,
            self.group_size,
            self.norm_before_gate,
            self.activation,
        )

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, group_size={self.group_size}"
