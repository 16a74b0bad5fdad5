"""Attention that calls torch's function itself: by an op of the instance, where somebody provides a kernel."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opgraft import graft, ungraft
from opgraft.ops import CustomOp, ScaledDotProductAttention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it

SHAPES: list[tuple[int, ...]] = []


class FastAttention(ScaledDotProductAttention):
    """A kernel that notes the shapes it is called with."""

    def forward_oot(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            SHAPES.append(tuple(query.shape))
        return self.forward_native(query, *args, **kwargs)


@pytest.fixture
def attended() -> list[tuple[int, ...]]:
    """What the kernel was called with."""
    CustomOp.register_oot(FastAttention, name="ScaledDotProductAttention")
    SHAPES.clear()
    return SHAPES


class Attention(nn.Module):
    """Attention as timm's vision transformers have it."""

    def __init__(self, dim: int = 32, num_heads: int = 4, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, True
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, dropout_p=self.attn_drop.p if self.training else 0.0
            )
        else:
            x = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        out: Tensor = self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, c)))
        return out


class ByName(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        out: Tensor = self.proj(
            scaled_dot_product_attention(q, k, v, attn_mask).transpose(1, 2).flatten(2)
        )
        return out


class OfThreeDimensions(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.proj(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
        return out


class ThroughTorch(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.proj(
            torch.nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))
        )
        return out


class Choosing(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out: Tensor = self.proj(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
        return out


def build(cls: type[Attention] = Attention) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), cls(), nn.LayerNorm(32), cls()).eval()


@pytest.mark.parametrize("cls", [Attention, ByName])
def test_the_op_stands_where_the_forward_finds_the_function(
    cls: type[Attention], attended: list[Any]
) -> None:
    """Results and gradients agree, with a mask too; ungraft is exact, and other instances notice nothing."""
    model, other, x = build(cls), build(cls), torch.randn(2, 5, 32)
    expected, mask = model(x), torch.rand(5, 5) > 0.3
    masked = model[1](x, mask)
    gradients = torch.autograd.grad(model(x).sin().sum(), [*model.parameters()])
    rows = [row for row in graft(model).replaced if row.op == "scaled_dot_product_attention"]
    assert [(row.path, row.source) for row in rows] == [("1", cls.__name__), ("3", cls.__name__)]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model[1](x, mask), masked)
    torch.testing.assert_close(
        torch.autograd.grad(model(x).sin().sum(), [*model.parameters()]), gradients
    )
    assert attended == [(2, 4, 5, 8)] * 5
    assert model.state_dict().keys() == other.state_dict().keys()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # our own bytes
        torch.testing.assert_close(copied(x), expected)
    assert len(attended) == 9
    other(x)
    ungraft(model)
    assert len(attended) == 9
    assert type(model[1]) is cls
    assert torch.equal(model(x), expected)
    assert F.scaled_dot_product_attention is scaled_dot_product_attention


def test_compiled(attended: list[Any]) -> None:
    """A compiler sees through the exchange, without a break."""
    model, x = build(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
        graft(model)
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)


def test_other_dimensions_go_to_torch(attended: list[Any]) -> None:
    """The op was made for heads; what has none is computed as before."""
    model, x = build(OfThreeDimensions), torch.randn(2, 5, 32)
    expected = model(x)
    assert (
        len([row for row in graft(model).replaced if row.op == "scaled_dot_product_attention"]) == 2
    )
    assert torch.equal(model[1](x), build(OfThreeDimensions)[1](x))
    torch.testing.assert_close(model(x), expected)
    assert attended == []


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (
            ThroughTorch,
            "its file has no name of its own for scaled_dot_product_attention or torch.nn.functional",
        ),
        (Choosing, "it chooses among torch's kernels by sdpa_kernel"),
    ],
)
def test_what_is_not_plain_stays(cls: type[Attention], reason: str, attended: list[Any]) -> None:
    """Where the function is reached otherwise, or a kernel of torch's is asked for, the module keeps its forward."""
    model = build(cls)
    report = graft(model)
    assert {row.reason for row in report.left_alone if row.source == cls.__name__} == {reason}
    assert type(model[1]) is cls


def test_without_a_kernel_the_function_stays() -> None:
    """An op that only called torch's function would be no faster."""
    model = build()
    reasons = {row.reason for row in graft(model).left_alone if row.source == "Attention"}
    assert reasons == {
        "here scaled_dot_product_attention is its native definition, which is no faster"
    }
    assert type(model[1]) is Attention


def test_a_family_of_transformers_that_uses_no_registry(attended: list[Any]) -> None:
    """The pooling head of AIMv2 calls torch's function itself."""
    pytest.importorskip("transformers")
    from transformers.models.aimv2.modeling_aimv2 import (
        Aimv2AttentionPoolingHead,
        Aimv2VisionConfig,
    )

    torch.manual_seed(0)
    head = Aimv2AttentionPoolingHead(
        Aimv2VisionConfig(hidden_size=32, num_attention_heads=4)
    ).eval()
    model, x = nn.Sequential(head), torch.randn(2, 5, 32)
    expected = model(x)
    assert "scaled_dot_product_attention" in [row.op for row in graft(model).replaced]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert len(attended) == 1
    ungraft(model)
    assert torch.equal(model(x), expected)
