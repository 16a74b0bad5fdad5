"""The linear layer, by one of three ways.

1. Over the weight as it lies in memory: with few rows, and on some paths with any number. The
   table ``FEW`` has the limits.
2. On the tiles of AMX: with many rows in float32. The weight is packed once, into a copy, so it
   must be frozen.
3. By opgraft's own linear kernel: in all other cases. It also runs if a gradient is required, and
   if something of torch follows the operators. It keeps a packed copy of each frozen weight.

Code that torch compiles calls ``compiled`` instead of ``linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from opgraft.kernels import (
    WeightCache,
    compiled_packed_linear,
    declaration,
    fits,
    packed_linear,
    requires_gradient,
    watched,
)
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import REFUSED, op
from opgraft_cpu_kernels.library import missing, path_or_none

UNLIMITED = 1 << 30
"""More rows than any tensor has. The library multiplies the number by a width, in 64 bits."""

KEEPS_COPIES = "avx512_bf16"
"""The path on which many rows of a frozen weight go to opgraft's packed copy."""

FEW = {
    (path, dtype): 4
    for path in ("amx", "avx512_bf16", "avx512")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
} | {
    ("amx", torch.bfloat16): 2,
    ("avx512_bf16", torch.float32): UNLIMITED,
    ("avx512_bf16", torch.bfloat16): UNLIMITED,
    ("avx2", torch.float32): 48,
    ("avx2", torch.bfloat16): UNLIMITED,
    ("avx2", torch.float16): UNLIMITED,
}
"""Path and dtype → the most rows for which the weight is read as it lies in memory.

Measured on two cores of Zen 5, with weights of 576 to 3,072 columns and one of 49,152, and 8 to
1,024 rows: oneDNN takes 0.98 to 2.0 times as long over the weight as it is, and 0.94 to 1.7 times
over a packed copy.

On Zen 3 (path ``avx2``), with 4 to 48 rows in float32 on two cores, torch takes 0.7 to 4.2 times as
long over the weight, the least over 576 rows of 1,536 columns. oneDNN takes 0.7 to 2.0 times as
long over a packed copy, which an engine does not have. On one core, torch is faster from 16 to 32
rows on (0.6 to 1.5). In half types, with 1 to 1,024 rows, torch uses no vectors there and takes 2.1
to 7.8 times as long.
"""

FEW_OF_FROZEN = 96
"""The most rows of a frozen weight on the path KEEPS_COPIES. With more, the packed copy pays.

On two cores of Zen 5, MiniLM on 512 sentences takes 1.1 times as long over the weights as they
are. On a core of Zen 4, float32 layers of 512 columns with 48 to 96 rows take 0.97 to 1.03 of the
time over a packed copy. Until there is a copy, oneDNN computes over the weight, and the kernel
takes 0.83 to 0.92 of oneDNN's time.
"""

MANY = {2: 8, 3: 16}
"""Number of bfloat16 numbers whose sum is one float32 number → the fewest rows for tiles."""

LEAST_WIDTH = 64
"""The fewest rows and columns of a weight for tiles."""

_COPIES = WeightCache()


def has_kernel(platform: object) -> bool:
    """Return True if the path in force has a kernel for linear layers.

    Without the library the answer is True as well: then the op is registered, and says what is
    missing.
    """
    if missing():
        return True
    return any(path == path_or_none() for path, _ in FEW)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.linear``, rounded once.

    On tiles a float32 number is the sum of three bfloat16 numbers. After
    ``torch.set_float32_matmul_precision("high")``, or ``"medium"``, it is the sum of two.
    """
    mapped = None
    if type(x) is Tensor and type(weight) in (nn.Parameter, Tensor) and not is_dynamo_compiling():
        mapped = _mapped(x, weight, bias, activation, residual)
    if mapped is not None:
        return mapped
    return packed_linear(x, weight, bias, activation, residual)


def compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.linear`` in code that torch compiles.

    The number of rows may change from call to call. So an op of the library counts the rows, and
    calls ``linear`` if there are many.
    """
    path = path_or_none()
    few = FEW.get((path, weight.dtype), 0)
    alike = all(
        each is None or (each.dtype is x.dtype and each.is_cpu)
        for each in (x, weight, bias, residual)
    )
    if not few or not alike:
        return compiled_packed_linear(x, weight, bias, activation, residual)
    # A compiler cannot see whether a weight is frozen.
    if few == UNLIMITED and path == KEEPS_COPIES:
        few = FEW_OF_FROZEN
    return _linear_of_rows(x, weight, bias, activation, residual, few)


def _mapped(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor | None:
    """Return the result of a kernel of the library, or None if opgraft's kernel has to run."""
    dtype = weight.dtype
    path = path_or_none()
    if (path, dtype) not in FEW or weight.dim() != 2:
        return None
    if weight.layout is not torch.strided or not weight.is_contiguous():
        return None
    few = _are_few(x, weight, path)
    if not few and (path != "amx" or dtype is not torch.float32):
        return None
    if watched() or requires_gradient(x, weight, bias, residual):
        return None
    if not few:
        return _on_tiles(x, weight, bias, activation, residual)
    try:
        return _linear(x, weight, bias, activation, residual)
    except REFUSED:  # opgraft's kernel says what is wrong
        return None


def takes_few(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Return True if rows may go through several layers that read their weights as they are.

    Args:
        x: the rows.
        weight: of the first layer.
        *others: the other weights and the biases.
    """
    few = type(x) is Tensor and _are_few(x, weight, path_or_none())
    return few and not watched() and not requires_gradient(x, weight, *others)


def _are_few(x: Tensor, weight: Tensor, path: str) -> bool:
    """Return True if the number of rows is within the limit of FEW."""
    most_rows = FEW.get((path, weight.dtype), 0)
    elements = x.numel()
    columns = weight.size(-1)
    many_of_frozen = elements > FEW_OF_FROZEN * columns
    if most_rows == UNLIMITED and path == KEEPS_COPIES and many_of_frozen:
        return not declaration(weight)
    return elements <= most_rows * columns


def _on_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor | None:
    """Return the result of the tiles, or None if opgraft's kernel has to run."""
    if type(weight) is not nn.Parameter or min(weight.shape) < LEAST_WIDTH:
        return None
    parts = _parts()
    if x.numel() < MANY[parts] * weight.shape[1]:
        return None
    if not fits(x, weight, bias, residual):
        return None
    packed = _COPIES.copy_of(weight, partial(_pack_linear, parts=parts), parts)
    # There is no copy of a weight that is not frozen. The copy is empty if bfloat16 cannot hold
    # the weight's numbers.
    if packed is None or not packed.numel():
        return None
    try:
        return _packed_linear(x, weight, packed, bias, activation, residual)
    except REFUSED:  # opgraft's kernel says that the activation is unknown
        return None


def _parts() -> int:
    """Return the number of bfloat16 numbers whose sum is one float32 number."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the backends of torch have different settings
        return 3
    return 3 if precision == "highest" else 2


_linear: Callable[..., Tensor] = op("linear")
_linear_of_rows: Callable[..., Tensor] = op("linear_of_rows")
_packed_linear: Callable[..., Tensor] = op("packed_linear")
_pack_linear = op("pack_linear")

if not missing():
    torch.library.impl("opgraft_cpu_kernels::linear_of_many_rows", "CPU", linear)
