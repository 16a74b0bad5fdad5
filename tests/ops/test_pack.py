"""Linear layers without their plain weights: what they compute, what they hold, and how they become plain again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft.compat import packed_linear as onednn
from opgraft.errors import PackError
from opgraft.ops import Linear
from opgraft.ops.freezing import PackedLinear
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.packed import PACKED, RowRange
from support.packing import (
    DTYPES,
    REFERENCES,
    Calls,
    check,
    each_dtype,
    make,
    needs_onednn,
    packed,
    record_calls,
    same_bits,
    use_tables,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every plain weight that was rebuilt."""
    made: list[Tensor] = []
    real = onednn.unpack
    monkeypatch.setattr(onednn, "unpack", lambda packed: made.append(real(packed)) or made[-1])
    return made


@each_dtype
def test_there_and_back(dtype: torch.dtype) -> None:
    """Every bit comes back, NaN, infinities and zeros with a sign too, with all else of the layer as it was."""
    op = make(301, 67, dtype=dtype).eval()
    op.weight.view(-1)[:4] = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf])
    op.weight.requires_grad_(True)
    op.weight.mark = "kept"  # type: ignore[attr-defined]
    before, cls, bias = op.weight.detach().clone(), type(op), op.bias
    opgraft.freeze(op, keep_plain=False)
    assert type(op) is not cls
    assert op.op_class is PackedLinear
    assert isinstance(op, Linear)
    assert [name for name, _ in op.named_parameters()] == ["bias"]
    assert same_bits(op.weight, before)
    opgraft.thaw(op)
    assert type(op) is cls
    assert [name for name, _ in op.named_parameters()] == ["weight", "bias"]
    assert op.bias is bias
    assert (type(op.weight), op.weight.requires_grad, op.weight.mark) == (
        nn.Parameter,
        True,
        "kept",
    )
    assert same_bits(op.weight, before)
    assert "_packed" not in vars(op)


def test_the_memory_is_free() -> None:
    """The plain weight is gone once packed, what a former call kept beside it too, and the packed one once unpacked."""
    op, x = make().eval(), torch.randn(3, 13)
    op(x)
    plain, parameter = weakref.ref(op.weight.untyped_storage()), weakref.ref(op.weight)
    opgraft.freeze(op, keep_plain=False)
    op(x)
    assert plain() is None
    assert parameter() is None
    held = weakref.ref(op._packed)
    opgraft.thaw(op)
    assert held() is None


def test_packed_weights_go_with_their_layers() -> None:
    """What lets compiled code find a weight does not keep it alive."""
    op, _ = packed()
    number = int(op._packed.handle)
    assert number in packed_linear._BY_NUMBER
    del op
    gc.collect()
    assert number not in packed_linear._BY_NUMBER
    with pytest.raises(PackError, match="called with a packed weight that is gone"):
        torch.ops.opgraft.packed_only_linear(
            torch.randn(3, 13), torch.tensor(number), 7, None, "none", None
        )


@each_dtype
@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("bias", [True, False])
def test_values(
    calls: Calls, rebuilt: list[Tensor], dtype: torch.dtype, activation: str, bias: bool
) -> None:
    """For any number of rows the result is that of the path that keeps the plain weight, bit by bit."""
    op, plain = packed(dtype=dtype, activation=activation, bias=bias)
    calls.clear()
    for shape in [(13,), (1, 13), (83, 13), (2, 3, 13), (0, 13), (2, 0, 13)]:
        x, residual = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 7).to(dtype)
        for arguments in [(x,), (x, residual)]:
            y = op(*arguments)
            check(y, x, plain, activation, *arguments[1:])
            assert same_bits(y, plain(*arguments))
    assert calls.count("pack") == 1
    assert rebuilt == []


def test_few_rows_run_packed(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plain linear would win, the packed one runs all the same."""
    rows = dict.fromkeys(DTYPES, (RowRange(1, 1000),))
    use_tables(monkeypatch, dict.fromkeys(PACKED, rows), {})
    op, _ = packed()
    calls.clear()
    op(torch.randn(1, 13))
    assert calls == ["linear"]


@pytest.mark.parametrize("wanted", ["input", "bias", "residual"])
def test_gradients(calls: Calls, wanted: str) -> None:
    """Gradients by all that is not packed are those of the plain layer, and the plain weight is gone afterwards."""
    op, plain = packed(activation="gelu")
    calls.clear()
    found = []
    tensors = {"input": torch.randn(3, 13), "residual": torch.randn(3, 7)}
    for layer in (op, plain):
        wants = layer.bias if wanted == "bias" else tensors[wanted]
        wants.requires_grad_(True)
        y = layer(tensors["input"], tensors["residual"])
        found += torch.autograd.grad(y.square().sum(), wants)
        wants.requires_grad_(False)
    assert same_bits(*found)
    assert calls == []
    assert "weight" not in op._parameters


def _in_autocast(op: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return op(x)


def _with_a_counter(op: nn.Module, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        y = op(x)
    assert counter.get_total_flops() == 2 * 3 * 13 * 7
    return y


def _without_onednn(op: nn.Module, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return op(x)


def _forward_mode(op: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        y = op(torch.autograd.forward_ad.make_dual(x, x + 1))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


PLAIN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autocast": _in_autocast,
    "torch.func.vmap": lambda op, x: torch.func.vmap(op)(x),
    "torch.func.jvp": lambda op, x: torch.func.jvp(op, (x,), (x + 1,))[1],
    "torch.func.grad": lambda op, x: torch.func.grad(lambda x: op(x).square().sum())(x),
    "torch.func.functional_call": lambda op, x: torch.func.functional_call(
        op, {"bias": op.bias * 2}, (x,)
    ),
    "forward-mode differentiation": _forward_mode,
    "a FLOP counter": _with_a_counter,
    "oneDNN switched off": _without_onednn,
    "a parameter as input": lambda op, x: op(nn.Parameter(x, requires_grad=False)),
    "torch.fx": lambda op, x: torch.fx.symbolic_trace(nn.Sequential(op))(x),
    "make_fx": lambda op, x: torch.fx.experimental.proxy_tensor.make_fx(op)(x)(x),
    "torch.jit.trace": lambda op, x: torch.jit.trace(op, (x,))(x),
    "the native definition": lambda op, x: op.forward_native(x),
    "reading the weight": lambda op, x: F.linear(x, op.weight, op.bias),
}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore:TF32 acceleration", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("situation", PLAIN)
def test_where_the_plain_weight_is_rebuilt(situation: str) -> None:
    """What must see through the op gets the result that it has of the plain layer."""
    op, plain = packed()
    x = torch.randn(3, 13)
    torch.testing.assert_close(PLAIN[situation](op, x), PLAIN[situation](plain, x))
    assert "weight" not in op._parameters


@each_dtype
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_compilation(calls: Calls, dtype: torch.dtype, mode: Callable[[], Any]) -> None:
    """One graph without a break serves every number of rows, and other layers of the shape."""
    layers, graphs = [packed(dtype=dtype, activation="silu") for _ in range(3)], []
    calls.clear()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(layer: Any, x: Tensor, residual: Tensor) -> Tensor:
        return layer(x, residual)

    with mode():
        compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
        for (op, plain), rows in zip(layers, (3, 8, 5), strict=True):
            x, residual = torch.randn(rows, 13).to(dtype), torch.randn(rows, 7).to(dtype)
            assert same_bits(compiled(op, x, residual), plain(x, residual))
    assert len(graphs) == 1
    assert calls.count("linear") == 6


def test_a_weight_that_was_loaded_after_compilation() -> None:
    """Compiled code computes with what the layer holds when it runs."""
    op, _ = packed()
    compiled, x = torch.compile(op, backend="aot_eager", fullgraph=True), torch.randn(3, 13)
    for _ in range(2):
        op.load_state_dict(make().state_dict())
        with torch.no_grad():
            check(compiled(x), x, op)


def test_compiled_gradients() -> None:
    """Compiled code rebuilds the weight where a gradient is required, and where code reads it."""
    op, plain = packed()
    x, found = torch.randn(3, 13, requires_grad=True), []
    for layer in (op, plain):
        compiled = torch.compile(
            lambda x, layer=layer: layer(x) + layer.weight.sum(),
            backend="aot_eager",
            fullgraph=True,
        )
        found += torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(*found)


def test_compiled_autocast() -> None:
    """Compiled code under autocast has the results and dtypes of the plain layer."""
    found, x = [], torch.randn(3, 13)
    for layer in packed():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(torch.compile(layer, backend="aot_eager", fullgraph=True)(x))
    assert found[0].dtype == torch.bfloat16
    assert same_bits(*found)


@torch.inference_mode()
def test_in_inference_mode() -> None:
    """Weights that are packed, read and unpacked in inference mode are ordinary outside of it."""
    with torch.inference_mode(False):
        op = make().eval()
        plain = copy.deepcopy(op)
    opgraft.freeze(op, keep_plain=False)
    read = op.weight
    with torch.inference_mode(False):
        x = torch.randn(3, 13, requires_grad=True)
        one, other = (torch.autograd.grad(layer(x).square().sum(), x)[0] for layer in (op, plain))
    opgraft.thaw(op)
    assert torch.equal(one, other)
    assert not read.is_inference()
    assert not op.weight.is_inference()
    assert same_bits(op.weight, plain.weight)


@each_dtype
def test_the_operators_keep_their_promises(dtype: torch.dtype) -> None:
    """torch's own checks of registered operators find nothing: schema, fake rules, dynamic shapes."""
    op, _ = packed(dtype=dtype)
    handle = op._packed.handle
    arguments = (
        torch.randn(5, 13).to(dtype),
        handle,
        7,
        op.bias,
        "gelu",
        torch.randn(5, 7).to(dtype),
    )
    torch.library.opcheck(torch.ops.opgraft.packed_only_linear.default, arguments)
    torch.library.opcheck(torch.ops.opgraft.dense_weight.default, (handle, 7, 13, dtype))


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict: bool) -> None:
    """torch.export fails with the call that helps, and works after it."""
    op, x = packed()[0], torch.randn(3, 13)
    with pytest.raises(Exception, match=r"call opgraft\.thaw\(model\) first"):
        torch.export.export(op, (x,), strict=strict)
    opgraft.thaw(op)
    check(torch.export.export(op, (x,), strict=strict).module()(x), x, op)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda op, x: op(x[:, :12]),
            r"linear: x has shape \(3, 12\), expected a last dimension of 13",
        ),
        (
            lambda op, x: op(x.double()),
            r"linear: weight is torch.float32, expected torch.float64 as x",
        ),
        (
            lambda op, x: op(x, torch.randn(7)),
            r"linear: residual has shape \(7,\), expected that of the result",
        ),
        (lambda op, x: op(x.to("meta")), r"linear: weight is on cpu"),
    ],
)
def test_bad_arguments(change: Callable[..., object], message: str) -> None:
    """What does not fit is refused as by the plain layer."""
    x = torch.randn(3, 13)
    for op in packed():
        with pytest.raises(ValueError, match=message):
            change(op, x)
