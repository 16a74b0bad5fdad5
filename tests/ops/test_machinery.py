"""The checks of specs bite: an op that is wrong in some way fails the checks that are about that, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from opgraft.binding.functional import FUNCTIONALS, register_functional, unregister
from opgraft.ops.fakes import nothing
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside
from opgraft.testing import checks
from torch import Tensor
from torch.nn import functional as F

_NUMBERS = itertools.count()


def like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def right(x: Tensor) -> Tensor:
    return F.silu(x)


def reference(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size)}


@pytest.fixture
def spec_of() -> Iterator[Callable[..., OpSpec]]:
    """Makes the spec of a form with the given definition; the form is forgotten afterwards."""
    known = set(FUNCTIONALS)

    def make(
        native: Callable[[Tensor], Any],
        fake: Callable[..., Any] = like,
        settings: Arguments | None = None,
        **more: Any,
    ) -> OpSpec:
        def wrong_op(x: Tensor) -> Tensor:
            return native(x)

        wrong_op.__name__ = f"wrong_op_{next(_NUMBERS)}"  # torch keeps what is registered
        made = register_functional("silu", fake, **(settings or {}))(wrong_op)
        return OpSpec(made, inputs, reference, lambda x: x.numel(), **more)

    yield make
    for name in set(FUNCTIONALS) - known:
        unregister(FUNCTIONALS[name])


def offset(x: Tensor) -> Tensor:
    return F.silu(x) + 1e-3


def ignores_strides(x: Tensor) -> Tensor:
    return F.silu(x.as_strided(x.shape, torch.empty(x.shape).stride()))


def packs_elements_only(x: Tensor) -> Tensor:
    return ignores_strides(x if x.stride(-1) == 1 else x.contiguous())


def knows_one_row_stride(x: Tensor) -> Tensor:
    if x.stride(-1) != 1 or not x.numel():
        return F.silu(x)
    rows = x.shape[:-1].numel()
    return F.silu(x.as_strided((rows, x.shape[-1]), (x.stride(0) * x.shape[0] // rows, 1))).reshape(
        x.shape
    )


def writes_to_its_input(x: Tensor) -> Tensor:
    return x.copy_(F.silu(x)) + 0


def returns_its_input(x: Tensor) -> Tensor:
    return x


def breaks_the_graph(x: Tensor) -> Tensor:
    return F.silu(x) if x.sum().item() < 1e9 else x * 2


def knows_one_size(x: Tensor) -> Tensor:
    return F.silu(x) if x.shape[0] == 7 else F.silu(x) + 0 * x


def cuts_the_gradient(x: Tensor) -> Tensor:
    return F.silu(x.detach()) + (x - x.detach())


def wrong_for_empty(x: Tensor) -> Tensor:
    return F.silu(x) if x.numel() else x.new_zeros(3)


def narrows(x: Tensor) -> Tensor:
    return F.silu(x).to(torch.promote_types(x.dtype, torch.float32))


CHECKS: dict[str, Callable[[OpSpec, Any], None]] = {
    "values": lambda s, c: checks.check_values(s, "", torch.float32, c),
    "values in half types": lambda s, c: checks.check_values(s, "", torch.bfloat16, c),
    "strides": lambda s, c: checks.check_strides(s, "", c),
    "effects": lambda s, c: checks.check_effects(s, "", torch.float32, c),
    "compilation": lambda s, c: checks.check_compilation(s, "", c),
    "gradients": lambda s, c: checks.check_gradients(s, "", c),
}
CLOSE, SHAPE, HALF = (
    "not close",
    "'shape' do not match",
    "returned torch.float32 for torch.bfloat16",
)
WROTE, SHARED = r"wrote to \['x'\], declared are \[\]", "returned memory of an argument"

ROWS: list[tuple[Callable[[Tensor], Tensor], dict[str, str]]] = [
    (right, {}),
    (offset, {"values": CLOSE, "values in half types": CLOSE, "strides": CLOSE}),
    (wrong_for_empty, {"values": SHAPE, "values in half types": SHAPE}),
    (narrows, {"values in half types": HALF}),
    (ignores_strides, {"strides": CLOSE}),
    (packs_elements_only, {"strides": CLOSE}),
    (knows_one_row_stride, {"strides": CLOSE}),
    (
        writes_to_its_input,
        {"effects": WROTE, "compilation": CLOSE, "gradients": "in-place operation"},
    ),
    (
        returns_its_input,
        {"values": CLOSE, "values in half types": CLOSE, "strides": CLOSE, "effects": SHARED},
    ),
    (breaks_the_graph, {"compilation": "data-dependent"}),
    (knows_one_size, {"compilation": "was compiled 2 times"}),
    (cuts_the_gradient, {"gradients": "Jacobian mismatch"}),
]
"""Each op with what every check that it must fail says; it passes the others."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("op", "failures"), ROWS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_op_fails(
    op: Callable[[Tensor], Tensor],
    failures: dict[str, str],
    check: str,
    spec_of: Callable[..., OpSpec],
) -> None:
    """An op fails the checks that are about what is wrong with it, and no other; the right one fails none."""
    if check not in failures:
        CHECKS[check](spec_of(right), op)
    else:
        with pytest.raises((AssertionError, RuntimeError), match=failures[check]):
            CHECKS[check](spec_of(right), op)


def wider(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] + 1))


def other_layout(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1]).permute(*reversed(range(x.dim())))


@pytest.mark.parametrize("fake", [wider, other_layout])
def test_a_wrong_fake_rule_fails(
    fake: Callable[[Tensor], Tensor], spec_of: Callable[..., OpSpec]
) -> None:
    """A fake rule that tells another shape or another layout is found; the right one passes."""
    checks.check_fake(spec_of(right), "", torch.float32)
    with pytest.raises(AssertionError, match="the fake rule tells"):
        checks.check_fake(spec_of(right, fake), "", torch.float32)


# Torch 2.15 hides this warning of its own check, but cannot hide an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_wrong_registration_fails(spec_of: Callable[..., OpSpec]) -> None:
    """An op that writes to its input, of which its schema says nothing, is refused by torch's own check."""
    checks.check_registration(spec_of(right), "")
    with pytest.raises(Exception, match=r"test_schema|mutat"):
        checks.check_registration(spec_of(writes_to_its_input, differentiable=False), "")


def test_a_wrong_result_differs_from_others(spec_of: Callable[..., OpSpec]) -> None:
    """An op that differs from an outside implementation, in results or in gradients, fails; the right one is named."""
    spec = spec_of(right, outside=(Outside("torch.nn.functional.silu", lambda x: F.silu(x)),))
    assert checks.check_outside(spec, "", right) == ["torch.nn.functional.silu"]
    for wrong in (offset, cuts_the_gradient):
        with pytest.raises(AssertionError, match="not close"):
            checks.check_outside(spec, "", wrong)


def writes_and_loses_gradients(x: Tensor) -> None:
    x.detach().copy_(F.silu(x.detach()))


def test_a_lost_gradient_is_found(spec_of: Callable[..., OpSpec]) -> None:
    """An op that writes over a tensor which requires a gradient, or makes one where it has none, fails."""
    in_place = spec_of(writes_and_loses_gradients, nothing, settings={"mutates": ("x",)})
    checks.check_refusal(in_place, "", checks.registered(in_place))
    with pytest.raises(AssertionError, match="takes x, which requires a gradient, and loses it"):
        checks.check_refusal(in_place, "", in_place.functional.native)
    constant = spec_of(right, settings={"differentiable": False}, differentiable=False)
    checks.check_refusal(constant, "", checks.registered(constant))
    with pytest.raises(AssertionError, match="has no gradient, and its results require one"):
        checks.check_refusal(constant, "", right)
