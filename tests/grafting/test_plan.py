"""Planning: a graft is decided as data before the model is changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from opgraft import (
    Adapter,
    CustomOp,
    LeaveAlone,
    Provider,
    explain,
    freeze,
    graft,
    load_plugins,
    reset,
    ungraft,
)
from opgraft.base.text import described
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.errors import ConfigError, GraftError
from opgraft.grafting.plan import Exchange, plan_of
from opgraft.grafting.report import GraftReport, LeftAlone
from opgraft.ops import ApplyRotaryEmb, Linear
from opgraft.ops.linear import packed
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it


def add(*adapters: Adapter) -> None:
    load_plugins()
    PLUGIN_ADAPTERS.get().extend((Provider("acme-npu", "2.0"), adapter) for adapter in adapters)


class Gated(nn.Module):
    """A module that is replaced as a whole, with a child that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down, self.act = nn.Linear(16, 8, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=29,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


def gated() -> nn.Module:
    shared = nn.Linear(8, 8)
    return nn.Sequential(Gated().train(), nn.LayerNorm(8), shared, nn.Dropout(0.1), shared).eval()


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every object that a model holds, by identity, and every bit of its tensors."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        state[path] = (
            id(module),
            type(module),
            sorted(vars(module)),
            [(k, id(v)) for k, v in vars(module).items()],
        )
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            held = vars(module)[name]
            state[f"{path}/{name}"] = sorted(
                (k, id(held[k]) if isinstance(held, dict) else 0) for k in held
            )
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[f"{name}/tensor"] = (
            tensor.data_ptr(),
            tensor._version,
            tensor.detach().clone().numpy().tobytes(),
        )
    return state


class FastRotary(ApplyRotaryEmb):
    """A kernel for which rotary functions are replaced too."""

    def forward_oot(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.forward_native(x, cos, sin)


@pytest.mark.parametrize("build", [gated, llama])
def test_a_dry_run_changes_nothing_and_tells_everything(build: Callable[[], nn.Module]) -> None:
    """The model is the same bit by bit and object by object, and the report is that of the graft that follows."""
    CustomOp.register_oot(FastRotary, name="ApplyRotaryEmb")
    model = build()
    before = snapshot(model)
    report = graft(model, dry_run=True)
    assert snapshot(model) == before
    assert report.replaced
    assert f"{len(report.replaced)} modules would be replaced" in str(report)
    assert graft(model) == dataclasses.replace(report, applied=True)
    assert snapshot(model) != before


def test_the_plan_is_data() -> None:
    """It says what each module becomes, with which arguments, what a composite is made of, and where ops go."""
    model = gated()
    plan = plan_of(model)
    exchange = plan.entries[0]
    assert isinstance(exchange, Exchange)
    assert (exchange.path, exchange.module, exchange.adapter) == ("0", model[0], "gated MLP")
    assert exchange.arguments["intermediate_size"] == 16
    assert [inner.path for inner in exchange.inside] == ["0.gate", "0.up", "0.down", "0.act"]
    assert next((place.name, place.op) for place in plan.places if place.parent is model) == (
        "0",
        exchange.op,
    )
    assert [place.name for place in plan.places if place.parent is model] == ["0", "1", "2", "4"]
    assert [row.path for row in plan.report(applied=False).replaced] == ["0", "1", "2"]


def test_a_child_keeps_the_mode_that_it_is_in() -> None:
    """Parts of a composite that were switched alone stay as they are."""
    model = gated()
    model[0].up.train()
    modes = [module.training for module in model.modules()]
    graft(model)
    ungraft(model)
    assert [module.training for module in model.modules()] == modes


ERRORS = [
    ValueError("odd shapes"),
    SystemExit("no driver"),
    ConfigError("a setting"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_recognition_raises_leaves_the_module_alone(mlp, x, error: BaseException) -> None:
    """One adapter that raises, even to end the process, costs its modules and no others."""

    def recognise(module: nn.Module) -> Mapping[str, Any] | None:
        if type(module) is nn.LayerNorm:
            raise error
        return None

    add(Adapter("acme norm", Linear, recognise))
    model = mlp()
    expected = model(x)
    report = graft(model)
    (row,) = (row for row in report.left_alone if row.source == "LayerNorm")
    assert row.reason == f"adapter 'acme norm' of acme-npu 2.0 raised {described(error)}"
    assert len(report.replaced) == 5
    torch.testing.assert_close(model(x), expected)


def test_strict_mode_raises_and_changes_nothing(mlp, monkeypatch) -> None:
    """In strict mode the same is an error, and the model is as it was."""
    monkeypatch.setenv("OPGRAFT_STRICT", "1")
    reset()

    def recognise(module: nn.Module) -> Mapping[str, Any] | None:
        raise SystemExit(3)

    add(Adapter("acme", Linear, recognise))
    model = mlp()
    before = snapshot(model)
    with pytest.raises(
        GraftError, match=r"strict mode: adapter 'acme' of acme-npu 2.0 raised SystemExit: 3"
    ):
        graft(model)
    assert snapshot(model) == before


def test_an_error_while_the_plan_is_carried_out_takes_it_back(monkeypatch) -> None:
    """Nothing stays half grafted, whatever raises."""
    model = gated()
    before, tensors = [*model.modules()], [(p, p.detach().clone()) for p in model.parameters()]

    def join(layer: Any) -> None:
        if not layer.gate.weight.is_meta:
            raise MemoryError("no memory for both")

    monkeypatch.setattr("opgraft.ops.composites.joint.JointLayer.join", join)
    with pytest.raises(MemoryError, match="no memory"):
        graft(model)
    assert [*model.modules()] == before
    for now, (parameter, values) in zip(model.parameters(), tensors, strict=True):
        assert now is parameter
        assert torch.equal(now, values)
    monkeypatch.undo()
    assert graft(model).replaced


def test_an_adapter_sees_children_as_the_ops_that_they_become() -> None:
    """What is recognised of a module may depend on its children, and looking at them leaves the model as it is."""
    seen: list[type] = []

    def recognise(module: nn.Module) -> Mapping[str, Any] | None:
        if type(module) is nn.Sequential:
            seen.extend(type(child) for child in module.children())
            module._modules.clear()
            raise LeaveAlone("only looking")
        return None

    add(Adapter("acme", Linear, recognise))
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    graft(model, dry_run=True)
    assert issubclass(seen[0], Linear)
    assert seen[1] is nn.Dropout
    assert [type(child) for child in model[0]] == [nn.Linear, nn.Dropout]


def test_notes_for_code_that_looks_for_exact_classes() -> None:
    """quantize_dynamic finds no linear layer in a grafted model: the report says so, and what to do."""
    model = gated()
    report = graft(model, dry_run=True)
    assert (
        report.notes[0]
        == "quantize_dynamic and other code for torch.nn.Linear does not find the 4 that became ops: "
        "call such code before graft"
    )
    assert "quantize_dynamic" in str(report)
    assert report.to_dict()["notes"] == [*report.notes]
    assert graft(nn.Sequential(nn.SiLU())).notes == ()


def noted_for_freezing(model: nn.Module) -> list[str]:
    """The notes of graft about opgraft.freeze."""
    return [note for note in graft(model).notes if "opgraft.freeze(model)" in note]


def test_a_note_where_freezing_helps() -> None:
    """The note counts linear layers whose kernels gain by a copy of a weight that is not frozen yet."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 4096), nn.Linear(2, 2), nn.GELU()).eval()

    helps = packed.missing() is None
    assert [note.split(", as long")[0] for note in noted_for_freezing(model())] == (
        [
            "opgraft.freeze(model) lets kernels keep faster copies of the weights of 1 of the linear layers"
        ]
        if helps
        else []
    )
    frozen = model()
    freeze(frozen)
    assert noted_for_freezing(frozen) == []
    assert noted_for_freezing(model().train()) == []
    assert noted_for_freezing(model().double()) == []
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        assert noted_for_freezing(model()) == []


def test_a_report_in_a_notebook() -> None:
    """The report has a short repr, and tables of HTML in which foreign text is escaped."""
    report = GraftReport((), (LeftAlone("a", "<Odd>", "no & none"),), ("a <note>",), applied=False)
    assert repr(report) == "<GraftReport: 0 modules would be replaced, 1 left alone>"
    shown = report._repr_html_()
    for text in ("&lt;Odd&gt;", "no &amp; none", "a &lt;note&gt;", "<table>"):
        assert text in shown
    assert "<Odd>" not in shown
    assert graft(gated())._repr_html_().count("<table>") >= 1


def test_a_note_leads_to_what_compilers_get() -> None:
    """Ops that fall back under a compiler are counted, and explain(model) says how each does."""
    model = gated()
    notes = graft(model).notes
    expected = "other code runs in place of 5 of the ops under a compiler or an export"
    assert f"{expected}: opgraft.explain(model) shows which" in notes
    said = str(explain(model))
    assert (
        "while a compiler traces, gate, up and the activation are computed one after the other"
        in said
    )
    assert "under torch.export and torch.jit.trace torch's own linear runs" in said
