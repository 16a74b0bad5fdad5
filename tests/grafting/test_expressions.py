"""Recognising modules by what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opgraft import graft
from opgraft.grafting.expressions import NotExpressible, expression_of
from torch import nn


class Norm(nn.Module):
    """A norm with one weight whose formula is given."""

    def __init__(self, formula: Callable[..., torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.formula = formula
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.formula(hidden, self.weight, self.eps)


class Activation(nn.Module):
    """An activation whose formula is given."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.formula(hidden)


def llama(x, w, eps):
    dtype = x.dtype
    x = x.to(torch.float32)
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


RMS_NORMS = {
    "llama": llama,
    "cast last": lambda x, w, eps: (
        w * (x.float() * (x.float().square().mean(-1, True) + eps).rsqrt())
    ).type_as(x),
    "by division": lambda x, w, eps: (
        x / torch.sqrt(eps + torch.mean(x * x, dim=-1, keepdim=True)) * w
    ),
    "by reciprocal": lambda x, w, eps: w.mul(
        x.mul(x.pow(2).mean((-1,), keepdim=True).add(eps).sqrt().reciprocal())
    ),
    "by power": lambda x, w, eps: x * (x**2).mean(dim=[-1], keepdim=True).add(eps).pow(-0.5) * w,
}
GEMMA_NORMS = {
    "gemma": lambda x, w, eps: (
        (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)) * (1.0 + w.float())
    ).type_as(x),
    "one last": lambda x, w, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (w + 1),
}
ACTIVATIONS = {
    "GELU": [F.gelu, lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))],
    "FastGELU": [
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    ],
    "NewGELU": [
        lambda x: (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ),
        lambda x: x / 2 * (torch.tanh((x + x**3 * 0.044715) * math.sqrt(2 / math.pi)) + 1),
    ],
    "QuickGELU": [lambda x: x * torch.sigmoid(1.702 * x), lambda x: (x * 1.702).sigmoid() * x],
    "SiLU": [F.silu, lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid().mul(x)],
}


def check(module: nn.Module, op: str, x: torch.Tensor) -> None:
    model = nn.Sequential(module)
    expected = model(x)
    report = graft(model)
    assert [row.implementation for row in report.replaced] == [f"{op}.forward_native"]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spelling", RMS_NORMS)
def test_spellings_of_the_rms_norm(spelling: str) -> None:
    """Every usual way to write an RMS norm is recognised, with its eps."""
    check(Norm(RMS_NORMS[spelling]), "RMSNorm", torch.randn(3, 8) * 1e-2)


@pytest.mark.parametrize("spelling", GEMMA_NORMS)
def test_spellings_of_gemmas_norm(spelling: str) -> None:
    """A norm that adds one to its weight becomes Gemma's norm, never the plain one."""
    check(Norm(GEMMA_NORMS[spelling]), "GemmaRMSNorm", torch.randn(3, 8) * 1e-2)


@pytest.mark.parametrize(
    ("op", "formula"), [(op, f) for op, formulas in ACTIVATIONS.items() for f in formulas]
)
def test_spellings_of_activations(op: str, formula: Callable[..., torch.Tensor]) -> None:
    """Each form of GELU and SiLU is recognised as itself, in any spelling."""
    check(Activation(formula), op, torch.randn(3, 8) * 3)


def test_modules_of_one_class_are_told_apart() -> None:
    """Norms that differ in a setting or a size alone become ops that differ in it."""
    norms = [
        Norm(llama),
        Norm(llama),
        Norm(RMS_NORMS["by division"]),
        Norm(GEMMA_NORMS["gemma"]),
        Norm(llama, 4),
    ]
    norms[1].eps = 1e-3
    model = nn.Sequential(*norms)
    assert [row.op for row in graft(model).replaced] == ["rms_norm"] * 3 + [
        "gemma_rms_norm",
        "rms_norm",
    ]
    assert [(op.variance_epsilon, len(op.weight)) for op in model] == [
        (1e-5, 8),
        (1e-3, 8),
        *[(1e-5, 8)] * 2,
        (1e-5, 4),
    ]


def test_tanh_form_of_torch() -> None:
    """The approximation asked of torch's function reaches the op."""
    model = nn.Sequential(Activation(lambda x: F.gelu(x, approximate="tanh")))
    graft(model)
    assert model[0].approximate == "tanh"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            Norm(lambda x, w, eps: w * x * torch.rsqrt(x.pow(2).mean(-1) + eps)),
            "it takes the mean over -1",
        ),
        (
            Norm(lambda x, w, eps: w * x * torch.rsqrt(x.pow(2).mean(0, True) + eps)),
            "it takes the mean over 0",
        ),
        (Norm(lambda x, w, eps: w * x * torch.rsqrt(x.pow(2).mean(-1, True) - eps)), ""),
        (Norm(lambda x, w, eps: w * x * (x.pow(2).mean(-1, True) + eps)), ""),
        (Norm(lambda x, w, eps: (2 + w) * x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)), ""),
        (Norm(lambda x, w, eps: w * w * x * torch.rsqrt(x.pow(2).mean(-1, True) + eps)), ""),
        (Norm(RMS_NORMS["llama"], width=1), ""),
        (Norm(lambda x, w, eps: llama(x, w, eps).float()), "it returns another dtype"),
        (Norm(lambda x, w, eps: llama(x, w, eps).half()), "it uses half"),
        (Norm(lambda x, w, eps: llama(x.to(torch.bfloat16), w, eps)), "it casts to torch.bfloat16"),
        (Activation(lambda x: x * torch.sqrt(x * x)), "torch.sqrt"),
        (Activation(lambda x: x * torch.sigmoid(1.7 * x)), ""),
        (Activation(lambda x: F.silu(x, inplace=True)), "it changes its input in place"),
        (Activation(lambda x: x if x.sum() > 0 else -x), "tracing it raised TraceError"),
        (Activation(lambda x: x.shape), "it reads .shape of a tensor"),
        (Activation(lambda x: 2**x), "tracing it raised|it raises to a power|it uses"),
    ],
)
def test_what_computes_something_else_stays(module: nn.Module, reason: str) -> None:
    """A module that is nearly one of the forms is left alone, and the report says what is in the way."""
    model = nn.Sequential(module)
    (row,) = graft(model).left_alone
    assert model[0] is module
    if "torch.sqrt" in reason:
        reason = ""  # recognisable, but equal to none of the forms: the square root of a square is no factor
    assert row.reason.startswith("no adapter recognises it")
    assert any(part in row.reason for part in reason.split("|"))


def test_mode_and_signature_matter() -> None:
    """A module that does something else in training, or takes further arguments, has no expression."""

    class OnlyInEval(nn.Module):
        def forward(self, x):
            return x if self.training else F.silu(x)

    class WithResidual(nn.Module):
        def forward(self, x, residual=None):
            return F.silu(x)

    for module, reason in (
        (OnlyInEval(), "something else in training"),
        (WithResidual(), "takes 2 arguments"),
    ):
        with pytest.raises(NotExpressible, match=reason):
            expression_of(module)


def test_tracing_leaves_no_trace_on_the_module() -> None:
    """What a forward sets on its module while it is traced stays off the model."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return F.silu(x)

    module = Counting().train()
    graft(nn.Sequential(module))
    assert module.calls == 0
    assert module.training
    assert "calls" not in vars(module)
