"""Writing where memory is shared: what is read is what was there before the call, as in the native definitions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")

Views = Callable[[Tensor], tuple[Tensor, Tensor]]
PAIRS: dict[str, Views] = {
    "apart": lambda base: (base[:4], base[4:8]),
    "one": lambda base: (base, base),
    "a row before": lambda base: (base[:-1], base[1:]),
    "a row behind": lambda base: (base[1:], base[:-1]),
    "side by side": lambda base: (base[:, :16], base[:, 16:]),
    "some columns": lambda base: (base[:, :24], base[:, 8:]),
    "every other row": lambda base: (base[0:8:2], base[1:8:2]),
}
each_pair = pytest.mark.parametrize("views", list(PAIRS.values()), ids=list(PAIRS))


def drawn() -> tuple[Tensor, Tensor]:
    base = torch.randn(9, 32)
    return base, base.clone()


@each_pair
@pytest.mark.parametrize("name", ["fused_add_rms_norm_", "fused_add_gemma_rms_norm_"])
def test_norms_in_place(path: str, kernels: Any, name: str, views: Views) -> None:
    """Norm and sum, of whatever views of one tensor, are those of the definition."""
    (got, expected), weight = drawn(), torch.randn(32)
    for base, call in ((got, getattr(kernels, name)), (expected, getattr(functional, name).native)):
        x, residual = views(base)
        call(x, residual, weight[: x.shape[1]])
    torch.testing.assert_close(got, expected)


@each_pair
def test_norms_into_a_given_tensor(path: str, kernels: Any, views: Views) -> None:
    """The norm is that of the input as it was, be the result written over it or over part of it."""
    base, _ = drawn()
    x, out = views(base)
    expected = functional.rms_norm.native(x.clone())
    kernels.rms_norm_out(x, out)
    torch.testing.assert_close(out, expected)


def test_a_weight_in_the_memory_of_the_result(kernels: Any) -> None:
    """A weight that is overwritten counts as it was."""
    (got, expected), other = drawn(), torch.randn(9, 32)
    for base, call in (
        (got, kernels.fused_add_rms_norm_),
        (expected, functional.fused_add_rms_norm_.native),
    ):
        call(base, other.clone(), base[3])
    torch.testing.assert_close(got, expected)


@each_pair
def test_rotation_in_place(path: str, kernels: Any, views: Views) -> None:
    """Query and key are rotated as they were, and written one after the other."""
    (got, expected), cache = drawn(), torch.randn(9, 8)
    for base, call in (
        (got, kernels.rotary_embedding_),
        (expected, functional.rotary_embedding_.native),
    ):
        query, key = views(base)
        call(torch.arange(len(query)), query, key, 8, cache)
    torch.testing.assert_close(got, expected)


def test_a_fused_projection_is_rotated_where_it_lies(kernels: Any) -> None:
    """Query and key between one another in the rows of a projection are not copied, as rows or as heads."""
    fused, cache, positions = torch.randn(64, 48), torch.randn(64, 8), torch.arange(64)
    for query, key in (
        (fused[:, :32], fused[:, 32:40]),
        (fused.view(64, 6, 8)[:, :4], fused.view(64, 6, 8)[:, 4:5]),
    ):
        with torch.profiler.profile() as profile:
            kernels.rotary_embedding_(positions, query, key, 8, cache)
        names = {event.key for event in profile.key_averages()}
        assert not names & {"aten::copy_", "aten::clone", "aten::contiguous"}, names


def test_elements_in_one_place(kernels: Any) -> None:
    """``silu_`` leaves a tensor whose elements share memory to the definition, which torch computes or refuses."""
    (got, expected), shape, strides = drawn(), (3, 4), (2, 1)
    with pytest.raises(ValueError, match="silu_: elements of x share memory"):
        kernels.silu_(got.as_strided(shape, strides))
    functional.silu_(got.as_strided(shape, strides))
    functional.silu_.native(expected.as_strided(shape, strides))
    torch.testing.assert_close(got, expected)
    kernels.silu_(got.T)
    torch.testing.assert_close(got, torch.nn.functional.silu(expected))


def test_results_that_share_elements(kernels: Any) -> None:
    """A tensor that repeats its elements is refused before the other is written."""
    good, before = drawn()
    shared = torch.randn(1, 32).expand(9, 32)
    for arguments in ((good, shared), (shared, good)):
        with pytest.raises(RuntimeError, match="more than one element"):
            kernels.fused_add_rms_norm_(*arguments)
        assert torch.equal(good, before)
