"""Adapters of plugins, replacements, and what happens when their code fails."""

from __future__ import annotations

import copy
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import (
    Adapter,
    CallAdapter,
    CompilationConfig,
    CustomOp,
    FunctionCall,
    LeaveAlone,
    OpgraftConfig,
    Provider,
    graft,
    inference_only,
    load_plugins,
    reset,
    set_config,
    ungraft,
)
from opgraft.errors import ConfigError, ConflictError, GraftError
from opgraft.grafting.adapters import CALL_ADAPTERS, builtin_adapters
from opgraft.ops import Linear, SiluAndMul
from opgraft.ops.composites.composite import Composite
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from opgraft.registry.state import host_state
from torch import nn

ACME = Provider("acme-npu", "2.0")


def add(*adapters: Adapter | CallAdapter) -> None:
    load_plugins()
    PLUGIN_ADAPTERS.get().extend((ACME, adapter) for adapter in adapters)


class Scale(nn.Module):
    """A module of some model, with a parameter and a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(width))
        self.shift = nn.Buffer(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift


class AcmeScale(nn.Module):
    """The op for it, which need not be a ``CustomOp``; its table is its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(width))
        self.shift = nn.Buffer(torch.zeros(width))
        self.table = nn.Buffer(torch.arange(float(width)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.shift, x, self.factor) + 0 * self.table


def recognise_scale(module: nn.Module) -> Mapping[str, Any] | None:
    return {"width": module.factor.numel()} if type(module) is Scale else None


def test_a_plugins_row_is_asked_first(mlp, x) -> None:
    """A plugin's adapter decides before the built-in ones, and its provider is in the report."""

    def only_wide(module: nn.Module) -> Mapping[str, Any] | None:
        if isinstance(module, nn.Linear):
            raise LeaveAlone("acme has no linear units")
        return None

    add(
        Adapter("acme linear", Linear, only_wide), Adapter("acme scale", AcmeScale, recognise_scale)
    )
    model = nn.Sequential(mlp(), Scale())
    report = graft(model)
    assert {row.reason for row in report.left_alone if row.source == "Linear"} == {
        "acme has no linear units"
    }
    (row,) = (row for row in report.replaced if row.source == "Scale")
    assert (row.path, row.adapter, row.op, row.implementation) == (
        "1",
        "acme scale",
        "AcmeScale",
        "AcmeScale.forward",
    )
    assert row.provider == ACME
    assert "acme-npu 2.0" in str(report)


def test_tensors_of_the_module_and_of_the_op() -> None:
    """The op gets the module's parameters and buffers, keeps its own table, and hands back what it was given."""
    add(Adapter("acme scale", AcmeScale, recognise_scale))
    module = Scale()
    model, x = nn.Sequential(module), torch.randn(3, 4)
    expected, factor, shift = model(x), module.factor, module.shift
    graft(model)
    assert model[0].factor is factor
    assert model[0].shift is shift
    assert torch.equal(model[0].table, torch.arange(4.0))
    torch.testing.assert_close(model(x), expected)
    model[0].shift = torch.zeros(4)
    ungraft(model)
    assert model[0] is module
    assert not module.shift.any()
    assert list(module._buffers) == ["shift"]


def test_the_documentation_lists_every_built_in_row() -> None:
    """The table of what is recognised has the rows of the code, in their order, with their ops."""
    text = (Path(__file__).parents[2] / "docs/explanation/grafting.md").read_text(encoding="utf-8")
    table = text.partition("| what it is | op |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| (.+) \| `(\w+)` \|$", table, flags=re.M)
    names = {cls: name for name, cls in CustomOp.op_registry.items()}
    rows = [
        (adapter.name, names[adapter.op]) for adapter in builtin_adapters() if adapter.op in names
    ]
    assert documented == [
        row for row in rows if not issubclass(CustomOp.op_registry[row[1]], Composite)
    ]


def test_the_documentation_lists_every_built_in_row_of_calls() -> None:
    """The table of calls has the names and ops of the code, in their order."""
    text = (Path(__file__).parents[2] / "docs/explanation/grafting.md").read_text(encoding="utf-8")
    table = text.partition("| what calls it |")[2].partition("\n\n")[0]
    documented = {
        name: re.findall(r"`(\w+)`", ops)
        for name, ops in re.findall(r"^\| .+ \| (.+) \| (`.+`) \|$", table, flags=re.M)
    }
    names = {cls: name for name, cls in CustomOp.op_registry.items()}
    rows: dict[str, list[str]] = {}
    for adapter in CALL_ADAPTERS:
        if adapter.op in names and names[adapter.op] not in rows.setdefault(adapter.name, []):
            rows[adapter.name].append(names[adapter.op])
    assert documented == rows


def test_an_op_that_does_not_fit_is_not_used() -> None:
    """Another set or shape of parameters leaves the module alone, with the difference as the reason."""
    add(
        Adapter(
            "too wide", AcmeScale, lambda module: {"width": 5} if type(module) is Scale else None
        )
    )
    add(
        Adapter(
            "no bias",
            Linear,
            lambda m: {"in_features": 2, "out_features": 2} if type(m) is nn.Linear else None,
        )
    )
    model = nn.Sequential(Scale(), nn.Linear(2, 2, bias=False))
    reasons = [row.reason for row in graft(model).left_alone]
    assert reasons == [
        "AcmeScale has factor of shape (5,) instead of (4,)",
        "Linear does not have the same parameters: they differ in bias",
    ]


class GatedMlp(nn.Module):
    """A composite with children that the built-in rows know."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(4, 16)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return out


class AcmeGatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = Linear(4, 16)
        self.act = SiluAndMul()
        self.down = Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.gate_up(x)))
        return out


def test_a_composite_is_replaced_as_a_whole_and_restored_in_depth() -> None:
    """An adapter may take a module with children; the report has one row for it, and ungraft restores the children."""
    add(Adapter("acme mlp", AcmeGatedMlp, lambda module: {} if type(module) is GatedMlp else None))
    model, x = nn.Sequential(GatedMlp()).train(), torch.randn(3, 4)
    modules, parameters, expected = list(model.modules()), list(model.parameters()), model(x)
    report = graft(model)
    assert [(row.path, row.op) for row in report.replaced] == [("0", "AcmeGatedMlp")]
    assert report.left_alone == ()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(x), expected)
    model.eval()
    ungraft(model)
    assert list(model.modules()) == modules
    assert not any(module.training for module in modules)
    assert torch.equal(model(x), expected)


def failing_recogniser(module: nn.Module) -> Mapping[str, Any] | None:
    raise KeyError("acme")


class FailingOp(Linear):
    def __init__(self, **kwargs: Any) -> None:
        raise OSError("no device")


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (
            Adapter("acme", Linear, failing_recogniser),
            "adapter 'acme' of acme-npu 2.0 raised KeyError: 'acme'",
        ),
        (
            Adapter("acme", FailingOp, lambda module: {}),
            "class FailingOp for adapter 'acme' of acme-npu 2.0 raised OSError: no device",
        ),
    ],
)
def test_what_a_plugin_raises_is_reported(mlp, adapter: Adapter, reason: str) -> None:
    """A failing plugin leaves modules alone, with what it raised; in strict mode it is an error and nothing is done."""
    add(adapter)
    model = mlp()
    modules = list(model)
    assert {row.reason for row in graft(model).left_alone} == {reason}
    reset()  # strictness is settled when plugins are loaded
    with set_config(OpgraftConfig(strict=True)):
        add(adapter)
        with pytest.raises(GraftError, match=r"strict mode: .*OPGRAFT_STRICT=0"):
            graft(model)
    assert list(model) == modules


def test_an_error_halfway_leaves_the_model_as_it_was(mlp) -> None:
    """If an op cannot be chosen for a later module, the earlier ones are as they were."""
    model = mlp()
    modules = list(model)

    class Unusable(nn.Module):
        def __init__(self) -> None:
            raise ConfigError("a setting that cannot be used")

    add(Adapter("acme", Unusable, lambda module: {} if isinstance(module, nn.RMSNorm) else None))
    with pytest.raises(ConfigError, match="cannot be used"):
        graft(model)
    assert list(model) == modules


def test_conflicts_between_plugins_are_errors(mlp) -> None:
    """Two replacements of one op at equal priority raise here as they do where the op is constructed."""
    for name in ("First", "Second"):
        CustomOp.register_oot(
            type(name, (Linear,), {"forward_oot": lambda self, input, residual=None: input}),
            name="Linear",
        )
    with pytest.raises(ConflictError, match=r"First at .* and Second at"):
        graft(mlp())


def test_a_disabled_op_is_reported_as_what_runs(mlp) -> None:
    """A replacement that custom_ops switches off does not get the credit for the native definition."""

    class FastLinear(Linear):
        def forward_oot(
            self, input: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.forward_native(input, residual)

    CustomOp.register_oot(FastLinear, name="Linear")
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        (row, *_) = graft(mlp()).counts()
    assert (row.implementation, row.provider.name) == ("Linear.forward_native", "opgraft")


def test_inference_only_kernels_keep_gradients_right(mlp, x) -> None:
    """A kernel without a backward serves inference; where a gradient is required the native definition runs."""

    class FastLinear(Linear):
        @inference_only
        def forward_oot(
            self, input: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.forward_native(input.detach(), residual).detach()

    CustomOp.register_oot(FastLinear, name="Linear")
    plain, grafted = mlp().train(), mlp().train()
    graft(grafted)
    for model in (plain, grafted):
        torch.manual_seed(5)
        model(x).sum().backward()
    for mine, theirs in zip(grafted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        torch.testing.assert_close(grafted.eval()(x), plain.eval()(x))


def test_a_plugin_brings_adapters_through_its_hook(site) -> None:
    """The hook opgraft_graft_adapters of an installed plugin extends the table."""
    site.plugin(
        "acme-ops",
        "import opgraft\n"
        "from opgraft.ops import Linear\n"
        "from torch import nn\n"
        "platforms = ('any',)\n"
        "def recognise(module):\n"
        "    if type(module) is not nn.Bilinear:\n"
        "        return None\n"
        "    raise opgraft.LeaveAlone('acme will do this one later')\n"
        "@opgraft.hookimpl\n"
        "def opgraft_graft_adapters():\n"
        "    return [opgraft.Adapter('acme bilinear', Linear, recognise)]\n",
    )
    (row,) = graft(nn.Sequential(nn.Bilinear(2, 2, 2))).left_alone
    assert row.reason == "acme will do this one later"


ACME_CALLS = """
import functools
import opgraft
from opgraft import CustomOp
from opgraft.ops import SiluAndMul

platforms = ("any",)

@CustomOp.register("acme_gate")
class AcmeGate(CustomOp):
    def forward_native(self, gate, up):
        return gate.sigmoid() * gate * up

@CustomOp.register_oot("AcmeGate")
class FastAcmeGate(AcmeGate):
    def forward_oot(self, gate, up):
        calls.append(tuple(gate.shape))
        return self.forward_native(gate, up)

calls = []

def recognise(call):
    if call.name != "gated":
        return None
    if call.found is None:
        raise opgraft.LeaveAlone("acme finds no function of this name in the file")
    return {}

def with_op(op, function):
    return functools.partial(by_op, op, function)

def by_op(op, function, gate, up, scale=1.0):
    # A call with a scale is none for the op.
    return op(gate, up) if scale == 1.0 else function(gate, up, scale)

@opgraft.hookimpl
def opgraft_graft_adapters():
    return [opgraft.CallAdapter("gate of acme", AcmeGate, recognise, with_op)]
"""


def gated(gate: torch.Tensor, up: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The function of some model's file."""
    return scale * torch.nn.functional.silu(gate) * up


class GatedUnit(nn.Module):
    """A module that calls the function of its file."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x[..., :4], x[..., 4:], self.scale)


class Unresolved(nn.Module):
    """A module with an attribute of the same name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sizes.gated(x)


Unresolved.forward = types.FunctionType(  # type: ignore[method-assign]
    Unresolved.forward.__code__, {"__name__": __name__}
)


def test_a_plugin_brings_an_adapter_of_calls(site) -> None:
    """A CallAdapter of an installed plugin has a forward call its op, survives copies, and is undone."""
    site.plugin("acme-ops", ACME_CALLS)
    x = torch.randn(3, 8)
    model = nn.Sequential(GatedUnit(), GatedUnit(2.0), Unresolved())
    with torch.no_grad():
        expected = [model[0](x), model[1](x)]
    report = graft(model)
    rows = [(row.path, row.source, row.adapter, row.op) for row in report.replaced]
    assert rows == [
        ("0.gated", "gated", "gate of acme", "acme_gate"),
        ("1.gated", "gated", "gate of acme", "acme_gate"),
    ]
    assert {str(row.provider) for row in report.replaced} == {"acme-ops 1.0"}
    assert [(row.path, row.reason) for row in report.left_alone if "acme" in row.reason] == [
        ("2.gated", "acme finds no function of this name in the file")
    ]
    calls = sys.modules["acme_ops"].calls  # type: ignore[attr-defined]
    copied = copy.deepcopy(model)
    for each in (model, copied):
        torch.testing.assert_close(each[0](x), expected[0])
        torch.testing.assert_close(each[1](x), expected[1])
    assert calls == [(3, 4)] * 2
    ungraft(model)
    assert torch.equal(model[0](x), expected[0])
    assert list(model[0].children()) == []
    assert len(calls) == 2


def test_a_call_is_left_alone_without_a_kernel(site) -> None:
    """An op without a kernel leaves the function, unless the adapter says that the definition gains."""
    plain = ACME_CALLS.replace('@CustomOp.register_oot("AcmeGate")\n', "")
    site.plugin("acme-ops", plain)
    model = nn.Sequential(GatedUnit())
    (row,) = [row for row in graft(model).left_alone if row.source == "gated"]
    assert row.reason == "here acme_gate is its native definition, which is no faster"


def test_the_reference_plugin_serves_a_grafted_model(toy_npu, mlp, x) -> None:
    """On a machine with the plugin's device its kernels run, and the report names them and their distribution."""
    model = mlp()
    expected = model(x)
    report = graft(model)
    served = {row.op: f"{row.implementation} of {row.provider.name}" for row in report.counts()}
    assert served["rms_norm"] == "ToyRMSNorm.forward_oot of opgraft-toy-npu"
    assert served["gelu"] == "ToyGELU.forward_oot of opgraft-toy-npu"
    assert served["linear"] == "Linear.forward_native of opgraft"
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    ungraft(model)
    assert torch.equal(model(x), expected)


def calls_of(
    name: str, recognise: Callable[[FunctionCall], Mapping[str, Any] | None], op: type[nn.Module]
) -> CallAdapter:
    return CallAdapter(name, op, recognise, with_op, native_gains=True)


def with_op(op: nn.Module, function: Any) -> Any:
    return op


class PlainGate(nn.Module):
    """An op of calls without tensors."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
        return gated(gate, up, scale)


class GateWithTable(PlainGate):
    """An op of calls with a tensor, which the model's state_dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.ones(4))


class GateWithWeight(PlainGate):
    """An op of calls with a parameter in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)


class FailingGate(PlainGate):
    def __init__(self) -> None:
        raise OSError("no device")


class GateWithoutModule:
    """A class for calls that is no module."""


def accept_gated(call: FunctionCall) -> Mapping[str, Any] | None:
    return {} if call.name == "gated" else None


def raising(error: Exception) -> Callable[[FunctionCall], Mapping[str, Any] | None]:
    def recognise(call: FunctionCall) -> Mapping[str, Any] | None:
        raise error

    return recognise


@pytest.mark.parametrize("error", [KeyError("acme"), ConfigError("acme"), GraftError("acme")])
def test_a_row_of_calls_that_raises_is_told_once_and_the_next_has_its_turn(
    error: Exception,
) -> None:
    """A row that raises for every name keeps no name from later rows, and has one row in the report."""
    add(calls_of("bad", raising(error), PlainGate), calls_of("good", accept_gated, PlainGate))
    model = nn.Sequential(GatedUnit(), GatedUnit())
    report = graft(model)
    assert [(row.path, row.adapter) for row in report.replaced] == [
        ("0.gated", "good"),
        ("1.gated", "good"),
    ]
    reasons = [row.reason for row in report.left_alone if "acme-npu" in row.reason]
    assert reasons == [f"adapter 'bad' of acme-npu 2.0 raised {type(error).__name__}: {error}"]


@pytest.mark.parametrize("error", [KeyError("acme"), ConfigError("acme")])
def test_a_row_of_calls_that_raises_is_an_error_in_strict_mode(error: Exception) -> None:
    """Strict mode names the row, and the model stays as it was."""
    with set_config(OpgraftConfig(strict=True)):
        add(calls_of("bad", raising(error), PlainGate))
        model = nn.Sequential(GatedUnit())
        with pytest.raises(GraftError, match=r"strict mode: adapter 'bad' of acme-npu 2\.0 raised"):
            graft(model)
    assert list(model[0].children()) == []


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (FailingGate, "raised OSError: no device"),
        (GateWithoutModule, "raised AttributeError: 'GateWithoutModule' object has no attribute"),
    ],
)
def test_a_class_of_calls_that_raises_gives_the_next_row_its_turn(op: Any, reason: str) -> None:
    """The op of a row cannot be constructed, so the next row decides."""
    add(calls_of("bad", accept_gated, op), calls_of("good", accept_gated, PlainGate))
    report = graft(nn.Sequential(GatedUnit(), GatedUnit()))
    assert [row.adapter for row in report.replaced] == ["good", "good"]
    (failed,) = [row for row in report.left_alone if "acme-npu" in row.reason]
    assert f"class {op.__name__} for adapter 'bad' of acme-npu 2.0 {reason}" in failed.reason


@pytest.mark.parametrize(
    ("op", "tensors"), [(GateWithTable, "table"), (GateWithWeight, "scale.weight, scale.bias")]
)
def test_an_op_of_calls_with_tensors_is_not_used(op: type[nn.Module], tensors: str) -> None:
    """The names in the state_dict stay, and the report has the reason."""
    add(calls_of("acme gate", accept_gated, op))
    model = nn.Sequential(GatedUnit(), nn.Linear(4, 4))
    names = list(model.state_dict())
    report = graft(model)
    assert list(model.state_dict()) == names
    (row,) = [row for row in report.left_alone if row.path == "0.gated"]
    assert row.reason == (
        f"{op.__name__} has tensors of its own, which the model's state_dict does not have: "
        f"{tensors}"
    )


class ReadsAttribute(nn.Module):
    """A forward with an attribute of the name that is a function of the file, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gated(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class ReadsBuiltin(nn.Module):
    """A forward with a built-in function of Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x.unbind())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("module", "name"),
    [(ReadsAttribute(), "gated"), (ReadsBuiltin(), "sum"), (Unresolved(), "gated")],
)
def test_a_name_that_is_no_global_is_left_alone(module: nn.Module, name: str) -> None:
    """A row accepts an attribute or a built-in function, which no namespace of a file can replace."""
    accept = calls_of("acme", lambda call: {} if call.name == name else None, PlainGate)
    add(accept)
    report = graft(nn.Sequential(module))
    assert report.replaced == ()
    (row,) = [row for row in report.left_alone if row.path == f"0.{name}"]
    assert row.reason == f"its forward reads no {name} of its file"
    assert list(module.children()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'{name}_{other}'", "child='{name}_{other}': expected a name with {name} as"),
        ("'{0}'", "child='{0}': expected a name"),
        ("'acme.{name}'", "child='acme.{name}': expected a name"),
        ("''", "child='': expected a name"),
        ("'{name'", "child='{name': expected a name"),
        ("None", "child=None: expected a name"),
    ],
)
def test_a_row_with_another_child_is_refused_at_the_hook(
    site, arguments: str, message: str
) -> None:
    """The plugin fails with the field in the reason, and ``graft`` goes on without the plugin."""
    site.plugin("acme-ops", ACME_CALLS.replace("with_op)]", f"with_op, {arguments})]"))
    load_plugins()
    assert message in str(host_state().plugins["acme_ops"].reason)
    assert PLUGIN_ADAPTERS.get() == []
    assert graft(nn.Sequential(GatedUnit())).replaced == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Adapter('acme', 'Linear', recognise)", "op='Linear': expected a class"),
        ("Adapter('acme', AcmeGate, {})", "recognise={}: expected a function"),
        ("CallAdapter('acme', AcmeGate, recognise, 1)", "substitute=1: expected a function"),
    ],
)
def test_a_row_with_values_of_another_kind_is_refused_at_the_hook(
    site, row: str, message: str
) -> None:
    """The reason names the row and the field."""
    site.plugin(
        "acme-ops",
        ACME_CALLS.replace(
            'opgraft.CallAdapter("gate of acme", AcmeGate, recognise, with_op)', f"opgraft.{row}"
        ),
    )
    load_plugins()
    reason = str(host_state().plugins["acme_ops"].reason)
    assert f"opgraft_graft_adapters returned a row 'acme' with {message}" in reason
