"""When the linear layer packs: where it pays, and where nothing needs to see through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft.compat import packed_linear as onednn
from opgraft.ops import GatedMLP, Linear
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.functional import linear
from support.packing import (
    DTYPES,
    Calls,
    check,
    each_dtype,
    make,
    needs_onednn,
    packed,
    record_calls,
    use_tables,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

pytestmark = needs_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


def _in_autocast(op: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return op(x)


def _with_a_counter(op: nn.Linear, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        y = op(x)
    assert counter.get_total_flops() == 2 * x.numel() * op.out_features
    return y


def _without_onednn(op: nn.Linear, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return op(x)


def _strided_weight(op: nn.Linear, x: Tensor) -> Tensor:
    op.weight = nn.Parameter(op.weight.repeat(1, 2)[:, :13], requires_grad=False)
    return op(x)


def _computed_weight(op: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.functional_call(op, {"weight": op.weight * 2}, (x,))


def _created_for_inference(op: nn.Linear, x: Tensor) -> Tensor:
    with torch.inference_mode():
        op.weight = nn.Parameter(torch.randn(7, 13), requires_grad=False)
        return op(x).clone()


PLAIN: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "autocast": _in_autocast,
    "torch.func.vmap": lambda op, x: torch.func.vmap(op)(x),
    "torch.func.jvp": lambda op, x: torch.func.jvp(op, (x,), (x,))[1] + op.bias,
    "a FLOP counter": _with_a_counter,
    "oneDNN switched off": _without_onednn,
    "a strided weight": _strided_weight,
    "a parameter as input": lambda op, x: op(nn.Parameter(x, requires_grad=False)),
    "torch.export": lambda op, x: torch.export.export(op, (x,)).module()(x),
    "torch.fx": lambda op, x: torch.fx.symbolic_trace(nn.Sequential(op))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:TF32 acceleration")
@pytest.mark.parametrize("situation", PLAIN)
def test_where_the_plain_linear_runs(calls: Calls, situation: str) -> None:
    """What must see through the op, or oneDNN cannot read, gets torch's linear with its result."""
    op, x = make(), torch.randn(3, 13)
    op(x)
    calls.clear()
    y = PLAIN[situation](op, x)
    reference = F.linear(x, op.weight, op.bias)
    torch.testing.assert_close(
        y, reference.to(y.dtype), atol=2e-2 if y.dtype == torch.bfloat16 else 1e-5, rtol=1e-2
    )
    assert "linear" not in calls


@pytest.mark.parametrize("made", [_computed_weight, _created_for_inference])
def test_weights_that_are_no_frozen_parameters(
    calls: Calls, made: Callable[[nn.Linear, Tensor], Tensor]
) -> None:
    """A weight that is computed for a call, or of which torch counts no writes, is read as it is."""
    op, x = make(), torch.randn(3, 13)
    op(x)
    calls.clear()
    weight = op.weight * 2
    y = made(op, x)
    torch.testing.assert_close(
        y, F.linear(x, weight if made is _computed_weight else op.weight, op.bias)
    )
    assert calls == ["linear"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own import
def test_forward_mode_differentiation(calls: Calls) -> None:
    """Tangents are not dropped."""
    op, x, tangent = make(), torch.randn(3, 13), torch.randn(3, 13)
    op(x)
    with torch.autograd.forward_ad.dual_level():
        y = op(torch.autograd.forward_ad.make_dual(x, tangent))
        found = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert found is not None
    torch.testing.assert_close(found, tangent @ op.weight.t())


@each_dtype
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_compilation(calls: Calls, dtype: torch.dtype, mode: Callable[[], Any]) -> None:
    """One graph serves every number of rows, sees a changed weight, and packs while it runs."""
    op = make(dtype=dtype, activation="silu")
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with mode():
        compiled = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
        for rows in (3, 8, 5):
            x, residual = torch.randn(rows, 13).to(dtype), torch.randn(rows, 7).to(dtype)
            check(compiled(x, residual), x, op, "silu", residual)
            with torch.no_grad():
                op.weight.mul_(-1.5)
    assert len(graphs) == 1
    assert calls.count("linear") == calls.count("pack") == 3


def test_compiled_training(calls: Calls) -> None:
    """Compiled code that requires gradients has those of the definition."""
    op, x = Linear(13, 7), torch.randn(3, 13)
    y = torch.compile(op, backend="aot_eager", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), op.weight)
    (reference,) = torch.autograd.grad(F.linear(x, op.weight, op.bias).square().sum(), op.weight)
    torch.testing.assert_close(gradient, reference)
    assert calls == []


@each_dtype
def test_the_operator_keeps_its_promises(calls: Calls, dtype: torch.dtype) -> None:
    """torch's own checks of a registered operator find nothing: schema, fake rule, dynamic shapes."""
    op = make(dtype=dtype)
    arguments = (
        torch.randn(5, 13).to(dtype),
        op.weight,
        op.bias,
        "gelu",
        torch.randn(5, 7).to(dtype),
    )
    torch.library.opcheck(torch.ops.opgraft.packed_linear.default, arguments)


FP16 = ("avx2", "avx512_bf16", "avx512_fp16", "amx_tile")
BF16 = ("avx2", "avx512_bf16")


@pytest.mark.parametrize(
    ("features", "shape", "dtype", "activation", "rows"),
    [
        (FP16, (1024, 1024), torch.float32, "none", (4, 256)),
        (FP16, (1024, 1024), torch.float32, "silu", (4, 2048)),
        (FP16, (4096, 2048), torch.float32, "silu", (4, 256)),
        (FP16, (512, 512), torch.float32, "none", (16, 256)),
        (FP16, (384, 384), torch.float32, "none", None),
        (BF16, (1024, 1024), torch.float32, "none", (1, 2048)),
        (BF16, (384, 384), torch.float32, "none", (16, 2048)),
        (BF16, (128, 128), torch.float32, "none", None),
        (("avx2",), (1024, 1024), torch.float32, "none", (2, 128)),
        (("avx2",), (1024, 1024), torch.float32, "silu", (2, 24)),
        (("avx2",), (4096, 2048), torch.float32, "none", (2, 256)),
        (("avx2",), (4096, 2048), torch.float32, "silu", (2, 24)),
        (("avx2",), (256, 256), torch.float32, "none", None),
        (("asimd", "bf16"), (1024, 1024), torch.float32, "none", None),
        *(
            [(BF16, (128, 128), torch.bfloat16, "none", (1, 2048))]
            if torch.bfloat16 in DTYPES
            else []
        ),
    ],
)
def test_the_table_decides(
    monkeypatch: pytest.MonkeyPatch,
    features: tuple[str, ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
    activation: str,
    rows: tuple[int, int] | None,
) -> None:
    """By instruction set, size, dtype, rows and activation: packed from the first to the last number of rows only.

    A weight that is not frozen is never packed, and read by oneDNN only on the CPUs for which that was measured.
    """
    capability = opgraft.current_platform().capability()
    seen = opgraft.DeviceCapability(capability.name, capability.dtypes, features=features)
    monkeypatch.setattr(type(opgraft.current_platform()), "capability", lambda self, index=0: seen)
    use_tables(monkeypatch, packed_linear.PACKED, packed_linear.DIRECT)
    seen_by_onednn: list[tuple[int, bool]] = []
    real = onednn.linear
    monkeypatch.setattr(
        onednn,
        "linear",
        lambda x, w, *rest: seen_by_onednn.append((len(x), w.is_mkldnn)) or real(x, w, *rest),
    )
    weight = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
    tried = [1, 3, 4, 15, 16, 24, 25, 32, 33, 256, 257, 2048]
    expected = [count for count in tried if rows and rows[0] <= count <= rows[1]]
    direct = expected if features == BF16 and dtype == torch.float32 else []
    for frozen, counts in ((False, direct), (True, expected)):
        seen_by_onednn.clear()
        for count in tried:
            packed_linear.linear(torch.randn(count, shape[1]).to(dtype), weight, None, activation)
        assert seen_by_onednn == [(count, frozen) for count in counts]
        opgraft.freeze(weight)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN or its operators are absent the plain definition is bound, and the decision says why."""
    monkeypatch.setattr(
        onednn, "missing", lambda dtype=torch.float32: "torch was built without oneDNN"
    )
    opgraft.reset()
    op = Linear(13, 7)
    assert op.decision.chosen == "Linear.forward_native"
    assert "packed linear unavailable: torch was built without oneDNN" in str(op.decision)
    x = torch.randn(3, 13)
    assert torch.equal(op(x), F.linear(x, op.weight, op.bias))


def test_the_form_runs_the_kernel(calls: Calls) -> None:
    """``linear`` as a function packs too."""
    op, x = make(), torch.randn(3, 13)
    check(linear(x, op.weight, op.bias, "relu"), x, op, "relu")
    assert calls == ["pack", "linear"]


def test_where_something_else_runs_is_said(calls: Calls) -> None:
    """The decisions of layers that do less for a compiler or an exporter name that, and it is what happens."""
    op, x = make(), torch.randn(3, 13)
    for each in (op, packed()[0]):
        assert "under torch.export and torch.jit.trace torch's own linear runs" in str(
            each.decision
        )
    exported = torch.export.export(op, (x,))
    assert "torch.ops.aten.linear.default" in exported.graph_module.code
    layer = GatedMLP(16, 24).eval()
    assert "while a compiler traces, gate, up and the activation are computed one" in str(
        layer.decision
    )
    calls.clear()
    with torch.no_grad():
        torch.compile(layer, backend="eager")(torch.randn(3, 16))
        assert calls.count("linear") == 3
        layer(torch.randn(3, 16))
        assert calls.count("linear") == 5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's rules, by itself
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_tangents(calls: Calls, whole: bool) -> None:
    """Compiled code keeps the tangents of forward-mode differentiation, for a weight that is held packed only too."""
    op, x, tangent = make().eval(), torch.randn(3, 13), torch.randn(3, 13)
    op.requires_grad_(False)
    expected = F.linear(tangent, op.weight)
    if whole:
        opgraft.freeze(op, keep_plain=False)
    compiled = torch.compile(op, backend="aot_eager")
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent))).tangent
        torch.testing.assert_close(found, expected)
