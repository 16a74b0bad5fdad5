"""The linear layer on CPUs, over weights that oneDNN packs once.

A packed weight is kept beside its parameter and made anew when the parameter has changed; the parameter itself stays as
it is, with all that is done with parameters. Where packing does not pay, or something needs to see through it, torch's
own linear runs: see ``linear``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from opgraft.compat import packed_linear as onednn
from opgraft.compat import tracing
from opgraft.ops.linear.functional import expect_mappable, mapped
from opgraft.ops.linear.functional import linear as form
from opgraft.ops.linear.weight_cache import Known, WeightCache, fits, is_ordinary, requires_gradient
from opgraft.platform import Platform
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

UNLIMITED = sys.maxsize


class Pays(NamedTuple):
    """For which numbers of rows packing pays, for weights of some size.

    Attributes:
        size: elements that the weight has at least.
        first: number of rows.
        last: number of rows.
        last_fused: number of rows where an activation is fused.
    """

    size: int
    first: int
    last: int = UNLIMITED
    last_fused: int = UNLIMITED


NEVER = Pays(0, UNLIMITED)

_FAST_PLAIN = (Pays(1 << 23, 4, 256, 256), Pays(1 << 20, 4, 256), Pays(1 << 18, 16, 256))
_SLOW_PLAIN = (Pays(1 << 19, 1), Pays(1 << 17, 16))
_ALWAYS = (Pays(1 << 14, 1),)

TABLE: Mapping[str, Mapping[torch.dtype, Sequence[Pays]]] = {
    "avx512_fp16": {torch.float32: _FAST_PLAIN, torch.bfloat16: _ALWAYS},
    "avx512_bf16": {torch.float32: _SLOW_PLAIN, torch.bfloat16: _ALWAYS},
    "avx2": {torch.float32: _FAST_PLAIN},
}
"""Instruction set → dtype → where packing pays, large weights first; of either the first that applies counts.

Measured with torch 2.13 on 1 and 2 cores, widths 64 to 4,096 and 512 by 32,000, 1 to 2,048 rows, as ratios of torch's
linear to the packed one. CPUs with fp16 arithmetic are those for which torch's float32 linear is tuned: there it wins
for up to 3 rows (ratio 0.3 to 0.9), and for many rows of large weights (0.9); between, packing wins by 1.0 to 2.8, and
in bfloat16 by 1.0 to 2.5. On those with bfloat16 arithmetic only, packing wins by 1.1 to 4.1 (more on Zen 5 than on Zen
4), for one row from half a million weights on. Others were measured with both libraries held to AVX2: 1.0 to 1.4. CPUs
with none of these were not measured, and do not pack.
"""

_PACKABLE = (torch.float32, torch.bfloat16)


@dataclass(slots=True)
class _Known(Known):
    """What is known of one parameter.

    Attributes:
        least: elements of the input below which packing does not pay.
        most: elements of the input above which it does not pay.
        most_fused: the same where an activation is fused.
    """

    least: int
    most: int
    most_fused: int


_KNOWN: WeightCache[_Known] = WeightCache()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """The form ``linear``; packed where ``TABLE`` says that it pays.

    Packed, the result is rounded once, at its end; with both an activation and a residual, after each of the two.

    Weights are packed that are parameters, contiguous, and float32 or bfloat16; a weight that is computed for the call
    is not. Where a gradient is required, or under autocast, ``torch.func``, a tracer or a dispatch mode, torch's own
    linear runs. Compilers see one opaque operator, which decides when it runs.

    When a parameter counts as changed is told in ``opgraft.ops.linear.weight_cache``.
    """
    if is_dynamo_compiling():
        return _compiled(x, weight, bias, activation, residual)
    known = _KNOWN.get(id(weight))
    if known is not None and known.dtype is x.dtype and x.numel() < known.least:
        # The one path on which a microsecond counts: a single row in a small layer.
        if activation == "none" and residual is None:
            expect_mappable(x, weight, bias)
            return F.linear(x, weight, bias)
        return form.native(x, weight, bias, activation, residual)
    return _run(x, weight, bias, activation, residual)


def missing() -> str | None:
    """Why nothing is packed on this machine, or ``None``."""
    absent = onednn.missing()
    platform = current_platform()
    if absent is None and not _table(platform):
        stated = ", ".join(platform.capability().features) or "none"
        absent = (
            f"it was measured with the instruction sets {', '.join(TABLE)} only, and Platform.capability().features of "
            f"{platform.name}, which is what is asked for them, states {stated}"
        )
    return f"packed linear unavailable: {absent}" if absent else None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    packed = None
    fused = "none" if activation == "relu" else activation
    if type(x) is Tensor and type(weight) is nn.Parameter and fused in onednn.POST_OPS:
        packed = _packed_for(x, weight, bias, fused, residual)
    if packed is None:
        return form.native(x, weight, bias, activation, residual)
    return over_packed(x, packed, bias, activation, residual)


def over_packed(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    """The form ``linear`` over a packed weight. Unchecked: for what ``fits`` it, and is not watched."""
    if residual is not None and activation == "none":
        return onednn.packed_linear_add(x, packed, bias, residual)
    fused = "none" if activation == "relu" else activation
    y = onednn.packed_linear(x, packed, bias, fused)
    if fused != activation:
        y.relu_()
    return y if residual is None else y.add_(residual)


def _packed_for(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, fused: str, residual: Tensor | None
) -> Tensor | None:
    """The packed weight, or ``None`` where torch's own linear is to run; that one also says what does not fit."""
    known = _KNOWN.current(weight) or _meet(weight)
    if known is None:
        return None
    elements = x.numel()
    if not known.least <= elements <= (known.most if fused == "none" else known.most_fused):
        return None
    if not fits(x, weight, bias, residual) or requires_gradient(x, weight, bias, residual) or onednn.watched():
        return None
    if known.packed is None:
        known.packed = onednn.pack(weight)
    return known.packed


def _meet(weight: nn.Parameter) -> _Known | None:
    """Write down where packing a parameter pays, which may be nowhere; ``None`` for what never can be packed."""
    if not is_ordinary(weight):
        return None
    packable = weight.is_contiguous() and onednn.missing(weight.dtype) is None
    pays = pays_for(weight) if packable else NEVER
    least, most, fused = (rows * weight.shape[1] for rows in (pays.first, pays.last, pays.last_fused))
    return _KNOWN.meet(weight, _Known, least, most, fused)


def pays_for(weight: Tensor) -> Pays:
    """For which numbers of rows packing pays on this machine, for a weight of that size and dtype; maybe ``NEVER``."""
    table = _table(current_platform()).get(weight.dtype, ())
    return next((row for row in table if weight.numel() >= row.size), NEVER)


@functools.lru_cache(maxsize=1)
def _table(platform: Platform) -> Mapping[torch.dtype, Sequence[Pays]]:
    features = platform.capability().features
    return next((rows for feature, rows in TABLE.items() if feature in features), {})


def _compiled(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    """What a compiler sees: the packed linear as one operator where it may run, else the definition."""
    plain = x.dtype not in _PACKABLE or weight.dtype != x.dtype or not (x.is_cpu and weight.is_cpu)
    if plain or torch.is_autocast_enabled("cpu") or requires_gradient(x, weight, bias, residual):
        return form.native(x, weight, bias, activation, residual)
    if tracing.exporting():  # what is exported must run without opgraft
        return form.native(x, weight, bias, activation, residual)
    result: Tensor = torch.ops.opgraft.packed_linear(x, weight, bias, activation, residual)
    return result


torch.library.define(
    "opgraft::packed_linear", "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual) -> Tensor"
)
torch.library.impl("opgraft::packed_linear", "cpu", _run)
torch.library.register_fake("opgraft::packed_linear", mapped)
