"""Linear layers without their plain weights: what they compute, what they hold, and how they become plain again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft.compat import packed_linear as onednn
from opgraft.errors import PackError
from opgraft.kernels import packed_only
from opgraft.ops import Linear
from opgraft.packing.layer import PackedLinear
from ops.packing import DTYPES, REFERENCES, Calls, check, each_dtype, make, needs_onednn, record_calls
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

pytestmark = needs_onednn

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Every plain weight that was rebuilt."""
    made: list[Tensor] = []
    real = onednn.unpack
    monkeypatch.setattr(onednn, "unpack", lambda packed: made.append(real(packed)) or made[-1])
    yield made


def packed(size: int = 13, out: int = 7, **options: Any) -> tuple[Any, nn.Linear]:
    """A packed layer, and a plain one of torch with the same values."""
    op = make(size, out, **options).eval()
    plain = copy.deepcopy(op)
    assert [row.path for row in opgraft.pack(op).packed] == [""]
    return op, plain


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(BITS[one.dtype]), other.view(BITS[other.dtype]))


@each_dtype
def test_there_and_back(dtype: torch.dtype) -> None:
    """Every bit comes back, NaN, infinities and zeros with a sign too, with all else of the layer as it was."""
    op = make(301, 67, dtype=dtype).eval()
    op.weight.view(-1)[:4] = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf])
    op.weight.requires_grad_(True)
    op.weight.mark = "kept"  # type: ignore[attr-defined]
    before, cls, bias = op.weight.detach().clone(), type(op), op.bias
    opgraft.pack(op)
    assert type(op) is not cls
    assert op.op_class is PackedLinear
    assert isinstance(op, Linear)
    assert [name for name, _ in op.named_parameters()] == ["bias"]
    assert same_bits(op.weight, before)
    opgraft.unpack(op)
    assert type(op) is cls
    assert [name for name, _ in op.named_parameters()] == ["weight", "bias"]
    assert op.bias is bias
    assert (type(op.weight), op.weight.requires_grad, op.weight.mark) == (nn.Parameter, True, "kept")
    assert same_bits(op.weight, before)
    assert "_packed" not in vars(op)


def test_the_memory_is_free() -> None:
    """The plain weight is gone once packed, what a former call kept beside it too, and the packed one once unpacked."""
    op, x = make().eval(), torch.randn(3, 13)
    op(x)
    plain, parameter = weakref.ref(op.weight.untyped_storage()), weakref.ref(op.weight)
    opgraft.pack(op)
    op(x)
    assert plain() is None
    assert parameter() is None
    held = weakref.ref(op._packed)
    opgraft.unpack(op)
    assert held() is None


def test_packed_weights_go_with_their_layers() -> None:
    """What lets compiled code find a weight does not keep it alive."""
    op, _ = packed()
    number = int(op._packed.handle)
    assert number in packed_only._BY_NUMBER
    del op
    gc.collect()
    assert number not in packed_only._BY_NUMBER
    with pytest.raises(PackError, match="called with a packed weight that is gone"):
        torch.ops.opgraft.packed_only_linear(torch.randn(3, 13), torch.tensor(number), 7, None, "none", None)


@each_dtype
@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("bias", [True, False])
def test_values(calls: Calls, rebuilt: list[Tensor], dtype: torch.dtype, activation: str, bias: bool) -> None:
    """For any number of rows the result is that of the path that keeps the plain weight, bit by bit."""
    op, plain = packed(dtype=dtype, activation=activation, bias=bias)
    calls.clear()
    for shape in [(13,), (1, 13), (83, 13), (2, 3, 13)]:
        x, residual = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 7).to(dtype)
        for arguments in [(x,), (x, residual)]:
            y = op(*arguments)
            check(y, x, plain, activation, *arguments[1:])
            assert same_bits(y, plain(*arguments))
    assert calls.count("pack") == 1
    assert rebuilt == []


def test_few_rows_run_packed(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plain linear would win, the packed one runs all the same."""
    rows = opgraft.kernels.packed_linear.Pays(1, 1000)
    monkeypatch.setattr("opgraft.kernels.packed_linear._table", lambda platform: dict.fromkeys(DTYPES, (rows,)))
    op, _ = packed()
    calls.clear()
    op(torch.randn(1, 13))
    assert calls == ["packed_linear"]


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
    "torch.func.functional_call": lambda op, x: torch.func.functional_call(op, {"bias": op.bias * 2}, (x,)),
    "forward-mode differentiation": _forward_mode,
    "a FLOP counter": _with_a_counter,
    "oneDNN switched off": _without_onednn,
    "no rows": lambda op, x: op(x[:0]),
    "a parameter as input": lambda op, x: op(nn.Parameter(x, requires_grad=False)),
    "torch.fx": lambda op, x: torch.fx.symbolic_trace(nn.Sequential(op))(x),
    "make_fx": lambda op, x: torch.fx.experimental.proxy_tensor.make_fx(op)(x)(x),
    "torch.jit.trace": lambda op, x: torch.jit.trace(op, (x,))(x),
    "the native definition": lambda op, x: op.forward_native(x),
    "reading the weight": lambda op, x: F.linear(x, op.weight, op.bias),
}


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:TF32 acceleration", "ignore::torch.jit.TracerWarning")
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
    assert calls.count("packed_linear") == 6


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
            lambda x, layer=layer: layer(x) + layer.weight.sum(), backend="aot_eager", fullgraph=True
        )
        found += torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(*found)


@each_dtype
def test_the_operators_keep_their_promises(dtype: torch.dtype) -> None:
    """torch's own checks of registered operators find nothing: schema, fake rules, dynamic shapes."""
    op, _ = packed(dtype=dtype)
    handle = op._packed.handle
    arguments = (torch.randn(5, 13).to(dtype), handle, 7, op.bias, "gelu", torch.randn(5, 7).to(dtype))
    torch.library.opcheck(torch.ops.opgraft.packed_only_linear.default, arguments)
    torch.library.opcheck(torch.ops.opgraft.dense_weight.default, (handle, 7, 13, dtype))


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict: bool) -> None:
    """torch.export fails with the call that helps, and works after it."""
    op, x = packed()[0], torch.randn(3, 13)
    with pytest.raises(Exception, match=r"call opgraft\.unpack\(model\) first"):
        torch.export.export(op, (x,), strict=strict)
    opgraft.unpack(op)
    check(torch.export.export(op, (x,), strict=strict).module()(x), x, op)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda op, x: op(x[:, :12]), r"linear: x has shape \(3, 12\), expected a last dimension of 13"),
        (lambda op, x: op(x.double()), r"linear: weight is torch.float32, expected torch.float64 as x"),
        (lambda op, x: op(x, torch.randn(7)), r"linear: residual has shape \(7,\), expected that of the result"),
        (lambda op, x: op(x.to("meta")), r"linear: weight is on cpu"),
    ],
)
def test_bad_arguments(change: Callable[..., object], message: str) -> None:
    """What does not fit is refused as by the plain layer, in compiled code too."""
    x = torch.randn(3, 13)
    for op in packed():
        with pytest.raises(ValueError, match=message):
            change(op, x)


def test_files_and_copies() -> None:
    """A state_dict has the keys and bits of the plain layer; copies and files are packed with weights of their own."""
    op, plain = packed()
    states = op.state_dict(), plain.state_dict()
    assert [list(state) for state in states] == [["weight", "bias"]] * 2
    assert all(same_bits(states[0][name], states[1][name]) for name in states[1])
    assert not any(isinstance(value, nn.Parameter) for value in states[0].values())
    assert isinstance(op.state_dict(keep_vars=True)["weight"], nn.Parameter)
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(op),
        copy.copy(op),
        pickle.loads(pickle.dumps(op)),  # noqa: S301  # our own bytes
        torch.load(file, weights_only=False),
    ):
        assert copied._packed is not op._packed
        assert "weight" not in copied._parameters
        assert same_bits(copied.weight, plain.weight)
        opgraft.unpack(copied)
        assert type(copied) is type(plain)
        assert same_bits(copied.weight, plain.weight)
    assert "weight" not in op._parameters


@pytest.mark.parametrize("assign", [False, True])
def test_loading(assign: bool) -> None:
    """What is loaded is packed; missing, unexpected and misshapen entries are reported as by the plain layer."""
    op, plain = packed()
    given = make()
    op.load_state_dict(given.state_dict(), assign=assign)
    assert same_bits(op.weight, given.weight)
    assert "weight" not in op._parameters
    for state in (
        {"bias": given.bias},
        {**given.state_dict(), "other": given.bias},
        {"weight": torch.randn(2, 2), "bias": given.bias},
    ):
        messages = []
        for layer in (op, plain):
            with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict") as error:
                layer.load_state_dict(state, assign=assign)
            messages.append(str(error.value).partition("\n")[2])
        assert messages[0] == messages[1]
    assert op.load_state_dict({}, strict=False).missing_keys == ["weight", "bias"]
    assert same_bits(op.weight, given.weight)


def test_moves() -> None:
    """What cannot be packed is a parameter, and is packed again when it can be; values round as a plain layer's do."""
    op, plain = packed()
    for dtype in [torch.float16, torch.float32, torch.float64, *DTYPES, torch.float32]:
        op.to(dtype)
        plain.to(dtype)
        x = torch.randn(3, 13).to(dtype)
        assert ("weight" in op._parameters) == (dtype not in DTYPES)
        assert list(op.state_dict()) == list(plain.state_dict())
        assert same_bits(op.weight, plain.weight)
        torch.testing.assert_close(op(x), plain(x))
    op.to("meta")
    assert op.weight.is_meta
    op.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert "weight" not in op._parameters
    assert same_bits(op.weight, plain.weight)
    op.double()
    opgraft.unpack(op)
    assert type(op) is type(plain)
    assert op.weight.dtype == torch.float64


def test_nothing_is_lost_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a conversion, or oneDNN, raises in the middle, the layer has the weight that it had."""
    op, plain = packed()

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        op._apply(fail)
    assert same_bits(op.weight, plain.weight)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(onednn, "pack", fail)
        op.float()
    assert same_bits(op.weight, plain.weight)
    assert same_bits(op(x := torch.randn(3, 13)), plain(x))


def test_assigning() -> None:
    """A parameter that is assigned is packed; what is none is refused as by the plain layer, and nothing is lost."""
    op, given = packed()[0], nn.Parameter(torch.randn(7, 13))
    op.weight = given
    assert "weight" not in op._parameters
    assert same_bits(op.weight, given)
    with pytest.raises(TypeError, match=r"cannot assign 'torch\.FloatTensor' as parameter 'weight'"):
        op.weight = torch.randn(7, 13)
    assert same_bits(op.weight, given)
    opgraft.unpack(op)
    assert op.weight.requires_grad
