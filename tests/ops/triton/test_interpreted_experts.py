"""Experts by the Triton kernels, by Triton's interpreter: batches of several blocks, weights as they lie, and faults.

As ``test_interpreted`` these tests need a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/ops/triton/test_interpreted_experts.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops.on_triton import triton_kernels
from opgraft.testing.catalogue import SPECS
from torch import Tensor

pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs a process with TRITON_INTERPRET=1; make test-triton runs these tests",
        allow_module_level=True,
    )

from opgraft.ops.moe.fused import triton as kernels

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

EXPERTS = triton_kernels()["fused_experts"]
SPEC = SPECS["fused_experts"]
NATIVE = FUNCTIONALS["fused_experts"].native


def drawn(
    tokens: int, experts: int, topk: int, *, hidden: int = 70, intermediate: int = 33, seed: int = 0
) -> dict[str, Any]:
    """Arguments with distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": draw(tokens, hidden),
        "w13": draw(experts, 2 * intermediate, hidden) / hidden**0.5,
        "w2": draw(experts, hidden, intermediate) / intermediate**0.5,
        "topk_weights": draw(tokens, topk),
        "topk_ids": torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :topk],
    }


def expect_right(arguments: dict[str, Any]) -> Tensor:
    """See that the kernels compute as the spec's reference does in float64, and return their result."""
    exact = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    got = EXPERTS(**arguments)
    atol, rtol = SPEC.tolerance(got.dtype)
    torch.testing.assert_close(got.double(), SPEC.reference(**exact), atol=atol, rtol=rtol)
    return got


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernels that are launched, in turn, and the rows of their tiles; they are launched all the same."""
    seen: list[tuple[str, int]] = []
    launch = kernels.launch

    def noting(kernel: Any, programs: int, tile: Any, *arguments: Any, **constants: Any) -> None:
        seen.append((kernel.fn.__name__, tile.rows))
        launch(kernel, programs, tile, *arguments, **constants)

    monkeypatch.setattr(kernels, "launch", noting)
    return seen


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "rows"),
    [(1, 9, 4, 16), (40, 3, 1, 16), (70, 2, 1, 64), (75, 3, 2, 64)],
)
def test_blocks(
    tokens: int, experts: int, topk: int, rows: int, tiles: list[tuple[str, int]]
) -> None:
    """Experts with several blocks, a part of one, or no token at all, in small tiles and in large ones."""
    expect_right(drawn(tokens, experts, topk))
    assert tiles[:2] == [("gate_up_kernel", rows), ("down_kernel", rows)]


@pytest.mark.parametrize("counts", [(70, 0), (0, 70), (64, 6), (1, 69)])
def test_uneven_loads(counts: tuple[int, int], tiles: list[tuple[str, int]]) -> None:
    """One expert with all tokens, blocks that end where an expert does."""
    arguments = drawn(70, 2, 1)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    arguments["topk_ids"] = torch.arange(2).repeat_interleave(torch.tensor(counts))[order, None]
    expect_right(arguments)
    assert {rows for _, rows in tiles[:2]} == {64}


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_weights_as_they_lie(activation: str, tiles: list[tuple[str, int]]) -> None:
    """Weights of checkpoints with rows and columns swapped, and a part of wider ones, are read in place."""
    arguments = drawn(5, 3, 2) | {"activation": activation}
    plain = expect_right(arguments)
    for name in ("w13", "w2"):
        arguments[name] = arguments[name].mT.contiguous().mT
    gaps = torch.full((10, 100), torch.nan)
    arguments["x"] = gaps[::2, 7:77].copy_(arguments["x"])
    assert torch.equal(EXPERTS(**arguments), plain)
    assert len(tiles) == 6


def test_a_token_is_alike_in_any_batch() -> None:
    """Bit for bit: in what order others come, and how many, has no say in a token's sum.

    Products are exact here, as the interpreter's own are in an order that depends on the row.
    """
    arguments = drawn(30, 4, 3)
    arguments |= {name: arguments[name].mul(9).round() for name in ("x", "w13")}
    arguments["w2"] = torch.eye(70, 33).expand(4, 70, 33)
    whole = EXPERTS(**arguments)
    for part in (torch.tensor([7]), torch.arange(29, -1, -1), torch.tensor([3, 7, 7, 29])):
        rows = {name: arguments[name][part] for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(EXPERTS(**arguments | rows), whole[part])


def test_what_is_elsewhere_adds_nothing() -> None:
    """Experts of other ranks add nothing, be it that all are, and whatever their weights are."""
    arguments = drawn(6, 3, 2)
    arguments["topk_ids"][::2] = -1
    arguments["topk_ids"][1, 0] = -1
    expect_right(arguments)
    arguments["topk_weights"][arguments["topk_ids"] < 0] = torch.nan
    got = EXPERTS(**arguments)
    assert (got[::2] == 0).all()
    assert not got.isnan().any()


def test_a_token_that_is_not_a_number() -> None:
    """NaN in a token, or in its weights, makes NaN of it and of no other."""
    arguments = drawn(20, 2, 1)
    before = EXPERTS(**arguments)
    arguments["x"][3], arguments["topk_weights"][11] = torch.nan, torch.nan
    got = EXPERTS(**arguments)
    others = torch.tensor([token for token in range(20) if token not in (3, 11)])
    assert got[[3, 11]].isnan().all()
    assert torch.equal(got[others], before[others])


NOTHING = {"no token": (0, 3, 2), "no choice": (4, 3, 0), "no element between": (4, 3, 2)}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing(case: str, tiles: list[tuple[str, int]]) -> None:
    """Where there is nothing to multiply, the result is the definition's."""
    arguments = drawn(*NOTHING[case], intermediate=0 if case == "no element between" else 3)
    assert torch.equal(EXPERTS(**arguments), NATIVE(**arguments))
    assert not tiles


def test_dtypes_that_autocast_lets_meet(tiles: list[tuple[str, int]]) -> None:
    """Under autocast weights of another dtype are the definition's to multiply."""
    arguments = drawn(4, 3, 2)
    arguments["x"] = arguments["x"].bfloat16()
    with torch.autocast("cpu"):
        assert torch.equal(EXPERTS(**arguments), NATIVE(**arguments))
    assert not tiles


REFUSED = {
    "activation": ({"activation": lambda name: "relu"}, "activation is 'relu'"),
    "weight": ({"w2": lambda w2: w2[:, :3]}, "w2 has shape"),
    "bias": ({"w13_bias": lambda none: torch.zeros(5, 3)}, "w13_bias has shape"),
    "dtype": ({"w13": Tensor.half}, "w13 is torch.float16"),
    "id": ({"topk_ids": lambda ids: ids + 5}, "topk_ids reach from"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """What the definition refuses the kernel refuses, in the same words."""
    changes, said = REFUSED[case]
    arguments = SPEC.arguments("", torch.float32, (7,), 9)
    arguments |= {argument: change(arguments.get(argument)) for argument, change in changes.items()}
    messages = []
    for form in (NATIVE, EXPERTS):
        with pytest.raises(ValueError, match=said) as refused:
            form(**arguments)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
