"""Normalisation ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice, expect_last_dim, expect_not_negative, expect_size
from opgraft.ops.layernorm import functional
from opgraft.ops.on_triton import on_triton
from torch import Tensor, nn

TRITON = on_triton("opgraft.ops.layernorm.triton")


class _EpsByTwoNames:
    """For norms whose epsilon plugins call ``variance_epsilon`` and torch's norms ``eps``."""

    variance_epsilon: float

    @property
    def eps(self) -> float:
        """``variance_epsilon`` under the name that it has in torch's norms."""
        return self.variance_epsilon

    @eps.setter
    def eps(self, eps: float) -> None:
        self.variance_epsilon = eps


class _EpsOfInput:
    """For norms whose epsilon may be ``None``: that of the dtype in which an input is computed.

    ``torch.nn.RMSNorm`` chooses so at each call.
    """

    weight: Tensor
    eps: float | None
    """As it was given."""

    @property
    def variance_epsilon(self) -> float:
        """``eps``; for ``None`` the epsilon for inputs of the weight's dtype."""
        return _epsilon(self.eps, self.weight.dtype)

    @variance_epsilon.setter
    def variance_epsilon(self, eps: float | None) -> None:
        self.eps = eps


def _epsilon(eps: float | None, dtype: torch.dtype) -> float:
    """Return ``eps``; for ``None`` that of float32, or of float64 if inputs have that dtype."""
    if eps is not None:
        return eps
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


@CustomOp.register("rms_norm")
class RMSNorm(_EpsOfInput, CustomOp):
    """Root mean square norm, after adding a residual where one is given (Zhang and Sennrich, arXiv:1910.07467).

    ``y = x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in float32 (float64 for float64 input).
    The normalised value is rounded to the weight's dtype, multiplied, and rounded to the input's dtype, which for a
    weight and an input of one dtype is bit for bit what Llama's norm in transformers computes.

    With a residual, ``s = x + residual`` is summed unrounded; the norm is that of ``s`` and ``new_residual`` is ``s``
    rounded to the input's dtype. This definition writes to neither argument and returns new memory; a kernel of a
    platform may reuse the memory of both.

    Without a weight, ``weight`` is a buffer of ones, so that kernels which always multiply stay right; unlike a plain
    tensor it moves with the module.

    Args:
        hidden_size: elements of the last dimension.
        eps: added to the mean square; ``None`` for the epsilon of the dtype in which each input is
            computed.
        var_hidden_size: take the mean over the first ``var_hidden_size`` elements only.
        has_weight: whether there is a learnt weight.
        dtype: dtype of the weight; the default dtype if not given.

    Shapes:
        ``x`` and ``residual`` are ``[..., hidden_size]`` in any floating-point dtype; so are the results.
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
                f"rms_norm: var_hidden_size is {var_hidden_size}, expected 1 to hidden_size={hidden_size}"
            )
        self.hidden_size = hidden_size
        self.eps = eps
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
            ValueError: ``x`` does not end in ``hidden_size``, or ``residual`` has another shape, dtype or device.
        """
        expect_last_dim("rms_norm", "x", x, self.hidden_size)
        weight = self.weight if self.has_weight else None
        eps, size = _epsilon(self.eps, x.dtype), self.variance_size_override
        if residual is None:
            return functional.rms_norm(x, weight, eps, size)
        return functional.fused_add_rms_norm(x, residual, weight, eps, size)

    # The host derives forward_cuda and forward_xpu from these: forward_native with Triton's functional forms.
    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, has_weight={self.has_weight}"


@CustomOp.register("unscaled_rms_norm")
class UnscaledRMSNorm(_EpsByTwoNames, PluggableLayer):
    """Root mean square norm of rows of any size, without a weight (Zhang and Sennrich, arXiv:1910.07467).

    ``y = x / sqrt(mean(x²) + eps)`` over the last dimension, by the functional form ``rms_norm``. ``RMSNorm`` without a
    weight is the same for rows of one size.

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
        return functional.rms_norm(x, None, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(_EpsByTwoNames, CustomOp):
    """Gemma's root mean square norm, whose stored weight is the distance from one (arXiv:2403.08295).

    ``y = x / sqrt(mean(x²) + eps) · (1 + weight)``, computed in float32 (float64 for float64 input) with the weight
    applied before rounding, bit for bit as Gemma's norm in transformers. A residual is added as by ``RMSNorm``.

    Args:
        hidden_size: elements of the last dimension; the weight starts as zeros.
        eps: added to the mean square.

    Shapes:
        ``x`` and ``residual`` are ``[..., hidden_size]`` in any floating-point dtype; so are the results.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        expect_size("gemma_rms_norm", "hidden_size", hidden_size)
        expect_not_negative("gemma_rms_norm", "eps", eps)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    @calls_functional
    def forward_native(
        self, x: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of ``x``, or ``(norm, new_residual)`` of ``x + residual``.

        Raises:
            ValueError: ``x`` does not end in ``hidden_size``, or ``residual`` has another shape, dtype or device.
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

    ``y = (x - mean) / sqrt(variance + eps) · weight + bias`` over the trailing ``normalized_shape``, with the biased
    variance. Arguments, attributes and state are those of ``torch.nn.LayerNorm``, of which it is a subclass.

    Shapes:
        ``input`` is ``[..., *normalized_shape]``, and so is the result.
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
        """Normalise ``input``; raise ``ValueError`` where its shape, dtype or device does not fit."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


@CustomOp.register("rms_norm_gated")
class RMSNormGated(_EpsByTwoNames, CustomOp):
    """Root mean square norm with a gate, as state-space models have it (Dao and Gu, arXiv:2405.21060).

    Args:
        hidden_size: elements of the last dimension.
        eps: added to the mean square.
        group_size: take the mean square within groups of that many elements; the whole row if not given.
        norm_before_gate: gate after the norm instead of before it.
        device: device of the weight, which starts as ones.
        dtype: dtype of the weight; the default dtype if not given.
        activation: ``"silu"``, which is also ``"swish"``, or ``"sigmoid"``.

    Shapes:
        ``x`` and ``z`` are ``[..., hidden_size]`` in any floating-point dtype; so is the result.

    Raises:
        ValueError: ``group_size`` does not divide ``hidden_size``, or another activation (vLLM asserts it, in forward).
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
        expect_choice("rms_norm_gated", "activation", activation, functional.GATES)
        expect_size("rms_norm_gated", "hidden_size", hidden_size)
        expect_not_negative("rms_norm_gated", "eps", eps)
        functional.expect_group_size(group_size, hidden_size)
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
        """Return the norm of ``x``, gated by ``z`` where it is given, in any floating-point dtype.

        Raises:
            ValueError: ``x`` does not end in ``hidden_size``, or ``z`` has another shape or device.
        """
        expect_last_dim("rms_norm_gated", "x", x, self.hidden_size)
        # Scans of mixers return float32.
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
