"""What the tests of the packed linear layer share: a record of what oneDNN is asked to do, and a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft.compat import packed_linear as onednn
from opgraft.ops import Linear
from opgraft.ops.linear import packed as packed_linear
from torch import Tensor, nn

DTYPES = [torch.float32, *([torch.bfloat16] if onednn.missing(torch.bfloat16) is None else [])]
TOLERANCES = {torch.float32: (1e-5, 1.3e-6), torch.bfloat16: (2e-2, 1.6e-2)}
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": lambda y: y * (y > 0),
    "silu": lambda y: y / (1 + torch.exp(-y)),
    "gelu": lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2,
    "gelu_tanh": lambda y: y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))) / 2,
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}
needs_onednn = pytest.mark.skipif(
    bool(onednn.missing()), reason=f"packed linear: {onednn.missing()}"
)
_RANGES_FOR = packed_linear.ranges_for.__wrapped__


class Calls(list[str]):
    """What oneDNN was asked to do, in order."""


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Packing made worth it everywhere, whatever the CPU, and every call of oneDNN written down."""
    made = Calls()
    rows = {
        feature: dict.fromkeys(DTYPES, (packed_linear.RowRange(1, 1),))
        for feature in packed_linear.PACKED
    }
    use_tables(monkeypatch, rows, rows)
    for name in ("pack", "linear", "linear_add"):
        monkeypatch.setattr(onednn, name, _noting(made, name, getattr(onednn, name)))
    return made


def use_tables(
    monkeypatch: pytest.MonkeyPatch, packed: packed_linear.Table, direct: packed_linear.Table
) -> None:
    """Have oneDNN compute where these say, over weights that are packed at once, and over plain ones."""
    monkeypatch.setattr(packed_linear._COPIES, "after", 0)
    monkeypatch.setattr(packed_linear, "PACKED", packed)
    monkeypatch.setattr(packed_linear, "DIRECT", direct)
    monkeypatch.setattr(packed_linear, "ranges_for", _RANGES_FOR)


def _noting(made: Calls, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        made.append(name)
        return function(*args)

    return noting


def expected(
    x: Tensor, op: nn.Linear, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """In float64, from the affine map written out."""
    y = (x.double().unsqueeze(-2) * op.weight.detach().double()).sum(-1)
    y = REFERENCES[activation](y if op.bias is None else y + op.bias.detach().double())
    return y if residual is None else y + residual.double()


def check(
    actual: Tensor,
    x: Tensor,
    op: nn.Linear,
    activation: str = "none",
    residual: Tensor | None = None,
) -> None:
    absolute, relative = TOLERANCES[actual.dtype]
    reference = expected(x, op, activation, residual)
    assert actual.shape == reference.shape
    torch.testing.assert_close(actual.double(), reference, atol=absolute, rtol=relative)


def make(
    size: int = 13, out: int = 7, dtype: torch.dtype = torch.float32, **options: Any
) -> Linear:
    """A layer whose weights are frozen, so that they are packed."""
    op = Linear(size, out, **options).to(dtype)
    opgraft.freeze(op)
    return op


def packed(size: int = 13, out: int = 7, **options: Any) -> tuple[Any, nn.Linear]:
    """A packed layer, and one with the same values that keeps its plain weight."""
    op = make(size, out, **options).eval()
    plain = copy.deepcopy(op)
    opgraft.freeze(plain)
    assert [row.path for row in opgraft.freeze(op, keep_plain=False).packed] == [""]
    return op, plain


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.view(BITS[one.dtype]), other.view(BITS[other.dtype])
    )
