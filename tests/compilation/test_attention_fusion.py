"""The pass that joins attention and the quantisation of its result."""

from __future__ import annotations

from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.ops import QuantFP8, ScaledDotProductAttention
from support.providers import CALLS, provide
from torch import Tensor, nn

HEADS, HEAD_SIZE = 4, 8
FORM = "scaled_dot_product_attention_quant_fp8_static"


class Attending(nn.Module):
    """Attention to all tokens, whose result, a row for each token, is quantised."""

    def __init__(self, group_shape: tuple[int, int] = (-1, -1), read: bool = False) -> None:
        super().__init__()
        self.attention, self.quantize = ScaledDotProductAttention(), QuantFP8(True, group_shape)
        self.register_buffer(
            "scale", torch.full((1,) if group_shape == (-1, -1) else (1, HEADS * HEAD_SIZE), 0.02)
        )
        self.read = read

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, tokens, _ = x.shape
        heads = (
            part.view(rows, tokens, HEADS, HEAD_SIZE).transpose(1, 2) for part in x.chunk(3, dim=-1)
        )
        attended = (
            self.attention(*heads, is_causal=True, scale=0.4)
            .transpose(1, 2)
            .reshape(rows, tokens, -1)
        )
        return (self.quantize(attended, self.scale)[0], *([attended] if self.read else []))


def drawn(rows: int, dtype: torch.dtype = torch.float32, tokens: int = 5) -> Tensor:
    return torch.randn(rows, tokens, 3 * HEADS * HEAD_SIZE).to(dtype)


def compiled(model: nn.Module, dtype: torch.dtype = torch.float32) -> opgraft.Compiled:
    return opgraft.compile(model, CompilationConfig(level=1), args=(drawn(3, dtype),))  # type: ignore[no-any-return]


def counts(found: opgraft.Compiled) -> tuple[int, int]:
    (report,) = (report for report in found.passes if report.name == "attention_quant_fp8")
    return report.matched, report.replaced


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_heads_are_quantised_where_they_are_computed(dtype: torch.dtype) -> None:
    """Attention and quantisation are one node, with its literals, and the quantised heads are what is put in rows."""
    model = Attending().eval()
    found = compiled(model, dtype)
    assert counts(found) == (1, 1)
    (node,) = (node for node in found.graph.graph.nodes if FORM in str(node.target))
    assert (node.kwargs["scale"], node.kwargs["is_causal"]) == (0.4, True)
    for size in (1, 2, 9):
        x = drawn(size, dtype)
        ours, theirs = found(x)[0], model(x)[0]
        assert (ours.shape, ours.dtype, ours.stride()) == (
            theirs.shape,
            torch.float8_e4m3fn,
            theirs.stride(),
        )
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=2**-8)


def test_heads_of_a_single_token_are_quantised() -> None:
    """Heads of one token lie in a row already, with another stride of the token, which leads nowhere."""
    model, settings = Attending().eval(), CompilationConfig(level=1)
    found = opgraft.compile(model, settings, args=(drawn(3, tokens=1),))
    assert counts(found) == (1, 1)
    for size in (1, 3):
        x = drawn(size, tokens=1)
        torch.testing.assert_close(found(x)[0].float(), model(x)[0].float(), rtol=0.13, atol=2**-8)


@pytest.mark.parametrize("settings", [{"group_shape": (-1, 1)}, {"read": True}])
def test_what_cannot_be_joined_stays_apart(settings: dict[str, Any]) -> None:
    """Scales of columns go with the rows that heads become; attention that others read is computed once."""
    model = Attending(**settings).eval()
    found = compiled(model)
    assert counts(found) == (0, 0)
    x = drawn(4)
    torch.testing.assert_close(found(x)[0].float(), model(x)[0].float(), rtol=0.13, atol=2**-8)


@pytest.mark.parametrize(
    "names", [("scaled_dot_product_attention",), ("scaled_dot_product_attention", FORM)]
)
def test_a_kernel_for_attention_is_not_passed_over(names: tuple[str, ...]) -> None:
    """Where somebody provides a kernel for attention alone it runs; one for the joined form runs in its place."""
    provide(ScaledDotProductAttention, *names)
    found = compiled(Attending().eval())
    assert counts(found) == (1, len(names) - 1)
    CALLS.clear()
    found(drawn(2))
    assert [names[-1]] == CALLS
