"""The linear layer: on few rows, and in half types on AVX-512 with bfloat16 and on AVX2 on any number, over the weight
as it is; on many over one packed for the tiles of AMX, which is a copy and so for frozen weights only. Frozen weights
elsewhere are left on many rows to opgraft, which keeps a packed copy of each.

Where neither pays, and where a gradient is required or something follows the operators that run, opgraft's own linear
kernel runs, which sees to those. Compilers see that one too.
"""

from __future__ import annotations

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
"""Any number of rows. The library multiplies it by a width."""

KEEPS_COPIES = "avx512_bf16"
"""The path on which many rows of a frozen weight are left to opgraft's packed copy."""

FEW = {
    (path, dtype): 4
    for path in ("amx", "avx512_bf16", "avx512")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
} | {
    ("amx", torch.bfloat16): 2,
    ("avx512_bf16", torch.float32): UNLIMITED,
    ("avx512_bf16", torch.bfloat16): UNLIMITED,
    ("avx2", torch.float32): 8,
    ("avx2", torch.bfloat16): UNLIMITED,
    ("avx2", torch.float16): UNLIMITED,
}
"""Path and dtype → up to how many rows the weight is read as it is.

Measured on two cores of Zen 5 over weights of 576 to 3,072 columns and one of 49,152, for 8 to 1,024 rows, beside
oneDNN over the weight as it is, which takes 0.98 to 2.0 times as long, and over a packed copy: 0.94 to 1.7. On a core
of Zen 3 ("avx2") torch takes 1.1 to 3.3 times as long over float32 weights for up to 8 rows, and over a packed copy
0.99 to 1.3 times; over half types, which it computes without vectors, 2.1 to 7.8 times for 1 to 1,024 rows."""

FEW_OF_FROZEN = 96
"""Up to how many rows that holds for a frozen weight, of which opgraft's own kernel keeps a packed copy.

MiniLM on 512 sentences, two cores of Zen 5: over the weights as they are it takes 1.1 times as long. On a core of Zen 4
float32 layers of 512 columns take 0.97 to 1.03 times as long for 48 to 96 rows, and 0.83 to 0.92 of what oneDNN takes
over the weight as it is, which computes until there is a copy."""

MANY = {2: 8, 3: 16}
"""bfloat16 numbers for one float32 number → from how many rows on the tiles pay."""

LEAST_WIDTH = 64
"""Of rows and columns of a weight for the tiles."""

_COPIES = WeightCache()


def has_kernel(platform: object) -> bool:
    """Tell whether the path in force has a kernel for linear layers; true if something is missing: the op says so."""
    return bool(missing()) or any(path == path_or_none() for path, _ in FEW)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form of that name, rounded once.

    On tiles a float32 number is a sum of three bfloat16 numbers, or of two where
    ``torch.set_float32_matmul_precision`` was told that "high" or "medium" suffices.
    """
    mapped = None
    if type(x) is Tensor and type(weight) in (nn.Parameter, Tensor) and not is_dynamo_compiling():
        mapped = _mapped(x, weight, bias, activation, residual)
    return packed_linear(x, weight, bias, activation, residual) if mapped is None else mapped


def compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form of that name in compiled code: by an op of the library, which counts the rows."""
    alike = all(
        each is None or (each.dtype is x.dtype and each.is_cpu)
        for each in (x, weight, bias, residual)
    )
    path = path_or_none()
    few = FEW.get((path, weight.dtype), 0)
    if not few or not alike:
        return compiled_packed_linear(x, weight, bias, activation, residual)
    # A compiler does not know which weights are frozen.
    if few == UNLIMITED and path == KEEPS_COPIES:
        few = FEW_OF_FROZEN
    return _linear_of_rows(x, weight, bias, activation, residual, few)  # type: ignore[no-any-return]


def _mapped(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor | None:
    dtype, path = weight.dtype, path_or_none()
    if (path, dtype) not in FEW or weight.dim() != 2:
        return None
    if not (weight.layout is torch.strided and weight.is_contiguous()):
        return None
    few = _are_few(x, weight, path)
    if not few and (path != "amx" or dtype is not torch.float32):
        return None
    if watched() or requires_gradient(x, weight, bias, residual):
        return None
    if not few:
        return _on_tiles(x, weight, bias, activation, residual)
    try:
        return _linear(x, weight, bias, activation, residual)  # type: ignore[no-any-return]
    except REFUSED:  # what does not fit, of which opgraft's says what is wrong
        return None


def takes_few(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Tell whether rows may go through layers that follow one another, each of which reads its weight as it is.

    Args:
        x: the rows.
        weight: of the first layer.
        *others: what the layers have besides.
    """
    few = type(x) is Tensor and _are_few(x, weight, path_or_none())
    return few and not watched() and not requires_gradient(x, weight, *others)


def _are_few(x: Tensor, weight: Tensor, path: str) -> bool:
    """Tell whether rows are so few that the weight is read as it is."""
    rows, elements = FEW.get((path, weight.dtype), 0), x.numel()
    is_many = elements > FEW_OF_FROZEN * weight.size(-1)
    if rows == UNLIMITED and path == KEEPS_COPIES and is_many:
        return not declaration(weight)
    return elements <= rows * weight.size(-1)


def _on_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor | None:
    parts = _parts()
    if (
        type(weight) is not nn.Parameter
        or min(weight.shape) < LEAST_WIDTH
        or x.numel() < MANY[parts] * weight.shape[1]
    ):
        return None
    if not fits(x, weight, bias, residual):
        return None
    packed = _COPIES.copy_of(weight, partial(_pack_linear, parts=parts), parts)
    if packed is None or not packed.numel():  # not frozen, or bfloat16 cannot hold its numbers
        return None
    try:
        return _packed_linear(x, weight, packed, bias, activation, residual)  # type: ignore[no-any-return]
    except REFUSED:  # an unknown activation, of which opgraft's says what is wrong
        return None


def _parts() -> int:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's backends were told different things
        return 3
    return 3 if precision == "highest" else 2


_linear = op("linear")
_linear_of_rows = op("linear_of_rows")
_packed_linear = op("packed_linear")
_pack_linear = op("pack_linear")

if not missing():
    torch.library.impl("opgraft_cpu_kernels::linear_of_many_rows", "CPU", linear)
