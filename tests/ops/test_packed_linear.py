"""The linear layer over packed weights computes what the plain one does, with what the parameters hold now."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import opgraft
import pytest
import torch
from opgraft.ops import GatedMLP, Linear
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear import weight_cache
from opgraft.ops.linear.functional import linear as form
from support.packing import (
    DTYPES,
    REFERENCES,
    TOLERANCES,
    Calls,
    check,
    each_dtype,
    make,
    needs_onednn,
    record_calls,
)
from torch import nn
from torch.nn import functional as F

pytestmark = needs_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


@each_dtype
@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values(
    calls: Calls, dtype: torch.dtype, activation: str, bias: bool, frozen: bool
) -> None:
    """With every activation, with and without bias and residual, the result is that of float64, rounded."""
    op = make(dtype=dtype, activation=activation, bias=bias)
    if not frozen:
        op.weight.data = op.weight.data.clone()
    for shape in [(13,), (1, 13), (83, 13), (2, 3, 13), (2, 1, 3, 13)]:
        x, residual = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 7).to(dtype)
        kept = x.clone(), residual.clone()
        check(op(x), x, op, activation)
        check(op(x, residual), x, op, activation, residual)
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])
    assert calls.count("pack") == frozen
    assert calls.count("linear") + calls.count("linear_add") == 10


@each_dtype
@pytest.mark.parametrize("frozen", [True, False])
def test_strided_inputs(calls: Calls, dtype: torch.dtype, frozen: bool) -> None:
    """Inputs and residuals with gaps, transposed or expanded give what contiguous ones give."""
    op = make(dtype=dtype)
    if not frozen:
        op.weight.data = op.weight.data.clone()
    gaps = torch.full((5, 39), torch.nan).to(dtype)[:, 1::3].copy_(torch.randn(5, 13))
    residual = torch.full((5, 21), torch.nan).to(dtype)[:, ::3].copy_(torch.randn(5, 7))
    for x in (gaps, torch.randn(13, 5).to(dtype).t(), torch.randn(1, 13).to(dtype).expand(5, 13)):
        check(op(x), x, op)
        check(op(x, residual), x, op, residual=residual)
    assert calls.count("linear") == calls.count("linear_add") == 3


BIASES: dict[str, Callable[[], torch.Tensor]] = {
    "with gaps": lambda: torch.randn(14)[::2],
    "expanded": lambda: torch.randn(1).expand(7),
    "a column": lambda: torch.randn(7, 3)[:, 1],
    "from the middle": lambda: torch.randn(9)[2:],
}


@pytest.mark.parametrize("layout", BIASES)
def test_strided_biases(calls: Calls, layout: str) -> None:
    """A bias of any strides is read as it is; oneDNN would take one with gaps for a contiguous one."""
    op, x, residual = make(), torch.randn(3, 13), torch.randn(3, 7)
    op.bias = nn.Parameter(BIASES[layout](), requires_grad=False)
    check(op(x), x, op)
    check(op(x, residual), x, op, residual=residual)
    assert ("linear" in calls) == op.bias.is_contiguous()


@each_dtype
@pytest.mark.parametrize(
    "layout", ["transposed", "expanded rows", "expanded columns", "overlapping"]
)
def test_strided_residuals(calls: Calls, dtype: torch.dtype, layout: str) -> None:
    """Residuals and inputs whose elements are shared or out of order are read as they are, and not written to."""
    op = make(dtype=dtype)

    def lay(rows: int, columns: int) -> torch.Tensor:
        if layout == "overlapping":
            return torch.randn(rows + columns).to(dtype).as_strided((rows, columns), (1, 1))
        shape = {
            "transposed": (columns, rows),
            "expanded rows": (1, columns),
            "expanded columns": (rows, 1),
        }[layout]
        tensor = torch.randn(shape).to(dtype)
        return tensor.t() if layout == "transposed" else tensor.expand(rows, columns)

    x, residual = lay(5, 13), lay(5, 7)
    kept = residual.clone()
    check(op(x, residual), x, op, residual=residual)
    assert torch.equal(residual, kept)
    assert calls == ["pack", "linear_add"]


@each_dtype
@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(
    calls: Calls, dtype: torch.dtype, activation: str, value: float
) -> None:
    """NaN and the infinities come out where, and as, torch's own activation has them."""
    op, x, residual = (
        make(16, dtype=dtype),
        torch.randn(5, 16).to(dtype),
        torch.randn(5, 7).to(dtype),
    )
    op.weight[:, 0] = 1
    x[2] = 0
    x[2, 0] = value
    for added in (None, residual):
        y = packed_linear.linear(x, op.weight, op.bias, activation, added)
        plain = form.native(x, op.weight, op.bias, activation, added)
        torch.testing.assert_close(
            y, plain, equal_nan=True, atol=TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1]
        )
    assert "linear" in calls


@each_dtype
@pytest.mark.parametrize("shape", [(0, 13), (2, 0, 13)])
def test_no_rows(calls: Calls, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """No rows in, no rows out, of the right width."""
    op = make(dtype=dtype)
    op(torch.randn(1, 13).to(dtype))
    assert op(torch.empty(shape, dtype=dtype)).shape == (*shape[:-1], 7)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "an optimizer's step": lambda op: _step(op),
    "load_state_dict": lambda op: op.load_state_dict(
        {"weight": torch.randn(7, 13), "bias": torch.randn(7)}
    ),
    "an assignment to .data": lambda op: setattr(op.weight, "data", torch.randn(7, 13)),
    "two assignments to .data": lambda op: [
        setattr(op.weight, "data", op.weight.data * 2) for _ in range(2)
    ],
    ".bfloat16() and .float()": lambda op: op.bfloat16().float(),
    "nothing, then other memory": lambda op: [
        setattr(op.weight, "data", t) for t in (torch.empty(0), _other(op))
    ],
    "the meta device, then other memory": lambda op: (
        op.to("meta").to_empty(device="cpu").load_state_dict(make().state_dict())
    ),
    "a transposed square": lambda op: setattr(op.weight, "data", op.weight.data.t()),
    "fewer rows of the same memory": lambda op: setattr(op.weight, "data", op.weight.data[:3]),
    "writing in place": lambda op: op.weight.mul_(3),
    ".to() and back": lambda op: op.to(torch.float64).to(torch.float32),
    "a new parameter": lambda op: setattr(
        op, "weight", nn.Parameter(torch.randn(7, 13), requires_grad=False)
    ),
    "refresh of a module after .data.copy_": lambda op: (
        op.weight.data.mul_(3),
        opgraft.refresh(nn.Sequential(op)),
    ),
    "refresh of a tensor after .data.copy_": lambda op: (
        op.weight.data.mul_(3),
        opgraft.refresh(op.weight),
    ),
}


def _other(op: nn.Linear) -> torch.Tensor:
    return torch.randn(op.weight.shape)


def _step(op: nn.Linear) -> None:
    op.requires_grad_(True)
    op(torch.randn(2, op.in_features)).square().sum().backward()
    torch.optim.SGD(op.parameters(), lr=1.0).step()
    op.requires_grad_(False)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_packed_anew(calls: Calls, change: str) -> None:
    """Whatever changes the weight, the next call computes with what it holds now."""
    op = make(13, 13) if "square" in change else make()
    op(torch.randn(3, 13))
    if "fewer" in change:
        op.bias = None
    CHANGES[change](op)
    x = torch.randn(3, 13)
    check(op(x), x, op)


def test_other_memory_at_the_same_address(calls: Calls) -> None:
    """A weight that comes to lie where the packed one lay, as allocators arrange it, is told apart from it."""
    op, x, memory = make(), torch.randn(3, 13), bytearray(7 * 13 * 4)
    for _ in range(3):
        op.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(7, 13)
        torch.frombuffer(memory, dtype=torch.float32).copy_(torch.randn(7 * 13))
        opgraft.freeze(op)
        check(op(x), x, op)
        op.weight.data = torch.empty(7, 13)
    assert calls.count("pack") == 3


def test_a_replaced_weight_is_not_kept(calls: Calls) -> None:
    """The memory that a packed parameter had is free once the parameter has other memory."""
    op = make()
    op(torch.randn(3, 13))
    memory = weakref.ref(op.weight.untyped_storage())
    op.weight.data = torch.randn(7, 13)
    assert memory() is None


def test_writing_through_data_is_what_refresh_is_for(calls: Calls) -> None:
    """After ``freeze``, a write through ``.data`` is what ``refresh`` tells of: without it the old weight computes."""
    op, x = make(), torch.randn(3, 13)
    before = op(x)
    op.weight.data.mul_(3)
    assert torch.equal(op(x), before)
    opgraft.refresh(op)
    check(op(x), x, op)


def test_refresh_reaches_what_shares_memory(calls: Calls) -> None:
    """A parameter over the memory of others is refreshed with them, and other parameters are left alone."""
    op, whole, other, x = make(), make(out=14), make(), torch.randn(3, 13)
    op.weight.data = whole.weight.data[7:]
    for module in (op, whole, other):
        opgraft.freeze(module)
        module(x)
    op.weight.data.mul_(3)
    opgraft.refresh(op)
    check(whole(x), x, whole)
    check(op(x), x, op)
    calls.clear()
    other(x)
    assert calls == ["linear"]
    opgraft.refresh(nn.Linear(2, 2, device="meta"))


def test_a_weight_is_packed_once(calls: Calls) -> None:
    """Further calls and modules that share the parameter use one packed weight."""
    op, other = make(), make()
    other.weight = op.weight
    for module in (op, other, op):
        check(module(x := torch.randn(4, 13)), x, module)
    assert calls.count("pack") == 1


def test_a_weight_is_packed_once_calls_make_up_for_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first calls read the weight as it is, and are as right; a write to it makes them the first ones again."""
    monkeypatch.setattr(packed_linear._COPIES, "after", 2)
    op = make()
    for _ in range(2):
        for packed in (0, 0, 1, 1):
            check(op(x := torch.randn(4, 13)), x, op)
            assert calls.count("pack") == packed
        with torch.no_grad():
            op.weight.mul_(2)
        calls.clear()


def test_packed_weights_go_with_their_parameters(calls: Calls) -> None:
    """When a model is gone, so is all that was kept of it, gate and up of a gated MLP too."""
    gc.collect()  # of what other tests left
    before = {*packed_linear._COPIES}, {*weight_cache._FROZEN}
    model = nn.Sequential(make(), nn.Linear(7, 13), GatedMLP(13, 24).eval())
    opgraft.graft(model)
    model[2].join()
    opgraft.freeze(model)
    model(torch.randn(3, 13))
    kept = {*packed_linear._COPIES} - before[0]
    copies = [weakref.ref(packed_linear._COPIES[place].copy) for place in kept]
    assert len(copies) == 4
    del model
    gc.collect()
    assert [copy() for copy in copies] == [None] * 4
    assert ({*packed_linear._COPIES}, {*weight_cache._FROZEN}) == before


def test_no_copies_of_views(calls: Calls) -> None:
    """Rows of a frozen weight that are taken for one call are read as they are, and leave nothing behind."""
    weight, x, before = (
        nn.Parameter(torch.randn(32, 13)),
        torch.randn(3, 13),
        {*packed_linear._COPIES},
    )
    opgraft.freeze(weight)
    for start in range(8):
        part = weight[start : start + 16]
        torch.testing.assert_close(packed_linear.linear(x, part), F.linear(x, part))
    assert {*packed_linear._COPIES} == before
    assert "pack" not in calls


def test_one_copy_for_parameters_that_follow_each_other(calls: Calls) -> None:
    """Where code puts one parameter after the other over the same memory, the copy of the last one is kept."""
    op, x, before = make(), torch.randn(3, 13), {*packed_linear._COPIES}
    for _ in range(4):
        op.weight = nn.Parameter(op.weight.data, requires_grad=False)
        check(op(x), x, op)
        with torch.no_grad():
            op.weight.mul_(2)
        check(op(x), x, op)
    assert len({*packed_linear._COPIES} - before) == 1


def test_copies_and_files(calls: Calls) -> None:
    """A module whose weight is packed is copied, pickled and saved; the copies compute with weights of their own."""
    op, x = make(), torch.randn(3, 13)
    op(x)
    file = io.BytesIO()
    torch.save(op.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file))
    assert list(op.state_dict()) == ["weight", "bias"]
    for copied in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), loaded):  # noqa: S301  # our own bytes
        assert torch.equal(copied(x), op(x))
        copied.weight.mul_(2)
        check(copied(x), x, copied)
    check(op(x), x, op)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "residual"])
def test_gradients(calls: Calls, wanted: str) -> None:
    """Where any tensor requires a gradient, torch's linear runs and the gradients are those of the definition."""
    op = make()
    tensors = {
        "input": torch.randn(3, 13),
        "weight": op.weight,
        "bias": op.bias,
        "residual": torch.randn(3, 7),
    }
    op(tensors["input"], tensors["residual"])
    calls.clear()
    tensor = tensors[wanted].requires_grad_(True)
    (gradient,) = torch.autograd.grad(
        op(tensors["input"], tensors["residual"]).square().sum(), tensor
    )
    plain = F.linear(tensors["input"], op.weight, op.bias) + tensors["residual"]
    (reference,) = torch.autograd.grad(plain.square().sum(), tensor)
    torch.testing.assert_close(gradient, reference)
    assert calls == []
    with torch.no_grad():
        op(tensors["input"])
    assert calls == ["linear"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(calls: Calls, dtype: torch.dtype) -> None:
    """float16 and float64, which oneDNN does not pack here, give the bits of torch."""
    op, x = make(dtype=dtype), torch.randn(3, 13).to(dtype)
    assert torch.equal(op(x), F.linear(x, op.weight, op.bias))
    assert calls == []


def test_after_a_change_of_dtype(calls: Calls) -> None:
    """A module that was used in one dtype and moved to another is packed in that one, however small the input is."""
    op = make()
    for dtype in [torch.float32, torch.float64, *DTYPES[::-1], torch.float32]:
        x = torch.randn(1, 13).to(dtype)
        opgraft.freeze(op.to(dtype))
        y = op(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, F.linear(x, op.weight, op.bias), atol=2e-2, rtol=1.6e-2)
    assert calls.count("pack") == len(DTYPES) + 2  # the last is a freeze of the same memory


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
            r"linear: residual has shape \(7,\), expected that of the result, \(3, 7\)",
        ),
        (
            lambda op, x: packed_linear.linear(x, op.weight, None, "celu"),
            "linear: activation is 'celu', expected one of",
        ),
        (
            lambda op, x: Linear(3, 3, activation="celu"),
            "linear: activation is 'celu', expected one of",
        ),
        (
            lambda op, x: op(torch.tensor(1.0)),
            r"linear: x has shape \(\), expected a last dimension of 13",
        ),
        (
            lambda op, x: packed_linear.linear(x, op.weight, torch.randn(1)),
            r"linear: bias has shape \(1,\), expected \(7,\)",
        ),
    ],
)
def test_bad_arguments(calls: Calls, change: Callable[..., object], message: str) -> None:
    """What does not fit is refused as without packing, never read past its end."""
    op, x = make(), torch.randn(3, 13)
    op(x)
    with pytest.raises(ValueError, match=message):
        change(op, x)
