"""Lowering: what the nodes of a form become under a backend, and what compilers may look into."""

from __future__ import annotations

from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, FunctionalKernels, functional
from opgraft.config import ShadowConfig
from opgraft.ops import RMSNorm
from opgraft.ops.linear import packed as packed_linear
from support.blocks import Block
from support.packing import DTYPES, needs_onednn, use_tables
from torch import Tensor, fx, nn


def targets(graph: fx.GraphModule) -> str:
    return " ".join(str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("watched", [False, True])
def test_what_a_kernel_lets_compilers_trace(
    block: Block, x: Tensor, counting: list[Any], watched: bool
) -> None:
    """It stands in the graph of the backend as the operators that it consists of, and the kernel still has the call of
    the op; where calls are compared with the definition, the kernel is one node that is."""
    calls: list[Any] = []

    def rms_norm(x: Tensor, *others: Any, **settings: Any) -> Tensor:
        calls.append(x.shape)
        return functional.rms_norm.native(x, *others, **settings)

    def traced(x: Tensor, *others: Any, **settings: Any) -> Tensor:
        return functional.rms_norm.native(x, *others, **settings).neg().neg()

    class Own(RMSNorm):
        functional_oot = FunctionalKernels({"rms_norm": rms_norm}, compiled={"rms_norm": traced})

    RMSNorm.register_oot(Own)
    config = opgraft.OpgraftConfig(shadow=ShadowConfig(share=float(watched)))
    settings = CompilationConfig(level=1, backend="counting", pass_config={"add_rms_norm": False})
    model = Block().eval().requires_grad_(False)
    with opgraft.set_config(config):
        compiled = opgraft.compile(model, settings, args=(x,))
        calls.clear()
        compiled(x)
    (graph,) = counting
    assert (len(calls), "rms_norm_of_" in targets(graph)) == ((2, True) if watched else (0, False))
    model.first(x)
    assert calls
    (part,) = (part for part in compiled.decision.parts if part.subject == "lowering of rms_norm")
    assert part.chosen.endswith("Own.forward_oot")


class Map(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear.compiled(x, self.weight)


@needs_onednn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rows", "opaque"),
    [(64, None, True), (63, None, False), (64, 1, False), (64, 2, True), (64, 9, False)],
)
def test_a_linear_layer_that_no_kernel_is_for_is_inlined(
    dtype: torch.dtype, size: int, rows: int | None, opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size of its weight, and in code for one number of rows by that; other layers are one operator."""
    use_tables(
        monkeypatch,
        {name: {dtype: (packed_linear.RowRange(64, 2, 8),)} for name in packed_linear.PACKED},
        {},
    )
    model, x = Map(size, 1).to(dtype), torch.randn(rows or 5, 1).to(dtype)
    shapes = None if rows else ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    assert ("packed_linear" in targets(program.graph_module)) == opaque
    torch.testing.assert_close(program.module()(x), model(x))
