"""``opgraft.explain``: the table of a built model is what its ops run."""

from __future__ import annotations

from typing import Any

import opgraft
import pytest
import torch
from opgraft.functional import linear
from opgraft.ops import (
    GELU,
    ColumnParallelLinear,
    GatedMLP,
    Linear,
    RMSNorm,
    RowParallelLinear,
    SiLU,
)
from opgraft.ops.attention import Attention, AttentionBatch, attending
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from torch import nn


def model() -> nn.Module:
    return nn.ModuleDict(
        {"norm": RMSNorm(8), "act": GELU(), "inner": nn.Sequential(nn.Linear(8, 8), RMSNorm(8))}
    )


def test_each_op_is_a_row_with_its_kernel_provider_and_reason() -> None:
    """Path, op, class, kernel, provider and reason are those of the module at that path; other modules have no row."""
    built = model()
    explanation = opgraft.explain(built)
    assert [row.path for row in explanation.rows] == ["norm", "act", "inner.1"]
    for row in explanation.rows:
        op = built.get_submodule(row.path)
        assert row.kernel == op.decision.chosen
        assert op.decision.reason in row.reason
        assert str(row.provider).startswith("opgraft ")
    assert explanation.to_dict()["ops"][0] == {
        "path": "norm",
        "op": "rms_norm",
        "class": "RMSNorm",
        "kernel": explanation.rows[0].kernel,
        "provider": explanation.rows[0].provider.to_dict(),
        "reason": explanation.rows[0].reason,
        "runs": True,
    }


def test_a_replacement_is_told_as_it_was_built() -> None:
    """An op that was built before a replacement keeps its row; one that was built after has the replacement's."""

    class Fast(RMSNorm):
        @opgraft.inference_only
        def forward_oot(self, x, residual=None):
            return x

    before = RMSNorm(8)
    RMSNorm.register_oot(Fast)
    old, new = opgraft.explain(nn.Sequential(before, RMSNorm(8))).rows
    assert old.op_class == "RMSNorm"
    assert new.op_class.endswith("Fast")
    assert new.kernel.endswith("Fast.forward_oot")
    assert "forward_native runs where a gradient is required" in new.reason
    assert new.provider.name == __name__.partition(".")[0]


def test_what_hides_a_kernel_is_the_reason() -> None:
    """A forward that was put on the instance is what runs, and the row says so."""
    op = RMSNorm(8)
    op.forward = lambda x: x
    (row,) = opgraft.explain(op).rows
    assert row.path == ""
    assert (
        row.reason
        == "its forward was replaced on the instance, which hides whatever its class binds"
    )


def test_it_prints_as_a_table() -> None:
    """Printed, equal ops are one line with their count and the first path, and each reason is told once."""
    text = str(opgraft.explain(model()))
    lines = text.splitlines()
    assert lines[0].split() == ["count", "op", "class", "kernel", "provider", "the", "first"]
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:3]] == [
        ("2", "norm"),
        ("1", "act"),
    ]
    assert lines[3] == ""
    assert any(line.startswith("2 x RMSNorm.") for line in lines)
    assert (
        str(opgraft.explain(nn.Linear(2, 2)))
        == "no module of this model is an op: see opgraft.graft"
    )


@pytest.mark.parametrize("act_is_watched", [False, True])
def test_an_op_that_a_composite_absorbs(act_is_watched: bool) -> None:
    """The activation of a gated MLP is not said to run, unless it does or stands in another place too."""
    act = SiLU()
    calls = []
    if act_is_watched:
        act.register_forward_hook(lambda *arguments: calls.append(1))
    mlp = GatedMLP(8, 8, act=act).eval()
    with torch.inference_mode():
        mlp(torch.ones(2, 8))
    explanation = opgraft.explain(nn.ModuleDict({"mlp": mlp}))
    runs = {row.path: row.runs for row in explanation.rows}
    assert runs["mlp.act_fn"] == bool(calls) == act_is_watched
    assert runs["mlp.act_and_mul"] != act_is_watched
    assert runs["mlp"]
    assert runs["mlp.down_proj"]
    spared = "SiluAndMul as act_and_mul" if act_is_watched else "SiLU as act_fn"
    assert f"1 x {spared}: not run, as the layer that it is in does its work" in str(explanation)
    assert all(
        row.runs for row in opgraft.explain(nn.Sequential(mlp, act)).rows if row.op == "silu"
    )


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        ({}, "a value of type dict"),
        ("text" * 1000, "a value of type str"),
        (nn.Linear, "the class Linear"),
    ],
)
@pytest.mark.parametrize(
    "function", [opgraft.explain, opgraft.rebind, opgraft.graft, opgraft.ungraft, opgraft.freeze]
)
def test_something_else_than_a_module_is_refused(function, thing: object, named: str) -> None:
    """The error names the type, as a repr may be endless."""
    with pytest.raises(
        TypeError, match=rf"{function.__name__} was given {named}, expected a torch\.nn\.Module"
    ):
        function(thing)


class CountingLinear(Linear):
    """A kernel as a method alone."""

    calls = 0

    def forward_oot(self, input, residual=None):
        type(self).calls += 1
        return super().forward_oot(input, residual)


def test_a_form_without_a_function_is_shown_as_native() -> None:
    """A layer that calls a form runs the form's own definition if a replacement brings a method alone."""
    Linear.register_oot(CountingLinear)
    layer = ColumnParallelLinear(8, 8, bias=False, return_bias=False)
    explanation = opgraft.explain(layer)
    with torch.inference_mode():
        layer(torch.ones(2, 8))
    assert CountingLinear.calls == 0
    assert "CountingLinear" not in str(explanation)
    (row,) = [row for row in explanation.rows if row.op == "linear"]
    assert (row.kernel, row.op_class, row.provider.name) == ("linear.native", "Linear", "opgraft")
    assert row.reason.startswith("the layer calls opgraft.functional.linear, for which tests ")


def test_a_form_with_a_function_is_shown_as_the_plugins() -> None:
    """The same layer runs the function that a replacement brings, and its row names the replacement."""
    calls = []

    def mapped(x, weight, bias=None, activation="none", residual=None):
        calls.append(tuple(x.shape))
        return linear.native(x, weight, bias, activation, residual)

    class Functional(Linear):
        functional_oot = opgraft.FunctionalKernels({"linear": mapped})

    Linear.register_oot(Functional)
    layer = ColumnParallelLinear(8, 8, bias=False, return_bias=False)
    (row,) = [row for row in opgraft.explain(layer).rows if row.op == "linear"]
    with torch.inference_mode():
        layer(torch.ones(2, 8))
        Linear(8, 4)(torch.ones(3, 8))
    assert calls == [(2, 8), (3, 8)]
    assert row.kernel.endswith("Functional.forward_oot")
    assert row.provider.name == __name__.partition(".")[0]


def _paged(query: Any, key: Any, value: Any) -> Any:
    return query


def _through_a_helper(layer: Any, key: Any, value: Any, pages: Any) -> None:
    layer.write(key, value, pages.cache, pages.slots)


class OwnForward(Attention):
    def forward(self, query, key, value):
        return _paged(query, key, value)


class OwnBatch(Attention):
    def attend_batch(self, batch, pages, query, key, value):
        return query


class OwnPages(Attention):
    def attend_batch(self, batch, pages, query, key, value):
        _through_a_helper(self, key, value, pages)
        return query


class NextForward(Attention):
    def forward(self, query, key, value):
        return super().forward(query, key, value)


class NextKernel(Attention):
    def forward_oot(self, query, key, value):
        return super().forward_oot(query, key, value)


class ByName(Attention):
    def forward(self, query, key, value):
        for name in ("wri" + "te",):
            getattr(self, name)
        return query


class OnlyRead(Attention):
    def forward(self, query, key, value):
        if self.write is None:
            raise TypeError
        if self.attend_pages:
            return self.attend_pages.weight * query
        return query


class OnlyAsked(Attention):
    def forward(self, query, key, value):
        if not isinstance(self.write, torch.nn.Module) or self.attend_pages.training:
            raise TypeError
        return query


class AskedForTheResult(Attention):
    def forward(self, query, key, value):
        if isinstance(self.write(key, value, None, None), torch.Tensor):
            raise TypeError
        return query


class OwnIdle(OwnForward):
    def idle(self) -> frozenset[str]:
        return frozenset({"attend", "write"})


def test_a_weight_method_that_a_replacement_only_tests() -> None:
    """The layer calls no linear form if its code only compares the weight method, as vLLM's does."""

    class OwnProduct(RowParallelLinear):
        def forward(self, input_):
            if self.quant_method is None:
                raise TypeError
            return torch.nn.functional.linear(input_, self.weight), None

    class Checking(RowParallelLinear):
        def forward(self, input_):
            if not isinstance(self.quant_method, UnquantizedLinearMethod):
                raise TypeError
            name = type(self.quant_method).__name__
            if not hasattr(self.quant_method, "apply"):
                raise TypeError(name)
            return torch.nn.functional.linear(input_, self.weight), None

    class Applying(RowParallelLinear):
        def forward(self, input_):
            if self.quant_method is None:
                raise TypeError
            return self.quant_method.apply(self, input_), None

    for replacement, number in ((OwnProduct, 0), (Checking, 0), (Applying, 1)):
        opgraft.reset()
        RowParallelLinear.register_oot(replacement)
        explained = opgraft.explain(RowParallelLinear(8, 8, bias=False))
        assert [row.op for row in explained.rows].count("linear") == number


@pytest.mark.parametrize(
    ("replacement", "running"),
    [
        (OwnForward, set()),
        (OwnBatch, set()),
        (OwnPages, {"write"}),
        (NextForward, {"write", "attend_pages"}),
        (NextKernel, {"write", "attend_pages"}),
        (ByName, {"write", "attend_pages"}),
        (OnlyRead, set()),
        (OnlyAsked, set()),
        (AskedForTheResult, {"write"}),
        (OwnIdle, {"attend_pages"}),
    ],
)
def test_children_that_a_replacement_does_not_call_do_not_run(
    replacement: type, running: set[str]
) -> None:
    """A child runs if the code of the replacement names it, or may; ``idle`` of the replacement decides."""
    Attention.register_oot(replacement)
    layer = Attention(2, 8, 1.0, prefix="layer")
    with attending(AttentionBatch.of_sequences([], block_size=4)):
        rows = opgraft.explain(layer).rows
    assert {row.path for row in rows if row.runs} == {"", *running}


class OwnMLP(GatedMLP):
    def forward(self, x):
        joint = self.gate_up_proj(x)
        gate, up = joint.chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


def test_a_child_that_only_the_replacement_calls_runs() -> None:
    """What the replaced layer leaves idle runs if the replacement's own forward calls it."""
    GatedMLP.register_oot(OwnMLP)
    explained = opgraft.explain(GatedMLP(8, 8, act=SiLU()))
    runs = {row.path: row.runs for row in explained.rows}
    assert runs["act_fn"]
    assert not runs["act_and_mul"]


class OwnColumns(ColumnParallelLinear):
    def forward(self, input_):
        return torch.mm(input_, self.weight.T)


class CountedColumns(ColumnParallelLinear):
    def forward(self, input_):
        return super().forward(input_)


@pytest.mark.parametrize(("replacement", "forms"), [(OwnColumns, []), (CountedColumns, ["linear"])])
def test_the_form_of_a_replaced_layer(replacement: type, forms: list[str]) -> None:
    """A replacement that computes by itself calls no form; one that calls the layer's forward does."""
    ColumnParallelLinear.register_oot(replacement)
    layer = ColumnParallelLinear(8, 8, bias=False, return_bias=False)
    assert [row.op for row in opgraft.explain(layer).rows][1:] == forms
