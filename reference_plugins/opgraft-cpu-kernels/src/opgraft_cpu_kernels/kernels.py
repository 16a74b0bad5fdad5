"""The kernels as functions with the signatures of opgraft's forms.

Each takes float32, bfloat16 and float16 of any strides. For everything else, and for arguments that the kernels
refuse, the native definition runs, which computes or says what is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft import functional
from opgraft.kernels import scale_shape
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import INTEGERS, named, refusal
from opgraft_cpu_kernels.library import missing

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
FP8 = torch.float8_e4m3fn
REFUSED = (ValueError, NotImplementedError)
"""The errors of the kernels for arguments that they do not take, on other devices too."""


def op(name: str) -> Callable[..., Any]:
    """Return the torch op of that name; one that says what is missing where the library is."""
    packet = getattr(torch.ops.opgraft_cpu_kernels, name, None)
    return packet.default if packet is not None else _absent


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the library of opgraft-cpu-kernels is missing")


def kernel(form: Any) -> Callable[..., Any]:
    """Return the kernel of a form whose arguments are those of the op of the same name."""
    name, run, native = form.name, op(form.name), form.native
    parameters = tuple(inspect.signature(native).parameters)

    @functools.wraps(native, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Asked here, as compiled code cannot catch what an op raises; of dtypes that only it must ask about.
        taken = x.dtype in DTYPES and x.is_cpu and x.dim()
        if taken and is_dynamo_compiling():
            taken = not refusal(name, named(parameters, (x, *args), kwargs))
        if taken:
            try:
                return run(x, *args, **kwargs)
            except REFUSED:
                pass
        return native(x, *args, **kwargs)

    return function


def stepping(form: Any) -> Callable[..., Any]:
    """Return the kernel of a form that brings states forward."""
    name, run, native = form.name, op(form.name), form.native
    parameters = tuple(inspect.signature(native).parameters)

    @functools.wraps(native, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def function(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        taken = state.dtype is torch.float32 and state.is_cpu
        if taken and is_dynamo_compiling():
            taken = not refusal(name, named(parameters, (state, *args), kwargs))
        if taken:
            try:
                return run(state, *args, **kwargs)
            except REFUSED:
                pass
        return native(state, *args, **kwargs)

    return function


def rotation(form: Any) -> Callable[..., Any]:
    """Return the kernel of a form that rotates query and key by positions."""
    name, run, native = form.name, op(form.name), form.native

    @functools.wraps(native, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def function(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if _rotates(name, positions, query, key, cos_sin_cache):
            try:
                return run(positions, query, key, head_size, cos_sin_cache, *args, **kwargs)
            except REFUSED:
                pass
        return native(positions, query, key, head_size, cos_sin_cache, *args, **kwargs)

    return function


def _rotates(
    name: str, positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> bool:
    if query.dtype not in DTYPES or not query.is_cpu or positions.dtype not in INTEGERS:
        return False
    if not is_dynamo_compiling():
        return True
    return not refusal(
        name, {"positions": positions, "query": query, "key": key, "cos_sin_cache": cos_sin_cache}
    )


def by_given_scales(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype, shape: Sequence[int]
) -> bool:
    """Tell whether the kernels quantise by given scales what they compute of ``x``.

    Args:
        x: the first argument.
        scale: of each group.
        group_shape: rows and columns of a group.
        dtype: of the result.
        shape: of the result.
    """
    if x.dtype not in DTYPES or dtype is not FP8 or not x.is_cpu or not shape:
        return False
    # A form takes other shapes of scales, too.
    if tuple(group_shape) == (-1, -1):
        return tuple(scale.shape) in ((1,), ())
    return in_rows(group_shape) and tuple(scale.shape) in (scale_shape(shape, group_shape), ())


def by_own_scales(
    x: Tensor, group_shape: Sequence[int], scale_ub: Tensor | None, dtype: torch.dtype
) -> bool:
    """Tell whether the kernels quantise by computed scales what they compute of ``x``."""
    if x.dtype not in DTYPES or dtype is not FP8 or not x.is_cpu or not x.dim():
        return False
    if scale_ub is not None and (scale_ub.numel() != 1 or tuple(group_shape) != (1, -1)):
        return False
    return in_rows(group_shape)


def _refused(name: str, **given: Tensor | None) -> bool:
    """Tell whether compiled code, which cannot catch what an op raises, must leave the kernel alone."""
    return is_dynamo_compiling() and refusal(name, given) is not None


def quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute the form of that name."""
    if by_given_scales(x, scale, group_shape, dtype, x.shape):
        try:
            return _quant_fp8_static(x, scale, group_shape)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.quant_fp8_static.native(x, scale, group_shape, dtype)


def quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute the form of that name."""
    if by_own_scales(x, group_shape, scale_ub, dtype):
        try:
            return _quant_fp8_dynamic(x, group_shape, scale_ub, use_ue8m0)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.quant_fp8_dynamic.native(x, group_shape, scale_ub, use_ue8m0, dtype)


def rms_norm_quant_fp8_static(
    x: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> Tensor:
    """Compute the form of that name."""
    form = functional.rms_norm_quant_fp8_static
    taken = by_given_scales(x, scale, group_shape, dtype, x.shape)
    if taken and not _refused(form.name, x=x, weight=weight):
        try:
            return _norm_static(x, scale, group_shape, weight, eps)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return form.native(x, scale, group_shape, weight, eps, dtype)


def rms_norm_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute the form of that name."""
    form = functional.rms_norm_quant_fp8_dynamic
    taken = by_own_scales(x, group_shape, scale_ub, dtype)
    if taken and not _refused(form.name, x=x, weight=weight):
        try:
            return _norm_dynamic(x, group_shape, weight, eps, scale_ub, use_ue8m0)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return form.native(x, group_shape, weight, eps, scale_ub, use_ue8m0, dtype)


def fused_add_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute the form of that name."""
    form = functional.fused_add_rms_norm_quant_fp8_static
    taken = by_given_scales(x, scale, group_shape, dtype, x.shape)
    if taken and not _refused(form.name, x=x, residual=residual, weight=weight):
        try:
            return _sum_static(x, residual, scale, group_shape, weight, eps)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return form.native(x, residual, scale, group_shape, weight, eps, dtype)


def fused_add_rms_norm_quant_fp8_dynamic(
    x: Tensor,
    residual: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the form of that name."""
    form = functional.fused_add_rms_norm_quant_fp8_dynamic
    taken = by_own_scales(x, group_shape, scale_ub, dtype)
    if taken and not _refused(form.name, x=x, residual=residual, weight=weight):
        try:
            return _sum_dynamic(  # type: ignore[no-any-return]
                x, residual, group_shape, weight, eps, scale_ub, use_ue8m0
            )
        except REFUSED:
            pass
    return form.native(x, residual, group_shape, weight, eps, scale_ub, use_ue8m0, dtype)


def silu_and_mul_quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute the form of that name."""
    form = functional.silu_and_mul_quant_fp8_static
    shape = (*x.shape[:-1], x.shape[-1] // 2) if x.dim() else ()
    if by_given_scales(x, scale, group_shape, dtype, shape):
        try:
            return _product_static(x, scale, group_shape)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return form.native(x, scale, group_shape, dtype)


def silu_and_mul_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute the form of that name."""
    form = functional.silu_and_mul_quant_fp8_dynamic
    if by_own_scales(x, group_shape, scale_ub, dtype):
        try:
            return _product_dynamic(x, group_shape, scale_ub, use_ue8m0)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return form.native(x, group_shape, scale_ub, use_ue8m0, dtype)


def mixer2_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> Tensor:
    """Compute the form of that name: the gated norm, where there is one."""
    if weight is None or x.shape != gate.shape or x.dtype != gate.dtype:
        return functional.mixer2_gated_rms_norm.native(x, gate, weight, eps, group_size)
    return rms_norm_gated(x, weight, gate, eps, group_size)  # type: ignore[no-any-return]


def in_rows(group_shape: Sequence[int]) -> bool:
    """Tell whether what shares a scale is the tensor, or a row or a part of one."""
    return tuple(group_shape) == (-1, -1) or (len(group_shape) == 2 and group_shape[0] == 1)


missing()  # loads the library, which defines the ops
rms_norm = kernel(functional.rms_norm)
fused_add_rms_norm = kernel(functional.fused_add_rms_norm)
fused_add_rms_norm_ = kernel(functional.fused_add_rms_norm_)
gemma_rms_norm = kernel(functional.gemma_rms_norm)
fused_add_gemma_rms_norm = kernel(functional.fused_add_gemma_rms_norm)
fused_add_gemma_rms_norm_ = kernel(functional.fused_add_gemma_rms_norm_)
layer_norm = kernel(functional.layer_norm)
rms_norm_gated = kernel(functional.rms_norm_gated)
silu_and_mul = kernel(functional.silu_and_mul)
mul_and_silu = kernel(functional.mul_and_silu)
gelu_and_mul = kernel(functional.gelu_and_mul)
gelu_and_mul_sparse = kernel(functional.gelu_and_mul_sparse)
fatrelu_and_mul = kernel(functional.fatrelu_and_mul)
swigluoai_and_mul = kernel(functional.swigluoai_and_mul)
silu_and_mul_with_clamp = kernel(functional.silu_and_mul_with_clamp)
swiglustep_and_mul = kernel(functional.swiglustep_and_mul)
gelu = kernel(functional.gelu)
gelu_tanh = kernel(functional.gelu_tanh)
gelu_new = kernel(functional.gelu_new)
gelu_fast = kernel(functional.gelu_fast)
quick_gelu = kernel(functional.quick_gelu)
silu = kernel(functional.silu)
silu_ = kernel(functional.silu_)
relu2 = kernel(functional.relu2)
xielu = kernel(functional.xielu)
causal_conv1d = kernel(functional.causal_conv1d)
causal_conv1d_update = kernel(functional.causal_conv1d_update)
selective_scan = kernel(functional.selective_scan)
selective_state_update = stepping(functional.selective_state_update)
apply_rotary_emb = kernel(functional.apply_rotary_emb)
rotary_embedding = rotation(functional.rotary_embedding)
rotary_embedding_ = rotation(functional.rotary_embedding_)
qk_norm_rope = rotation(functional.qk_norm_rope)
mrope = rotation(functional.mrope)
dual_chunk_rotary_embedding = rotation(functional.dual_chunk_rotary_embedding)
_quant_fp8_static = op("quant_fp8_static")
_quant_fp8_dynamic = op("quant_fp8_dynamic")
_norm_static = op("rms_norm_quant_fp8_static")
_norm_dynamic = op("rms_norm_quant_fp8_dynamic")
_sum_static = op("fused_add_rms_norm_quant_fp8_static")
_sum_dynamic = op("fused_add_rms_norm_quant_fp8_dynamic")
_product_static = op("silu_and_mul_quant_fp8_static")
_product_dynamic = op("silu_and_mul_quant_fp8_dynamic")
