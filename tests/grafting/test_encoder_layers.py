"""Layers of encoders that become one op: what follows a linear map goes to its kernel, if the kernel takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opgraft import graft, ungraft
from opgraft.ops import MLP, CustomOp, Linear, LinearAct, LinearAddNorm
from torch import nn


class Intermediate(nn.Module):
    """The first half of BERT's feed-forward layer."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 12)
        self.intermediate_act_fn = act if act is not None else nn.GELU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(hidden))
        return out


class Output(nn.Module):
    """The end of BERT's layers."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.LayerNorm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.LayerNorm(self.dropout(self.dense(hidden)) + before)
        return out


class WithoutDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(y + self.out(x))
        return out


class FeedForward(nn.Module):
    """ViT's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.activation_fn(self.fc1(x)))
        return out


class Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(*args)
        return out


LAYERS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, bool]]] = {
    # what is built, the op that it becomes, and what the kernel of its linear map gets: activation, residual
    "gelu": (Intermediate, "linear_act", ("gelu", False)),
    "silu": (lambda: Intermediate(nn.SiLU()), "linear_act", ("silu", False)),
    "output": (Output, "linear_add_norm", ("none", True)),
    "output without dropout": (WithoutDropout, "linear_add_norm", ("none", True)),
    "feed-forward": (FeedForward, "mlp", ("gelu_tanh", False)),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)
Calls = list[tuple[str, bool]]


@pytest.fixture
def calls() -> Calls:
    """What the functional form of a linear kernel was asked for, in whose presence epilogues are fused."""
    asked: Calls = []

    def linear(x, weight, bias=None, activation="none", residual=None):
        asked.append((activation, residual is not None))
        y = F.linear(x, weight, bias)
        y = {
            "none": y,
            "gelu": F.gelu(y),
            "gelu_tanh": F.gelu(y, approximate="tanh"),
            "silu": F.silu(y),
        }[activation]
        return y if residual is None else y + residual

    @CustomOp.register_oot("Linear")
    class FastLinear(Linear):
        functional_oot = {"linear": linear}  # noqa: RUF012  # read through the class, never written

        def forward_oot(
            self, input: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.forward_native(input, residual)

    return asked


def build(kind: str) -> tuple[Holder, Holder, tuple[torch.Tensor, ...]]:
    """A grafted model of one layer, a plain copy, and inputs."""
    made, op, _ = LAYERS[kind]
    plain = Holder(made()).eval()
    model = copy.deepcopy(plain)
    assert [row.op for row in graft(model).replaced] == [op]
    return (
        model,
        plain,
        tuple(torch.randn(2, 3, 8) for _ in range(2 if op == "linear_add_norm" else 1)),
    )


@each_layer
def test_a_kernel_gets_what_follows(kind: str, calls: Calls) -> None:
    """Where the linear kernel has the functional form, it computes the epilogue too, and the result is the same."""
    model, plain, x = build(kind)
    with torch.no_grad():
        torch.testing.assert_close(model(*x), plain(*x), atol=1e-6, rtol=1e-5)
    assert calls == [LAYERS[kind][2]]


def observe(layer: Any) -> None:
    layer.get_submodule(layer.names[0]).register_forward_hook(lambda *_: None)


def observe_act(layer: Any) -> None:
    layer.get_submodule(
        layer.names[-1 if isinstance(layer, LinearAddNorm) else 1]
    ).register_forward_hook(lambda *_: None)


def set_forward(layer: Any) -> None:
    linear = layer.get_submodule(layer.names[0])
    linear.forward = type(linear).forward.__get__(linear)


def exchange(layer: Any) -> None:
    linear = layer.get_submodule(layer.names[0])
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    plain.load_state_dict(linear.state_dict())
    setattr(layer, layer.names[0], plain)


@pytest.mark.parametrize("change", [observe, observe_act, set_forward, exchange])
@pytest.mark.parametrize("kind", ["gelu", "output", "feed-forward"])
def test_children_are_called_where_somebody_watches(
    kind: str, calls: Calls, change: Callable[[Any], None]
) -> None:
    """With hooks on a child, or another module in its place, each child is called as before."""
    model, plain, x = build(kind)
    change(model.layer)
    with torch.no_grad():
        torch.testing.assert_close(model(*x), plain(*x))
    assert calls == []


@each_layer
def test_training_is_the_same(kind: str, calls: Calls) -> None:
    """Dropout draws the same numbers, and gradients are those of the plain model, bit for bit."""
    model, plain, x = build(kind)
    for each in (model, plain):
        torch.manual_seed(3)
        each.train()(*x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert calls == []
    torch.manual_seed(4)
    with torch.no_grad():
        expected = plain(*x)
        torch.manual_seed(4)
        torch.testing.assert_close(model(*x), expected)


@each_layer
def test_without_such_a_kernel_the_children_run(kind: str) -> None:
    """A kernel of an activation is not passed over for a linear layer that only knows the native definition."""

    @CustomOp.register_oot("Linear")
    class Plain(Linear):
        def forward_oot(
            self, input: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.forward_native(input, residual)

    model, plain, x = build(kind)
    called = []
    for child in model.layer.children():
        type(child).__call__  # noqa: B018  # each is a module
        child.register_forward_hook(lambda module, *_: called.append(module))
    with torch.no_grad():
        assert torch.equal(model(*x), plain(*x))
    assert len(called) == len(list(plain.layer.children()))


@each_layer
def test_ungraft_is_exact(kind: str) -> None:
    """The same modules with the same parameters are back, and the children were the same ops all along."""
    made, _, _ = LAYERS[kind]
    layer = made()
    modules, parameters = list(layer.named_modules()), list(layer.parameters())
    model = Holder(layer)
    graft(model)
    assert list(dict(model.layer.named_children())) == list(layer._modules)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    ungraft(model)
    assert model.layer is layer
    assert list(layer.named_modules()) == modules
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))


@each_layer
def test_it_compiles_as_one_graph(kind: str) -> None:
    """A compiler sees the children."""
    model, plain, x = build(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*x), plain(*x))


def test_a_residual_that_broadcasts(calls: Calls) -> None:
    """A residual of another shape is added as by the model."""
    model, plain, (x, _) = build("output")
    with torch.no_grad():
        assert torch.equal(model(x, torch.ones(8)), plain(x, torch.ones(8)))
        assert torch.equal(model(x, torch.ones(2, 3, 1)), plain(x, torch.ones(2, 3, 1)))
    assert calls == []


def test_what_is_nearly_one_stays(calls: Calls) -> None:
    """Another order, another activation or a second use of a child is no such layer."""

    class NormFirst(Output):
        def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.LayerNorm(self.dropout(self.dense(hidden))) + before
            return out

    class Twice(FeedForward):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (
                self.fc2(self.activation_fn(self.fc1(x))) + self.activation_fn(x).sum()
            )
            return out

    for layer in (NormFirst(), Twice(), Intermediate(nn.Tanh())):
        graft(Holder(layer))
        assert not {type(layer)} & {LinearAct, LinearAddNorm, MLP}
        model = Holder(layer)
        ungraft(model)
        assert not [row for row in graft(model).replaced if row.path == "layer"]


@pytest.mark.parametrize("fuses", [False, True])
def test_the_report_names_the_parts(fuses: bool, request: pytest.FixtureRequest) -> None:
    """The row of a composite names the ops that run inside it, and the counts count them; a fused one is not there."""
    if fuses:
        request.getfixturevalue("calls")
    else:

        @CustomOp.register_oot("Linear")
        class Plain(Linear):
            def forward_oot(
                self, input: torch.Tensor, residual: torch.Tensor | None = None
            ) -> torch.Tensor:
                return self.forward_native(input, residual)

    report = graft(Holder(FeedForward()))
    (row,) = report.replaced
    parts = {part.path: part.op for part in row.parts}
    act = {} if fuses else {"activation_fn": "gelu"}
    assert parts == {"fc1": "linear", "fc2": "linear"} | act
    counted = {} if fuses else {"gelu": 1}
    assert {count.op: count.count for count in report.counts()} == {"linear": 2, "mlp": 1} | counted
    assert report.to_dict()["replaced"][0]["parts"][0]["op"] == "linear"
