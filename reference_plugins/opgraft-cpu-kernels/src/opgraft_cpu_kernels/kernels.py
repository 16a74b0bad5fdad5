"""The kernels as functions with the signatures of opgraft's forms.

Each function takes float32, bfloat16 and float16 tensors of any strides. With other tensors, and
if the kernel refuses its arguments, the native definition runs. The native definition computes the
result or raises the error that users of opgraft know.
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
"""The errors by which kernels refuse arguments, such as tensors on another device."""


def op(name: str) -> Callable[..., Any]:
    """Return the library's op of that name. Without the library, the op refuses all arguments."""
    packet = getattr(torch.ops.opgraft_cpu_kernels, name, None)
    if packet is None:
        return _absent
    return packet.default  # type: ignore[no-any-return]


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the library of opgraft-cpu-kernels is missing")


def kernel(form: Any) -> Callable[..., Any]:
    """Return a function for a form whose first argument is the tensor ``x``.

    The library's op has the name and the arguments of the form.
    """
    name = form.name
    native = form.native
    run = op(name)
    parameters = tuple(inspect.signature(native).parameters)

    @functools.wraps(native, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        taken = x.dtype in DTYPES and x.is_cpu and x.dim()
        # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
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
    """Return a function for a form whose first argument is ``state``, updated in place."""
    name = form.name
    native = form.native
    run = op(name)
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
    """Return a function for a form that rotates query and key by positions."""
    name = form.name
    native = form.native
    run = op(name)

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
    """Return True if the kernel may be called with these tensors."""
    if query.dtype not in DTYPES or not query.is_cpu:
        return False
    if positions.dtype not in INTEGERS:
        return False
    if not is_dynamo_compiling():
        return True
    given = {"positions": positions, "query": query, "key": key, "cos_sin_cache": cos_sin_cache}
    return not refusal(name, given)


def by_given_scales(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype, shape: Sequence[int]
) -> bool:
    """Return True if a kernel can quantise its result by the given scales.

    Args:
        x: the first argument of the kernel.
        scale: one scale for each group, or one for all.
        group_shape: rows and columns of a group, where -1 stands for all of them.
        dtype: of the result.
        shape: of the result.
    """
    if x.dtype not in DTYPES or dtype is not FP8 or not x.is_cpu or not shape:
        return False
    # The native definitions take scales of more shapes than the kernels.
    given = tuple(scale.shape)
    if tuple(group_shape) == (-1, -1):
        return given in ((1,), ())
    return in_rows(group_shape) and given in (scale_shape(shape, group_shape), ())


def by_own_scales(
    x: Tensor, group_shape: Sequence[int], scale_ub: Tensor | None, dtype: torch.dtype
) -> bool:
    """Return True if a kernel can quantise its result by scales of its own.

    Args:
        x: the first argument of the kernel.
        group_shape: rows and columns of a group, where -1 stands for all of them.
        scale_ub: the upper bound of scales, which the kernels take for whole rows only.
        dtype: of the result.
    """
    if x.dtype not in DTYPES or dtype is not FP8 or not x.is_cpu or not x.dim():
        return False
    if scale_ub is None:
        return in_rows(group_shape)
    return scale_ub.numel() == 1 and tuple(group_shape) == (1, -1)


def _refused(name: str, **given: Tensor | None) -> bool:
    """Return True if compiled code must not call the kernel: it cannot catch the op's error."""
    return is_dynamo_compiling() and refusal(name, given) is not None


def quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute ``opgraft.functional.quant_fp8_static``."""
    if by_given_scales(x, scale, group_shape, dtype, x.shape):
        try:
            return _quant_fp8_static(x, scale, group_shape)
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
    """Compute ``opgraft.functional.quant_fp8_dynamic``."""
    if by_own_scales(x, group_shape, scale_ub, dtype):
        try:
            return _quant_fp8_dynamic(x, group_shape, scale_ub, use_ue8m0)
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
    """Compute ``opgraft.functional.rms_norm_quant_fp8_static``."""
    form = functional.rms_norm_quant_fp8_static
    taken = by_given_scales(x, scale, group_shape, dtype, x.shape)
    if taken and not _refused(form.name, x=x, weight=weight):
        try:
            return _norm_static(x, scale, group_shape, weight, eps)
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
    """Compute ``opgraft.functional.rms_norm_quant_fp8_dynamic``."""
    form = functional.rms_norm_quant_fp8_dynamic
    taken = by_own_scales(x, group_shape, scale_ub, dtype)
    if taken and not _refused(form.name, x=x, weight=weight):
        try:
            return _norm_dynamic(x, group_shape, weight, eps, scale_ub, use_ue8m0)
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
    """Compute ``opgraft.functional.fused_add_rms_norm_quant_fp8_static``."""
    form = functional.fused_add_rms_norm_quant_fp8_static
    taken = by_given_scales(x, scale, group_shape, dtype, x.shape)
    if taken and not _refused(form.name, x=x, residual=residual, weight=weight):
        try:
            return _sum_static(x, residual, scale, group_shape, weight, eps)
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
    """Compute ``opgraft.functional.fused_add_rms_norm_quant_fp8_dynamic``."""
    form = functional.fused_add_rms_norm_quant_fp8_dynamic
    taken = by_own_scales(x, group_shape, scale_ub, dtype)
    if taken and not _refused(form.name, x=x, residual=residual, weight=weight):
        try:
            return _sum_dynamic(x, residual, group_shape, weight, eps, scale_ub, use_ue8m0)
        except REFUSED:
            pass
    return form.native(x, residual, group_shape, weight, eps, scale_ub, use_ue8m0, dtype)


def silu_and_mul_quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute ``opgraft.functional.silu_and_mul_quant_fp8_static``."""
    form = functional.silu_and_mul_quant_fp8_static
    # Gate and up stand side by side in a row, so that a result is half as wide.
    shape = (*x.shape[:-1], x.shape[-1] // 2) if x.dim() else ()
    if by_given_scales(x, scale, group_shape, dtype, shape):
        try:
            return _product_static(x, scale, group_shape)
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
    """Compute ``opgraft.functional.silu_and_mul_quant_fp8_dynamic``."""
    form = functional.silu_and_mul_quant_fp8_dynamic
    if by_own_scales(x, group_shape, scale_ub, dtype):
        try:
            return _product_dynamic(x, group_shape, scale_ub, use_ue8m0)
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
    """Compute ``opgraft.functional.mixer2_gated_rms_norm``.

    With a weight, the kernel of ``rms_norm_gated`` computes the same.
    """
    if weight is None or x.shape != gate.shape or x.dtype != gate.dtype:
        return functional.mixer2_gated_rms_norm.native(x, gate, weight, eps, group_size)
    return rms_norm_gated(x, weight, gate, eps, group_size)  # type: ignore[no-any-return]


def in_rows(group_shape: Sequence[int]) -> bool:
    """Return True if a group is the whole tensor, a whole row, or a part of one row."""
    if tuple(group_shape) == (-1, -1):
        return True
    return len(group_shape) == 2 and group_shape[0] == 1


# Loading the library defines the ops, which op() looks up below.
missing()
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
_quant_fp8_static: Callable[..., Tensor] = op("quant_fp8_static")
_quant_fp8_dynamic: Callable[..., tuple[Tensor, Tensor]] = op("quant_fp8_dynamic")
_norm_static: Callable[..., Tensor] = op("rms_norm_quant_fp8_static")
_norm_dynamic: Callable[..., tuple[Tensor, Tensor]] = op("rms_norm_quant_fp8_dynamic")
_sum_static: Callable[..., tuple[Tensor, Tensor]] = op("fused_add_rms_norm_quant_fp8_static")
_sum_dynamic: Callable[..., tuple[Tensor, Tensor, Tensor]] = op(
    "fused_add_rms_norm_quant_fp8_dynamic"
)
_product_static: Callable[..., Tensor] = op("silu_and_mul_quant_fp8_static")
_product_dynamic: Callable[..., tuple[Tensor, Tensor]] = op("silu_and_mul_quant_fp8_dynamic")
