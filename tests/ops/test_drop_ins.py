"""Ops that stand in for a module of torch or an activation of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.fx
from opgraft import ops
from torch import nn
from torch.nn import functional as F

TWINS = [
    (ops.LayerNorm, nn.LayerNorm, ((9,), 1e-3)),
    (ops.LayerNorm, nn.LayerNorm, (9, 1e-3, False)),
    (ops.LayerNorm, nn.LayerNorm, ([3, 9], 1e-3, True, False)),
    (ops.Linear, nn.Linear, (9, 4)),
    (ops.Linear, nn.Linear, (9, 4, False)),
    (ops.GELU, nn.GELU, ()),
    (ops.GELU, nn.GELU, ("tanh",)),
    (ops.SiLU, nn.SiLU, ()),
    (ops.SiLU, nn.SiLU, (True,)),
]
twins = pytest.mark.parametrize(("op_class", "module_class", "arguments"), TWINS)


@twins
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits_of_torch(
    op_class: Any, module_class: Any, arguments: Any, dtype: torch.dtype
) -> None:
    """With the module's state the op computes the same bits, writes in place where asked, and prints the same."""
    module = module_class(*arguments).to(dtype)
    op = op_class(*arguments).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    op.load_state_dict(module.state_dict())
    x = torch.randn(5, 3, 9).to(dtype)
    seen, expected = x.clone(), x.clone()
    assert torch.equal(op(seen), module(expected))
    assert torch.equal(seen, expected)
    assert isinstance(op, module_class)
    assert repr(op) == repr(module)


@twins
def test_symbolic_tracing(op_class: Any, module_class: Any, arguments: Any) -> None:
    """``torch.fx`` traces a model of the op, as it does one of the module, into what computes the same."""
    model = nn.Sequential(op_class(*arguments))
    x = torch.randn(5, 3, 9)
    assert torch.equal(torch.fx.symbolic_trace(model)(x.clone()), model(x.clone()))


@pytest.mark.parametrize(
    ("op_class", "module_class"), sorted({pair[:2] for pair in TWINS}, key=str)
)
def test_constructor_of_torch(op_class: Any, module_class: Any) -> None:
    """The constructor takes torch's parameters under their names, in their order, with their defaults.

    What it takes besides has a default and goes by keyword.
    """

    def parameters(cls: Any) -> list[inspect.Parameter]:
        return list(inspect.signature(cls.__init__).parameters.values())

    theirs = [(p.name, p.kind, p.default) for p in parameters(module_class)]
    ours = [(p.name, p.kind, p.default) for p in parameters(op_class)]
    assert ours[: len(theirs)] == theirs
    assert all(
        kind is inspect.Parameter.KEYWORD_ONLY and default is not inspect.Parameter.empty
        for _, kind, default in ours[len(theirs) :]
    )


@pytest.mark.parametrize("op_class", [ops.LayerNorm, ops.Linear])
def test_device_and_dtype(op_class: Any) -> None:
    """Parameters are made where and in what dtype the constructor is told."""
    sizes = (4, 4) if op_class is ops.Linear else (4,)
    op = op_class(*sizes, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in op.parameters()} == {("meta", torch.float16)}


def test_a_sharded_linear() -> None:
    """Where tensor parallelism has left half of the weight's columns, half of the features are accepted."""
    op = ops.Linear(8, 3)
    op.weight = nn.Parameter(op.weight.detach()[:, :4])
    x = torch.randn(2, 4)
    assert torch.equal(op(x), F.linear(x, op.weight, op.bias))


@pytest.mark.parametrize(
    ("op_class", "activation"),
    [
        (ops.NewGELU, "gelu_new"),
        (ops.FastGELU, "gelu_fast"),
        (ops.QuickGELU, "quick_gelu"),
        (ops.GELU, "gelu"),
    ],
)
def test_bits_of_transformers(op_class: Any, activation: str) -> None:
    """In float32 the activation of that name in transformers gives the same bits."""
    activations = pytest.importorskip("transformers.activations")
    x = 4 * torch.randn(7, 769)
    assert torch.equal(op_class()(x), activations.ACT2FN[activation](x))


@pytest.mark.parametrize("op_class", [ops.NewGELU, ops.FastGELU, ops.QuickGELU])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_once(op_class: Any, dtype: torch.dtype) -> None:
    """Half types give the float32 result, rounded; no intermediate overflows or loses bits."""
    x = (100 * torch.randn(7, 83)).to(dtype)
    assert torch.equal(op_class()(x), op_class()(x.float()).to(dtype))
    ends = torch.tensor([-6e4, 6e4], dtype=dtype)
    torch.testing.assert_close(op_class()(ends), F.relu(ends))


def test_gated_native_is_a_static_method() -> None:
    """``SiluAndMul.forward_native`` is called on the class and on instances alike."""
    x = torch.randn(3, 8)
    op = ops.SiluAndMul(compile_native=False)
    assert torch.equal(ops.SiluAndMul.forward_native(x), op(x))
    assert torch.equal(op.forward_native(x), op(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_clipped_gate_with_a_scale_and_a_shift(dtype: torch.dtype) -> None:
    """With alpha 1.702 and beta 1 the clipped gate is that of gpt-oss, whose gates and ups alternate."""
    x = (10 * torch.randn(5, 8)).to(dtype)
    op = ops.SiluAndMulWithClamp(7.0, 1.702, 1.0)
    alternating = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(op(x), ops.SwigluOAIAndMul()(alternating))
    assert repr(op) == "SiluAndMulWithClamp(swiglu_limit=7.0, alpha=1.702, beta=1.0)"
