"""Sums over ranks that are normed, and quantised, as soon as some rows are there: the bits of separate kernels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import distributed, functional
from support.ranks import Ranks
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 64), (1, 7), (3, 5, 770), (70, 5126))
"""The last one takes several exchanges."""
EPS = 1e-5


@pytest.fixture(scope="module", params=[2, 3])
def ranks(installed: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, path=[str(installed)], plugins="cpu_kernels") as ranks:
        yield ranks


def calls(shared: Any) -> int:
    return int(shared.used()[0])


def compared(shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """The forms whose results differ from those of one kernel after the other on this rank."""
    from opgraft_cpu_kernels import kernels

    group = distributed.get_tp_group()
    generator = torch.Generator().manual_seed(group.rank_in_group)
    x = torch.randn(shape, generator=generator).to(dtype).mT.contiguous().mT
    same_everywhere = torch.Generator().manual_seed(7)
    residual = torch.randn(shape, generator=same_everywhere).to(dtype)
    weight = torch.randn(shape[-1:], generator=same_everywhere).to(dtype)
    scale, wrong = torch.tensor([0.02]), []
    for added in (None, residual):
        summed = group.all_reduce(x)
        gemma = kernels.gemma_rms_norm(summed, weight, EPS), summed
        normed = kernels.rms_norm(summed, weight, EPS), summed
        if added is not None:
            gemma = kernels.fused_add_gemma_rms_norm(summed, added, weight, EPS)
            normed = kernels.fused_add_rms_norm(summed, added, weight, EPS)
        out, total = normed
        expected = {
            "all_reduce_rms_norm": normed,
            "all_reduce_gemma_rms_norm": gemma,
            "static": (kernels.quant_fp8_static(out, scale, (-1, -1)), total),
            "by token": (*kernels.quant_fp8_dynamic(out, (1, -1)), total),
            "by tensor": (*kernels.quant_fp8_dynamic(out, (-1, -1)), total),
        }
        by_own_scales = functional.all_reduce_rms_norm_quant_fp8_dynamic
        by_given_scales = functional.all_reduce_rms_norm_quant_fp8_static
        before = calls(group.communicator.shared)
        found = {
            "all_reduce_rms_norm": functional.all_reduce_rms_norm(x, added, weight, EPS),
            "all_reduce_gemma_rms_norm": functional.all_reduce_gemma_rms_norm(
                x, added, weight, EPS
            ),
            "static": by_given_scales(x, added, scale, (-1, -1), weight, EPS),
            "by token": by_own_scales(x, added, (1, -1), weight, EPS),
            "by tensor": by_own_scales(x, added, (-1, -1), weight, EPS),
        }
        assert calls(group.communicator.shared) == before + len(found)
        wrong += [name for name in found if not alike(found[name], expected[name])]
    return wrong


def alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        one.dtype == other.dtype and torch.equal(one.float(), other.float()) for one, other in pairs
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_normed_with_the_bits_of_two_steps(ranks: Ranks, dtype: torch.dtype) -> None:
    """Sums over ranks, with and without a residual, are normed and quantised as by separate kernels, on every rank."""
    for shape in SHAPES:
        for wrong in ranks.run(compared, shape, dtype):
            assert wrong == []


def reference() -> float:
    """The largest distance of a quantised norm from what float64 computes, in steps of its numbers."""
    group = distributed.get_tp_group()
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(group.world_size, 9, 769, generator=generator)
    residual, weight = (torch.randn(9, 769, generator=generator) for _ in range(2))
    quantised, scales, total = functional.all_reduce_rms_norm_quant_fp8_dynamic(
        parts[group.rank_in_group], residual, (1, -1), weight[0], EPS
    )
    summed = parts.double().sum(0) + residual.double()
    torch.testing.assert_close(total.double(), summed, rtol=1e-5, atol=1e-5)
    normed = summed / (summed.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[0].double()
    distance = (quantised.double() * scales.double() - normed).abs()
    return float((distance / (normed.abs() * 2**-4 + scales * 2**-9)).max())


def test_values_are_those_in_float64(ranks: Ranks) -> None:
    """A quantised norm of a sum is within half a step of what float64 computes."""
    assert max(ranks.run(reference)) < 1.01


def refused() -> list[str]:
    """The messages for arguments that the kernels refuse, which leave the ranks in step."""
    group, messages = distributed.get_tp_group(), []
    x = torch.randn(2, 8)
    for weight, residual in ((torch.ones(3), None), (torch.ones(8), torch.randn(3, 8))):
        with pytest.raises(ValueError, match="rms_norm") as raised:
            functional.all_reduce_rms_norm(x, residual, weight, EPS)
        messages.append(str(raised.value))
    torch.testing.assert_close(
        group.all_reduce(torch.ones(3)), torch.full((3,), float(group.world_size))
    )
    wide = torch.randn(2, 8, dtype=torch.float64)
    normed, _ = functional.all_reduce_rms_norm(wide, None, torch.ones(8, dtype=torch.float64), EPS)
    assert normed.dtype is torch.float64
    return messages


def elsewhere() -> int:
    """The calls of the kernels for arguments that are not in the memory of the host: each raises."""
    group, x, weight = distributed.get_tp_group(), torch.randn(2, 8), torch.ones(8)
    before = calls(group.communicator.shared)
    far, scale = torch.ones(2, 8, device="meta"), torch.ones(1, device="meta")
    for call in (
        lambda: functional.all_reduce_rms_norm(x, far, weight, EPS),
        lambda: functional.all_reduce_gemma_rms_norm(x, far, weight, EPS),
        lambda: functional.all_reduce_rms_norm_quant_fp8_static(
            x, None, scale, (-1, -1), weight, EPS
        ),
        lambda: functional.all_reduce_rms_norm_quant_fp8_dynamic(
            x, None, (1, -1), weight, EPS, scale
        ),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    # Each call has summed, and has left the norm to the definition.
    return calls(group.communicator.shared) - before


def test_arguments_on_another_device_are_refused(ranks: Ranks) -> None:
    """A residual or a scale without memory raises, and the ranks go on."""
    assert len(set(ranks.run(elsewhere))) == 1
    assert max(ranks.run(reference)) < 1.01


def signed() -> list[str]:
    """The forms that ignore the negative sign of a view, which its memory does not have."""
    x, added, weight = (torch.randn(1, 1, dtype=torch.complex64).conj().imag for _ in range(3))
    assert x.is_neg()
    assert x.is_contiguous()
    weight, scale = weight[0], torch.tensor([0.02])
    given, wrong = (x, added, weight), []
    forms = {
        "norm": lambda x, added, weight: functional.all_reduce_rms_norm(x, added, weight, EPS),
        "gemma": lambda x, added, weight: functional.all_reduce_gemma_rms_norm(
            x, added, weight, EPS
        ),
        "static": lambda x, added, weight: functional.all_reduce_rms_norm_quant_fp8_static(
            x, added, scale, (-1, -1), weight, EPS
        ),
        "dynamic": lambda x, added, weight: functional.all_reduce_rms_norm_quant_fp8_dynamic(
            x, added, (1, -1), weight, EPS
        ),
    }
    for name, form in forms.items():
        expected = form(*(each.resolve_neg() for each in given))
        if not alike(form(*given), expected):
            wrong.append(name)
    return wrong


def test_views_with_a_negative_sign(ranks: Ranks) -> None:
    """A view that torch negates when it is read is summed and normed with its sign."""
    for wrong in ranks.run(signed):
        assert wrong == []


def test_refused_arguments_leave_ranks_in_step(ranks: Ranks) -> None:
    """Arguments that do not fit raise as the definition does on every rank, and the next collective works."""
    assert all(len(messages) == 2 for messages in ranks.run(refused))
