"""Dtypes that meet: what the kernels take is computed as defined, the rest by the definitions, in compiled code too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from torch import Tensor
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = (*DTYPES, torch.float64)
REFUSED = (torch.int64, torch.bool, torch.complex64)
POSITIONS = torch.arange(3)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (ValueError, RuntimeError) as error:
        return type(error)


NORMS: dict[str, Callable[[torch.dtype, Tensor], tuple[Any, ...]]] = {
    "rms_norm": lambda dtype, weight: (t(3, 64, dtype=dtype), weight),
    "fused_add_rms_norm": lambda dtype, weight: (
        t(3, 64, dtype=dtype),
        t(3, 64, dtype=dtype),
        weight,
    ),
    "gemma_rms_norm": lambda dtype, weight: (t(3, 64, dtype=dtype), weight),
    "fused_add_gemma_rms_norm": lambda dtype, weight: (
        t(3, 64, dtype=dtype),
        t(3, 64, dtype=dtype),
        weight,
    ),
    "rms_norm_gated": lambda dtype, weight: (t(3, 64, dtype=dtype), weight, t(3, 64, dtype=dtype)),
    "layer_norm": lambda dtype, weight: (t(3, 64, dtype=dtype), (64,), weight, weight),
}


@pytest.mark.parametrize("name", list(NORMS))
def test_weights_of_another_dtype(kernels: Any, name: str) -> None:
    """A norm is its definition for each pair of dtypes, a refusal included: no rounding is left out."""
    form = getattr(functional, name)
    for dtype in DTYPES:
        for kind in WEIGHTS:
            arguments = NORMS[name](dtype, t(64, dtype=kind))
            got, expected = outcome(form, *arguments), outcome(form.native, *arguments)
            if isinstance(expected, type):
                assert got is expected
            elif dtype is torch.float32 or kind not in (dtype, torch.float32):
                torch.testing.assert_close(
                    got, expected, rtol=2e-6 if dtype is torch.float32 else 8e-3, atol=2e-6
                )


def test_a_bias_of_another_dtype(kernels: Any) -> None:
    """A bias in float32 is not rounded to the dtype of the weight."""
    x, weight, bias = t(3, 64, dtype=torch.bfloat16), t(64, dtype=torch.bfloat16), t(64)
    got = outcome(functional.layer_norm, x, (64,), weight, bias)
    expected = outcome(functional.layer_norm.native, x, (64,), weight, bias)
    assert got is expected if isinstance(expected, type) else torch.equal(got, expected)


def test_cosines_and_sines_of_two_dtypes(kernels: Any) -> None:
    """Neither table is rounded to the dtype of the other."""
    x, cos, sin = t(3, 2, 8, dtype=torch.bfloat16), t(3, 4, dtype=torch.bfloat16), t(3, 4)
    for tables in ((cos, sin), (sin, cos)):
        expected = functional.apply_rotary_emb.native(x, *tables)
        torch.testing.assert_close(
            kernels.apply_rotary_emb(x, *tables), expected, rtol=0.0, atol=0.0
        )


CALLS: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "rms_norm": lambda dtype: (t(3, 8), t(8).to(dtype)),
    "fused_add_rms_norm_": lambda dtype: (t(3, 8), t(3, 8), t(8).to(dtype)),
    "gemma_rms_norm": lambda dtype: (t(3, 8), t(8).to(dtype)),
    "fused_add_gemma_rms_norm": lambda dtype: (t(3, 8), t(3, 8), t(8).to(dtype)),
    "layer_norm": lambda dtype: (t(3, 8), (8,), t(8).to(dtype)),
    "layer_norm with bias": lambda dtype: (t(3, 8), (8,), None, t(8).to(dtype)),
    "rms_norm_gated": lambda dtype: (t(3, 8), t(8).to(dtype)),
    "apply_rotary_emb": lambda dtype: (t(3, 1, 8), t(3, 4).to(dtype), t(3, 4)),
    "rotary_embedding": lambda dtype: (POSITIONS, t(3, 8), t(3, 8), 8, t(9, 8).to(dtype)),
    "rotary_embedding_": lambda dtype: (POSITIONS, t(3, 8), t(3, 8), 8, t(9, 8).to(dtype)),
    "mrope": lambda dtype: (
        POSITIONS.expand(3, 3),
        t(3, 8),
        t(3, 8),
        8,
        t(9, 8).to(dtype),
        [2, 1, 1],
    ),
    "dual_chunk_rotary_embedding": lambda dtype: (
        POSITIONS,
        t(3, 8),
        t(3, 8),
        8,
        t(9, 8).to(dtype),
        4,
        1,
    ),
    "xielu": lambda dtype: (t(3, 8), t(1).to(dtype), t(1)),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_factors_that_are_no_floating_point(kernels: Any, name: str, dtype: torch.dtype) -> None:
    """Weights, biases and tables of other dtypes are refused, by the op and by the form, as the definition does."""
    arguments, form = CALLS[name](dtype), name.split()[0]
    for call in (
        getattr(kernels, form),
        getattr(functional, form),
        getattr(functional, form).native,
    ):
        with pytest.raises(ValueError, match=f"^{form.removesuffix('_')}_?: .* expected"):
            call(*arguments)


def mixed(
    first: torch.dtype, second: torch.dtype
) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Calls whose arguments only autocast lets meet."""
    x, other, weight, cache = t(3, 16, dtype=first), t(3, 16, dtype=second), t(16), t(9, 8)
    return {
        "RMSNorm": (ops.RMSNorm(16).requires_grad_(False), (x, other)),
        "GemmaRMSNorm": (ops.GemmaRMSNorm(16).requires_grad_(False), (x, other)),
        "rms_norm_gated": (functional.rms_norm_gated, (x, weight, other)),
        "rotary": (
            lambda x, other: functional.rotary_embedding(POSITIONS, x, other, 8, cache),
            (x, other),
        ),
        "rotary in place": (lambda x, other: turned(x.clone(), other.clone(), cache), (x, other)),
    }


def turned(query: Tensor, key: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    functional.rotary_embedding_(POSITIONS, query, key, 8, cache)
    return query, key


@pytest.mark.parametrize("name", list(mixed(torch.float32, torch.float32)))
def test_compiled_under_autocast(kernels: Any, name: str) -> None:
    """What eager code leaves to the definition is left to it in a compiled graph, which cannot catch a refusal."""
    for pair in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        call, arguments = mixed(*pair)[name]
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            expected = call(*arguments)
            torch._dynamo.reset()
            got = torch.compile(call, backend="aot_eager", fullgraph=True)(*arguments)
        torch.testing.assert_close(got, expected)


def test_fake_tensors_are_refused_as_real_ones(kernels: Any) -> None:
    """The rules by which ops are traced refuse the dtypes that the ops do."""
    with FakeTensorMode():
        for call, arguments in (
            (kernels.rms_norm, (t(3, 8), torch.empty(8, dtype=torch.bfloat16))),
            (kernels.fused_add_rms_norm, (t(3, 8), torch.empty(3, 8, dtype=torch.bfloat16))),
            (kernels.rms_norm_gated, (t(3, 8), t(8), torch.empty(3, 8, dtype=torch.bfloat16))),
            (kernels.layer_norm, (t(3, 8), [8], t(8), torch.empty(8, dtype=torch.bfloat16))),
            (kernels.rotary_embedding, (torch.empty(3), t(3, 8), t(3, 8), 8, t(9, 8))),
            (kernels.mrope, (torch.empty(3, 3), t(3, 8), t(3, 8), 8, t(9, 8), [2, 1, 1])),
            (
                kernels.dual_chunk_rotary_embedding,
                (torch.empty(3), t(3, 8), t(3, 8), 8, t(9, 8), 4, 1),
            ),
            (kernels.xielu, (t(3, 8), torch.empty(1, dtype=torch.int64), t(1))),
        ):
            with pytest.raises(ValueError, match="dtype"):
                call(*arguments)
