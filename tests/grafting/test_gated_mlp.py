"""Gated MLPs of models: what becomes one, and that its shared storage shows nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from opgraft import CompilationConfig, OpgraftConfig, graft, rebind, set_config, ungraft
from opgraft.ops import GatedMLP, Linear
from torch import nn
from torch.nn.utils import parametrizations


class Gated(nn.Module):
    """A gated MLP as Llama writes it."""

    def __init__(
        self, act: nn.Module | None = None, bias: bool = False, width: int = 16, inner: int = 24
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = act if act is not None else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Functional(nn.Module):
    """The same with other names, the factors exchanged and torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(16, 24), nn.Linear(16, 24)
        self.w2 = nn.Linear(24, 16, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(self.w3(hidden) * F.silu(self.w1(hidden)))
        return out


def grafted(module: nn.Module | None = None) -> tuple[nn.Sequential, torch.Tensor]:
    """A grafted model of one gated MLP and an input."""
    model = nn.Sequential(module if module is not None else Gated()).eval()
    report = graft(model)
    assert [row.op for row in report.replaced] == ["gated_mlp"]
    return model, torch.randn(3, 5, 16)


def joint(model: nn.Sequential, x: torch.Tensor) -> bool:
    """Whether one kernel call computes gate and up."""
    layer = model[0]
    assert isinstance(layer, GatedMLP)
    with torch.no_grad():
        return layer.joint_op(x) is not None


def agrees(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        Gated(),
        Gated(nn.GELU(approximate="tanh")),
        Gated(nn.GELU()),
        Gated(bias=True),
        Functional(),
    ],
    ids=["silu", "gelu tanh", "gelu", "bias", "functional"],
)
def test_spellings(module: nn.Module) -> None:
    """Whatever its children are called and wherever its activation is, it computes what it did, gate and up at once."""
    plain = copy.deepcopy(module)
    model, x = grafted(module)
    assert joint(model, x)
    agrees(model[0], plain, x)


class GatedByOther(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))
        return out


class WithSum(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
        return out


class WithCast(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(
            (self.act_fn(self.gate_proj(x)).float() * self.up_proj(x)).to(x.dtype)
        )
        return out


class OnlyInEval(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if not self.training else x


@pytest.mark.parametrize("cls", [GatedByOther, WithSum, WithCast, OnlyInEval])
def test_what_computes_something_else_stays(cls: type[Gated]) -> None:
    """A module that is nearly a gated MLP keeps its forward; its children become ops."""
    model = nn.Sequential(cls())
    report = graft(model)
    assert type(model[0]) is cls
    assert {row.op for row in report.replaced} == {"linear", "silu"}


def hooked(module: Gated) -> None:
    module.up_proj.register_forward_hook(lambda *_: None)


def one_bias(module: Gated) -> None:
    module.up_proj = nn.Linear(16, 24)


def wrapped(module: Gated) -> None:
    module.gate_proj = nn.Sequential(module.gate_proj)  # type: ignore[assignment]


def narrow(module: Gated) -> None:
    module.down_proj = nn.Linear(24, 8, bias=False)


def parametrized(module: Gated) -> None:
    parametrizations.weight_norm(module.up_proj)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "its up_proj is still a Linear"),
        (parametrized, "its up_proj is still a ParametrizedLinear"),
        (one_bias, "one of gate_proj and up_proj has a bias, the other has none"),
        (wrapped, "its gate_proj is still a Sequential"),
        (narrow, "the sizes of gate_proj, up_proj, down_proj are not those of one gated MLP"),
    ],
)
def test_children_that_other_code_changed(change: Callable[[Gated], None], reason: str) -> None:
    """Where a projection was wrapped, hooked or is of another kind, the module stays, and the report says why."""
    module = Gated()
    change(module)
    model, x = nn.Sequential(module), torch.randn(2, 16)
    expected = model(x)
    report = graft(model)
    assert [row.reason for row in report.left_alone if row.path == "0"] == [reason]
    torch.testing.assert_close(model(x), expected)


def test_parameters_stay_themselves_and_ungraft_separates_them() -> None:
    """Objects, keys and values stay; gate and up lie side by side while grafted, and not before and after."""
    module = Gated()
    children, parameters = dict(module.named_children()), list(module.parameters())
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model, _ = grafted(module)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    state = model[0].state_dict()
    assert list(state) == list(values)
    assert all(torch.equal(state[name], value) for name, value in values.items())
    gate, up = module.gate_proj.weight, module.up_proj.weight
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()
    ungraft(model)
    assert gate.data_ptr() + gate.nbytes != up.data_ptr()
    assert model[0] is module
    assert dict(module.named_children()) == children
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.state_dict().items())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)


def test_other_code_reads_the_children_it_knows() -> None:
    """The layer has every child of the module under its name, the activation too."""
    model, _ = grafted()
    assert isinstance(model[0].act_fn, nn.SiLU)
    assert isinstance(model[0].gate_proj, Linear)
    assert model[0].gate_proj.in_features == 16


def test_it_compiles_as_one_graph() -> None:
    """A compiler sees the layers one by one, and the weights as they are when it runs."""
    model, x = grafted()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model[0].up_proj.weight.data = torch.zeros(24, 16)
        assert not compiled(x).any()


def test_the_op_itself() -> None:
    """A model may be built of it; it says which activations it has."""
    layer = GatedMLP(16, 24, "gelu_tanh", bias=True, names=("a", "b", "c"))
    x = torch.randn(2, 16)
    with torch.no_grad():
        assert layer.joint_op(x) is not None
        expected = layer.c(F.gelu(layer.a(x), approximate="tanh") * layer.b(x))
        torch.testing.assert_close(layer(x), expected)
    assert "gelu_tanh" in repr(layer)
    with pytest.raises(ValueError, match="gated_mlp: activation is 'relu', expected one of"):
        GatedMLP(16, 24, "relu")


@pytest.mark.parametrize("kind", ["joint", "with act"])
def test_it_compiles_right_after_rebind(kind: str) -> None:
    """After the configuration changed, and no eager call, there is still one graph."""
    model = nn.Sequential(Gated() if kind == "with act" else Functional()).eval()
    x = torch.randn(2, 16)
    expected = model(x)
    graft(model)
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        assert rebind(model)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(model(x), expected)
