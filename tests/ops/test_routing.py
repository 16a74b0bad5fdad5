"""What is particular to routing: ties, numbers that are none, experts that must not be taken, shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops import GroupedTopk
from torch import Tensor

SCORING = pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
route = functional.grouped_topk


@SCORING
def test_ties_go_to_the_lower_id(scoring_func: str) -> None:
    """Of equal groups and of equal experts the first ones are taken, in ascending order of their ids."""
    weights, ids = route(torch.zeros(3, 64), 6, False, 8, 2, scoring_func)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    torch.testing.assert_close(
        weights, torch.full((3, 6), 0.5 if scoring_func == "sigmoid" else 1 / 64)
    )
    logits = torch.zeros(1, 12)
    logits[0, 7] = logits[0, 11] = 1.0
    assert route(logits, 4, False, 4, 2, scoring_func)[1].tolist() == [[7, 11, 6, 8]]


def test_only_kept_groups_are_routed_to() -> None:
    """The second best expert is not taken if its group is not among the best; with a bias, two per group count."""
    logits = torch.tensor([[4.0, 3.9, 0.0, 0.0, 3.0, 2.9]])
    assert route(logits, 2, False, 3, 1)[1].tolist() == [[0, 1]]
    logits = torch.tensor([[4.0, -9.0, 0.0, 0.0, 3.0, 3.0]])
    assert route(logits, 2, False, 3, 1, "sigmoid")[1].tolist() == [[0, 1]]
    assert route(logits, 2, False, 3, 1, "sigmoid", 1.0, torch.zeros(6))[1].tolist() == [[4, 5]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """A bias changes which experts are taken and in which order, and not by how much they count."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    weights, ids = route(
        logits, 2, False, 0, 0, "sigmoid", 1.0, torch.tensor([10.0, 0.0, 5.0, 0.0])
    )
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[0.0, 2.0]])))


@pytest.mark.parametrize("bias", [None, torch.zeros(16)])
@SCORING
def test_ids_are_valid_whatever_the_logits(scoring_func: str, bias: Tensor | None) -> None:
    """NaN and infinities never lead to an id that is out of range or taken twice."""
    rows = [
        [math.nan] * 16,
        [-math.inf] * 16,
        [math.inf] * 16,
        [math.nan, -math.inf, math.inf, 0.0] * 4,
    ]
    _, ids = route(torch.tensor(rows), 5, True, 4, 2, scoring_func, 1.0, bias)
    assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())


def test_left_out_groups_stay_out() -> None:
    """Experts of groups that are left out are not taken even where all others are forbidden or NaN."""
    forbidden = torch.tensor([-math.inf] * 4 + [0.0, 0.0] + [-math.inf] * 2)
    _, ids = route(torch.randn(5, 8), 4, False, 4, 2, "sigmoid", 1.0, forbidden)
    assert {expert // 2 for expert in ids.flatten().tolist()} == {2, 0}
    logits = torch.randn(1, 8)
    logits[0, 6:] = math.nan
    _, ids = route(logits, 2, False, 4, 1, "sigmoid")
    assert ids.tolist() == [[6, 7]]


def test_weights_that_are_all_zero() -> None:
    """Where every score underflows, renormalised weights are zeros, not NaN."""
    weights, _ = route(torch.full((2, 8), -200.0), 3, True, 0, 0, "sigmoid")
    assert torch.equal(weights, torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@SCORING
def test_scores_are_not_rounded(dtype: torch.dtype, scoring_func: str) -> None:
    """Half logits are scored in float32: results are those of the same logits in float32."""
    logits = torch.randn(83, 64).to(dtype)
    bias = torch.randn(64).to(dtype)
    got = route(logits, 8, True, 8, 4, scoring_func, 2.5, bias)
    expected = route(logits.float(), 8, True, 8, 4, scoring_func, 2.5, bias.float())
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    "call", [route, torch.ops.opgraft.grouped_topk], ids=["form", "registered"]
)
@SCORING
def test_gradients(call: Any, scoring_func: str) -> None:
    """The logits of chosen experts get the gradients of their weights, worked out by hand; the bias gets none."""
    logits = torch.randn(5, 12, requires_grad=True)
    bias = torch.randn(12)
    weights, ids = call(logits, 3, True, 4, 2, scoring_func, 2.0, bias)
    upstream = torch.randn(5, 3)
    (gradient,) = torch.autograd.grad(weights, logits, upstream)
    chosen = logits.detach().double().gather(1, ids.long())
    score = torch.exp(chosen) if scoring_func == "softmax" else torch.sigmoid(chosen)
    slope = score if scoring_func == "softmax" else score * (1 - score)
    total = score.sum(1, keepdim=True)
    inner = (upstream.double() * score).sum(1, keepdim=True)
    expected = torch.zeros(5, 12, dtype=torch.float64)
    expected.scatter_(1, ids.long(), 2.0 * slope * (upstream / total - inner / total**2))
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


def test_without_groups() -> None:
    """Zeros for the groups mean that all experts compete, as with one group."""
    logits = torch.randn(7, 16)
    expected, expected_ids = logits.softmax(-1).topk(3)
    for op in (GroupedTopk(3, False), GroupedTopk(3, False, 1, 1)):
        weights, ids = op(torch.randn(7, 4), logits)
        torch.testing.assert_close(weights, expected)
        assert torch.equal(ids, expected_ids.int())


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_shared_experts_are_appended(tokens: int) -> None:
    """Every token also visits the shared experts, numbered behind the routed ones, with weight one."""
    hidden_states, logits = torch.randn(tokens, 4), torch.randn(tokens, 16)
    weights, ids = GroupedTopk(3, True, 4, 2, "sigmoid", 2.5, 2)(hidden_states, logits)
    routed, routed_ids = GroupedTopk(3, True, 4, 2, "sigmoid", 2.5)(hidden_states, logits)
    assert torch.equal(weights, torch.cat([routed, torch.ones(tokens, 2)], 1))
    assert torch.equal(
        ids, torch.cat([routed_ids, torch.tensor([[16, 17]] * tokens).reshape(tokens, 2).int()], 1)
    )
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_settings_of_the_module() -> None:
    """The op keeps its settings where kernels read them."""
    op = GroupedTopk(8, True, 8, 4, "sigmoid", 2.5, 1)
    names = (
        "topk",
        "renormalize",
        "num_expert_group",
        "topk_group",
        "scoring_func",
        "routed_scaling_factor",
    )
    assert [getattr(op, name) for name in names] == [8, True, 8, 4, "sigmoid", 2.5]
    assert op.num_fused_shared_experts == 1
    assert "topk=8" in repr(op)


def t(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: GroupedTopk(2, True, 2, 1, "relu"),
        "grouped_topk: scoring_func is 'relu', expected one of",
    ),
    (lambda: GroupedTopk(0, True), "grouped_topk: topk is 0, expected at least 1"),
    (
        lambda: GroupedTopk(2, True, -1),
        "grouped_topk: num_expert_group is -1, expected 0 for no groups",
    ),
    (
        lambda: GroupedTopk(2, True, 4, 5),
        "grouped_topk: topk_group is 5, expected 1 to num_expert_group=4",
    ),
    (
        lambda: GroupedTopk(2, True, 4, 0),
        "grouped_topk: topk_group is 0, expected 1 to num_expert_group=4",
    ),
    (
        lambda: GroupedTopk(2, True, 0, 2),
        "grouped_topk: topk_group is 2, expected 0 to num_expert_group=0",
    ),
    (
        lambda: GroupedTopk(2, True, num_fused_shared_experts=-1),
        "num_fused_shared_experts is -1, expected 0 or more",
    ),
    (
        lambda: GroupedTopk(2, True)(t(3, 4), t(2, 8)),
        r"hidden_states has shape \(3, 4\), expected as many tokens as",
    ),
    (
        lambda: route(t(2, 8), 5, True, 4, 2),
        "topk is 5, expected at most the 4 experts of 2 groups",
    ),
    (
        lambda: route(t(2, 8), 9, True, 0, 0),
        "topk is 9, expected at most the 8 experts of 1 groups",
    ),
    (
        lambda: route(t(2, 8), 2, True, 3, 2),
        "num_expert_group is 3, expected a divisor of 8 experts",
    ),
    (
        lambda: route(t(2, 8), 2, True, 2, 1, "relu"),
        "grouped_topk: scoring_func is 'relu', expected one of",
    ),
    (
        lambda: route(t(8), 2, True, 2, 1),
        r"gating_output has shape \(8,\) .* expected floating-point \[tokens, experts\]",
    ),
    (
        lambda: route(t(2, 8).int(), 2, True, 2, 1),
        "gating_output has .* torch.int32, expected floating-point",
    ),
    (
        lambda: route(t(2, 8), 2, True, 2, 1, "sigmoid", 1.0, t(4)),
        r"e_score_correction_bias has shape \(4,\), expected",
    ),
    (
        lambda: route(t(2, 8), 2, True, 2, 1, "sigmoid", 1.0, t(8).to("meta")),
        "grouped_topk: e_score_correction_bias is on meta, expected cpu as gating_output",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    """A wrong argument is named, with what it is and what is expected."""
    with pytest.raises(ValueError, match=message):
        call()
