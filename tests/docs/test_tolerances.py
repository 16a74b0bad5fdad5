"""``tools/derive_tolerances.py``: intervals hold what they must, and steps without a rule are refused."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opgraft.binding.functional import Functional
from opgraft.ops.spec import Arguments, OpSpec, in_float64, tensors
from opgraft.testing.catalogue import SPECS
from opgraft.testing.examples import Example
from torch import Tensor

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraft"


def folder_of_flint() -> Path:
    """The folder of 'make tolerances'."""
    makefile = Path(__file__).parents[2] / "Makefile"
    found = re.search(r"^FLINT := (.+)$", makefile.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return CACHE / found[1].replace("==", "-")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """The module, with python-flint from its folder."""
    folder = folder_of_flint()
    if not (folder / "complete").exists():
        pytest.skip(f"no python-flint in {folder}: 'make tolerances' installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import derive_tolerances

        yield derive_tolerances


def drawn(form: str, dtype: torch.dtype, variant: str, seed: int) -> tuple[OpSpec, Arguments]:
    """Inputs that no committed figure is of."""
    spec = SPECS[form]
    # A convolution has an image, and a state has heads.
    lead = min((lead for lead in spec.leads if min(lead) > 0), key=max)
    return spec, Example(variant, dtype, lead, spec.sizes[1], seed=seed).arguments(spec)


FORMS = [
    *("rms_norm", "layer_norm", "causal_conv1d", "conv2d", "fused_experts"),
    *("selective_state_update", "silu_"),
]
"""Forms with sums over rows, slices, windows, products of letters, and writes to arguments."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_an_interval_holds_truth_and_result(tool, form: str, dtype: torch.dtype) -> None:
    """On random inputs: the result of the reference in float64, and that of torch in the dtype."""
    radii, sizes = [], []
    variants = SPECS[form].variants
    for seed, variant in enumerate([*variants] * (1 if len(variants) > 2 else 3)):
        spec, arguments = drawn(form, dtype, variant, torch.seed() % 2**31 + seed)
        tool.BALLS.clear()
        exact = tensors(spec.reference(**in_float64(arguments)))
        found = tool.enclosures(spec, arguments)
        assert len(found) == len(exact)
        for ours, theirs in zip(found, exact, strict=True):
            native = tool.numbers_of(ours)
            for ball, value, truth in zip(
                ours.balls, native, theirs.flatten().tolist(), strict=True
            ):
                assert ball.contains(tool.arb(value)), (form, variant, seed)
                # The reference rounds, too, by parts of 1e16.
                near = tool.arb(truth, 1e-13 * (1 + abs(truth)))
                assert ball.overlaps(near), (form, variant, seed)
                radii.append(float(ball.rad()))
                sizes.append(1 + abs(truth))
    assert len(radii) > 20
    # An interval as wide as the numbers would hold anything.
    assert sum(radii) < 0.1 * sum(sizes)


def spec_of(native: Callable[..., Any], mutates: tuple[str, ...] = ()) -> OpSpec:
    """The spec of SiLU with another definition."""
    functional = Functional(native, "silu", native, mutates, None, differentiable=False)
    reference = native if not mutates else lambda x: x
    return dataclasses.replace(SPECS["silu"], functional=functional, reference=reference)


def sum_of_squares(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).expand_as(x)


def written_in_parts(x: Tensor) -> None:
    half = x.shape[-1] // 2
    x[..., :half] = x[..., :half] * 3
    rest = x[..., half:]
    rest *= 3
    x.copy_(x.add(1.0))


def test_a_write_through_a_view_is_followed(tool) -> None:
    """An argument, its views and their intervals change together."""
    spec = spec_of(written_in_parts, ("x",))
    x = torch.randn(3, 8)
    (found,) = tool.enclosures(spec, {"x": x})
    wanted = (x.double() * 3 + 1).flatten().tolist()
    for ball, value, truth in zip(found.balls, tool.numbers_of(found), wanted, strict=True):
        assert ball.contains(tool.arb(value))
        assert ball.contains(tool.arb(truth))
        assert float(ball.rad()) < 1e-5
    assert not torch.equal(x, found.as_subclass(Tensor)), "the caller's tensor stays as it is"


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a code of a computed number": (
        lambda x: (x * 3).to(torch.int8).to(x.dtype),
        "codes, which jump at a rounding",
    ),
    "a comparison of computed numbers": (
        lambda x: torch.where(x * 3 > 3 * x, x, -x),
        "compares numbers that a rounding may move past each other",
    ),
    "an order of computed numbers": (
        lambda x: (x * 3).gather(-1, (x * 3).sort().indices),
        "codes or places, which jump at a rounding",
    ),
    "the largest of computed numbers": (
        lambda x: x.gather(-1, (x * 3).argmax(-1, keepdim=True)).expand_as(x),
        "codes or places, which jump at a rounding",
    ),
    "a pair with places": (
        lambda x: x + (x * 3).topk(8).values,
        "codes or places, which jump at a rounding",
    ),
    "bits of computed numbers": (
        lambda x: x * (x * 3).view(torch.int32),
        "codes or places, which jump at a rounding",
    ),
    "a question for no number": (
        lambda x: x.masked_fill((x * 3).isnan(), 0.0),
        "codes or places, which jump at a rounding",
    ),
    "a number for Python": (
        lambda x: x * (x * 3).sum().item(),
        "takes a computed number by torch's item",
    ),
    "numbers for Python": (
        lambda x: x * (x * 3)[0].tolist()[0],
        "codes or places, which jump at a rounding",
    ),
    "a function without a rule": (torch.special.gammaln, "torch's .*gammaln.*, which has no rule"),
    "a write without a rule": (
        lambda x: x.clone().cos_(),
        "torch's cos_, which has no rule yet",
    ),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        "torch computes attention as a whole",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_intervals_do_not_take_is_refused(tool, name: str) -> None:
    """Nothing is derived, with the reason, in place of an interval that does not hold the result."""
    native, reason = REFUSED[name]
    with pytest.raises(tool.NotDerivedError, match=reason):
        tool.enclosures(spec_of(native), {"x": torch.ones(3, 8)})


def test_a_certain_comparison_is_taken(tool) -> None:
    """Intervals that are apart compare as their numbers do."""
    x = torch.tensor([-1.0, 2.0])
    (found,) = tool.enclosures(spec_of(lambda x: torch.where(x * 3 > 1, x * 2, x)), {"x": x})
    assert [float(ball.mid()) for ball in found.balls] == [-1.0, 4.0]


def test_a_rounded_tie_has_both_neighbours(tool) -> None:
    """``round`` never falls, so the ends of an interval give the ends of the result."""
    (found,) = tool.enclosures(
        spec_of(lambda x: (x * 0.1).round()), {"x": torch.tensor([5.0, 12.0, 15.0])}
    )
    ends = [(float(ball.lower()), float(ball.upper())) for ball in found.balls]
    assert ends == [pytest.approx(each, abs=1e-6) for each in ((0.0, 1.0), (1.0, 1.0), (1.0, 2.0))]


def test_sums_are_those_of_a_row(tool) -> None:
    """The bound grows with the numbers of a sum."""
    radii = []
    for length in (4, 64):
        (found,) = tool.enclosures(spec_of(sum_of_squares), {"x": torch.ones(1, length)})
        radii.append(float(found.balls[0].rad()) / length)
    eps = torch.finfo(torch.float32).eps
    assert eps < radii[0] < radii[1] < 64 * eps
