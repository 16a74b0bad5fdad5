"""What ``torch.compile`` makes of the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import ops
from opgraft.functional import conv2d, fused_experts, linear, quant_fp8_static
from torch import Tensor, nn

WIDTH, HEADS, HEAD_SIZE = 12, 3, 4


class Stack(nn.Module):
    """Twelve ops, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ops.RMSNorm(WIDTH)
        self.rotary = ops.RotaryEmbedding(HEAD_SIZE, 2, 64, 10000.0, True, torch.float32)
        self.attention = ops.MMEncoderAttention(HEADS, HEAD_SIZE)
        self.causal = ops.ScaledDotProductAttention()
        self.gemma_norm = ops.GemmaRMSNorm(WIDTH)
        self.up = ops.Linear(WIDTH, 8 * WIDTH)
        self.swiglu = ops.SiluAndMul()
        self.geglu = ops.GeluAndMul("tanh")
        self.activations = nn.ModuleList([ops.NewGELU(), ops.FastGELU(), ops.QuickGELU()])
        self.layer_norm = ops.LayerNorm(2 * WIDTH)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        query, key = self.rotary(positions, self.norm(x), x)
        x = self.attention(query, key, x)
        heads = x.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
        x = self.causal(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        x, residual = self.gemma_norm(x, query)
        x = self.geglu(self.swiglu(self.up(x + residual)))
        for activation in self.activations:
            x = activation(x)
        return self.layer_norm(x)  # type: ignore[no-any-return]  # a module call is untyped


def test_one_graph_for_all_batch_sizes() -> None:
    """A stack of twelve ops compiles whole, once, for ten batch sizes, checks of arguments included."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    stack = Stack()
    assert sum(isinstance(module, ops.CustomOp) for module in stack.modules()) == 12
    compiled = torch.compile(stack, backend=backend, fullgraph=True, dynamic=True)
    for batch in range(2, 12):
        positions, x = torch.randint(0, 64, (batch, 5)), torch.randn(batch, 5, WIDTH)
        torch.testing.assert_close(compiled(positions, x), stack(positions, x))
    assert len(graphs) == 1


def test_tables_are_read_after_a_change_of_a_dictionary() -> None:
    """Traced code may change a dictionary before a native definition, as transformers' models do."""
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    image, kernel = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    experts = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
    chosen = torch.rand(2, 2), torch.tensor([[0, 1], [2, 0]])

    def run(noted: dict[str, Tensor]) -> tuple[Tensor, ...]:
        noted["x"] = x
        return (
            linear.native(x, weight, activation="gelu_tanh"),
            conv2d.native(image, kernel),
            fused_experts.native(x, *experts, *chosen),
            quant_fp8_static.native(x, torch.tensor([0.1]), (-1, -1)).float(),
        )

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled({}), run({}))


def test_checks_hold_in_compiled_code() -> None:
    """A wrong shape raises the op's error in compiled code too."""
    compiled = torch.compile(ops.SiluAndMul(), backend="eager", dynamic=True)
    assert compiled(torch.zeros(2, 4)).shape == (2, 2)
    with pytest.raises(ValueError, match=r"silu_and_mul: x has shape \(2, 5\)"):
        compiled(torch.zeros(2, 5))
