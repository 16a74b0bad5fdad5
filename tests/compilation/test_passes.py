"""Passes over graphs: what they find, that the numbers stay, and what a pass that breaks a graph is told."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.compilation.graph_pass import GraphPass, PassOutcome
from opgraft.compilation.passes import BUILT_IN
from opgraft.config import text_of
from opgraft.errors import CompilationError, ConfigError
from opgraft.ops import RMSNorm
from support.blocks import WIDTH, Block
from torch import Tensor, fx, nn

EAGER = CompilationConfig(backend="eager")


def compiled_for(model: nn.Module, *passes: Any) -> opgraft.Compiled:
    """The model compiled by the backend eager, with passes of this file besides opgraft's own."""
    names = [f"{__name__}:{each}" if isinstance(each, str) else each for each in passes]
    compiled = opgraft.compile(
        model.eval(),
        CompilationConfig(backend="eager", user_passes=names),
        args=(torch.randn(3, 5, WIDTH),),
    )
    assert isinstance(compiled, opgraft.Compiled)
    return compiled


def counts(compiled: opgraft.Compiled, name: str) -> tuple[int, int]:
    (report,) = (report for report in compiled.passes if report.name == name)
    return report.matched, report.replaced


def targets(compiled: opgraft.Compiled) -> Counter[str]:
    """The operators of a graph by name, without overload."""
    names = [
        str(node.target).split(".")
        for node in compiled.graph.graph.nodes
        if node.op == "call_function"
    ]
    return Counter(parts[1] for parts in names if len(parts) > 1)


class Reshaping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(x.shape).to(torch.float32)[:, 0:].expand(x.shape[0], 5, WIDTH).contiguous()
        return (y.to(torch.float64) * 2).reshape(x.shape[0], -1)


def test_what_changes_nothing_is_removed() -> None:
    """Reshapes, casts, slices and expansions to what a tensor is go; a cast and a reshape that change it stay."""
    model, x = Reshaping(), torch.randn(4, 5, WIDTH)
    compiled = compiled_for(model)
    matched, replaced = counts(compiled, "no_ops")
    assert matched == replaced >= 4
    assert targets(compiled) - Counter(("sym_size", "sym_size")) == Counter(
        ("to", "mul", "reshape")
    )
    assert torch.equal(compiled(x), model(x))


class CopyingFirst(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own, kept, read = x * 2, x.clone(), x * 3
        written = read.clone().add_(1)
        return own.clone().mul_(x), kept.add_(written) + read


def test_needless_copies_are_removed() -> None:
    """A copy of memory that nobody else reads goes; one of an input, and one of what is read again, stay."""
    model, x = CopyingFirst(), torch.randn(4, 5, WIDTH)
    compiled = compiled_for(model)
    assert counts(compiled, "copies") == (3, 1)
    assert targets(compiled)["clone"] == 2
    before = x.clone()
    for found, expected in zip(compiled(x), model(x), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(x, before)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(WIDTH, eps=eps) for eps in (1e-2, 1e-6, 0.5)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.norms[0](x)
        residual = x + first
        second = self.norms[1](residual)
        broadcast = self.norms[2](second + residual[:, :1])
        scaled = self.norms[2](torch.add(residual, second, alpha=2))
        return residual, second, broadcast, scaled


def test_sums_and_norms_are_joined() -> None:
    """The sum of two tensors and its norm become one node with the norm's epsilon; of other sums they stay apart."""
    model, x = Residuals(), torch.randn(4, 5, WIDTH)
    compiled = compiled_for(model)
    assert counts(compiled, "add_rms_norm") == (1, 1)
    assert (targets(compiled)["fused_add_rms_norm"], targets(compiled)["rms_norm"]) == (1, 3)
    (fused,) = (node for node in compiled.graph.graph.nodes if "fused_add" in str(node.target))
    assert fused.args[3] == 1e-6
    for found, expected in zip(compiled(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gate_and_up_are_joined(block: Block, x: Tensor) -> None:
    """Gate, up and their product are one linear map over the memory of both, whose writes it sees, and one form."""
    compiled = opgraft.compile(block, EAGER, args=(x,))
    assert counts(compiled, "gated_product") == (1, 1)
    assert (
        targets(compiled)["linear"],
        targets(compiled)["silu_and_mul"],
        targets(compiled)["silu"],
    ) == (2, 1, 0)
    block.mlp.get_submodule("up").weight.mul_(2)
    torch.testing.assert_close(compiled(x)["normed"], block(x)["normed"], rtol=1e-5, atol=1e-5)


def test_joint_weights_that_have_moved_are_noticed(block: Block, x: Tensor) -> None:
    """Where gate or up is given other memory, the joint weight of a graph is not theirs any more: an error."""
    compiled = opgraft.compile(block, EAGER, args=(x,))
    up = block.mlp.get_submodule("up").weight
    up.data = up.data.clone()
    with pytest.raises(CompilationError, match=r"weights .* have moved .* compile it anew"):
        compiled(x)


def test_gate_and_up_of_separate_memory_stay_apart(block: Block, x: Tensor) -> None:
    """Weights that do not lie together are not copied: the pass says that it has found and not changed them."""
    gate = block.mlp.get_submodule("gate")
    gate.weight = nn.Parameter(gate.weight.clone(), requires_grad=False)
    compiled = opgraft.compile(block, EAGER, args=(x,))
    assert counts(compiled, "gated_product") == (1, 0)
    torch.testing.assert_close(compiled(x)["normed"], block(x)["normed"], rtol=1e-5, atol=1e-5)


class Doubling(GraphPass):
    name: ClassVar[str] = "doubling"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        (results,) = output.args
        with module.graph.inserting_before(output):
            output.args = (
                tuple(
                    module.graph.call_function(torch.ops.aten.mul.Tensor, (r, 2.0)) for r in results
                ),
            )
        return PassOutcome(len(results), len(results))


class OtherSizes(Doubling):
    name: ClassVar[str] = "other_sizes"

    def applies(self, sizes: range) -> bool:
        return 1 not in sizes


class Raising(Doubling):
    name: ClassVar[str] = "raising"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        raise KeyError("of the pass")


class Narrowing(Doubling):
    name: ClassVar[str] = "narrowing"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
            with module.graph.inserting_after(node):
                cut = module.graph.call_function(torch.ops.aten.slice.Tensor, (node, 1, 0, 2))
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
        return PassOutcome(1, 1)


def _double(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    return module.graph.call_function(
        torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float64}
    )


class Casting(Doubling):
    name: ClassVar[str] = "casting"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        (results,) = output.args
        with module.graph.inserting_before(output):
            output.args = (tuple(_double(module, each) for each in results),)
        return PassOutcome(1, 1)


class Unused(Doubling):
    name: ClassVar[str] = "unused"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        module.graph.placeholder("more")
        return PassOutcome(1, 1)


class Texts(Doubling):
    name: ClassVar[str] = "texts"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        return PassOutcome(*"ab")  # type: ignore[arg-type]


class Choosy(Doubling):
    name: ClassVar[str] = "choosy"

    def applies(self, sizes: range) -> bool:
        raise KeyError("of applies")


class Unread(OtherSizes):
    name: ClassVar[str] = "unread"

    def applies(self, sizes: range) -> bool:
        return True

    def source_hash(self) -> str:
        raise OSError("no source")


class Nameless(GraphPass):
    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        return PassOutcome(0, 0)


class Disordering(Doubling):
    name: ClassVar[str] = "disordering"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        nodes[-1].append(nodes[0])
        return PassOutcome(1, 1)


def test_passes_of_a_user_run_after_the_others() -> None:
    """A pass of another module runs last, is told apart by a hash of its source, and only where it applies."""
    model, x = Residuals(), torch.randn(4, 5, WIDTH)
    plain = compiled_for(model)
    with pytest.raises(CompilationError, match="differs from the model itself"):
        compiled_for(model, "Doubling")
    config = CompilationConfig(backend="eager", user_passes=[f"{__name__}:Doubling"])
    with pytest.raises(
        CompilationError,
        match=r"the pass doubling .* changes values: .* by more than rounding: where it draws",
    ):
        opgraft.compile(model.eval(), config, args=(x,), dynamic_shapes=(None,))
    compiled = compiled_for(model, "OtherSizes")
    assert [report.name for report in compiled.passes] == [
        each.name for each in BUILT_IN if each.is_default
    ]
    assert re.fullmatch("[0-9a-f]{12}", plain.passes[0].source_hash)
    assert Doubling().source_hash() != plain.passes[0].source_hash
    assert torch.equal(compiled(x)[0], plain(x)[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Raising",
            r"the pass raising \(.*Raising\) breaks the graph of Residuals: KeyError: 'of the pass'",
        ),
        (
            "Narrowing",
            "the pass narrowing .* breaks the graph of Residuals: ValueError: .* returned",
        ),
        (
            "Casting",
            "the pass casting .* breaks the graph of Residuals: ValueError: output returns .*float64",
        ),
        (
            "Unused",
            "the pass unused .* breaks the graph of Residuals: ValueError: its placeholder nodes are ",
        ),
        (
            "Texts",
            "the pass texts .* breaks the graph of Residuals: TypeError: 'str' object cannot be interpreted",
        ),
        ("Choosy", "the pass choosy .* breaks the graph of Residuals: KeyError: 'of applies'"),
        ("Unread", "the pass unread .* breaks the graph of Residuals: OSError: no source"),
        (
            "Disordering",
            "the pass disordering .* breaks the graph of Residuals: .*before it has been defined",
        ),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(name: str, message: str) -> None:
    """A pass that raises, or leaves other inputs, shapes, dtypes or nodes in no order, is an error with its name."""
    with pytest.raises(CompilationError, match=message):
        compiled_for(Residuals(), name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", "cannot be constructed"),
        ("Residuals", "no opgraft.GraphPass"),
        ("Nameless", "whose name is no text"),
    ],
)
def test_names_that_lead_to_no_pass(name: str, message: str) -> None:
    """A name without a class behind it, or with one that is no pass, is an error of the setting."""
    with pytest.raises(ConfigError, match=f"user_passes has .*{name}.* {message}"):
        compiled_for(Residuals(), name)


class Scaling(Doubling):
    """Multiplies the results by a number of its own."""

    name: ClassVar[str] = "scaling"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        (results,) = output.args
        multiply = torch.ops.aten.mul.Tensor
        with module.graph.inserting_before(output):
            scaled = [module.graph.call_function(multiply, (r, self.factor)) for r in results]
        output.args = (tuple(scaled),)
        return PassOutcome(len(results), len(results))


@pytest.mark.parametrize("given", [OtherSizes, OtherSizes(), Scaling(1.0)])
def test_a_class_or_an_object_is_a_pass(given: Any) -> None:
    """The settings take a class, which is constructed, and an object, which keeps its state."""
    model, x = Residuals(), torch.randn(4, 5, WIDTH)
    compiled = compiled_for(model, given)
    names = [report.name for report in compiled.passes]
    assert ("scaling" in names) == isinstance(given, Scaling)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Scaling, "Scaling.*cannot be constructed: TypeError"),
        (Residuals, "Residuals.*no opgraft.GraphPass"),
        (Nameless(), "Nameless.*whose name is no text"),
        (object(), "object.*no opgraft.GraphPass"),
        (3, "user_passes is .3.: use a list of strings, or in Python of classes and objects"),
    ],
)
def test_a_class_or_an_object_that_is_no_pass(given: Any, message: str) -> None:
    """A class that is no pass, an object that is none, and plain data are errors of the setting."""
    with pytest.raises(ConfigError, match=message):
        compiled_for(Residuals(), given)


def test_a_config_with_passes_is_shown_by_their_classes() -> None:
    """Classes and objects are shown as module:Class, as text names them."""
    shown = text_of((Doubling, Scaling(2.0), "a:B"))
    assert shown == f'["{__name__}:Doubling", "{__name__}:Scaling", "a:B"]'


@pytest.mark.parametrize("passes", [(OtherSizes, Scaling(3.0), Scaling(1.0)), (Doubling,)])
def test_a_pass_that_changes_values_is_named(passes: tuple[Any, ...]) -> None:
    """The error names the first pass after which the graph computes something else, and the setting."""
    name = "doubling" if Doubling in passes else "scaling"
    message = rf"the pass {name} \(.*{name.title()}\) changes values: .*differs from the model itself.*user_passes"
    with pytest.raises(CompilationError, match=message):
        compiled_for(Residuals(), *passes)


def test_a_model_that_differs_by_itself_is_no_fault_of_a_pass() -> None:
    """A model that computes something else the next time is told as before, without the name of a pass."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    with pytest.raises(CompilationError, match=r"^Counting compiled differs from the model itself"):
        compiled_for(Counting(), OtherSizes)


def test_graphs_are_written_down(tmp_path: Path) -> None:
    """The folder has the graph before the first pass and after each; one that cannot be written to is an error."""
    config = CompilationConfig(backend="eager", dump_graphs=str(tmp_path / "graphs"))
    example = (torch.randn(3, 5, WIDTH),)
    compiled = opgraft.compile(Residuals().eval(), config, args=example)
    files = sorted(tmp_path.glob("graphs/*"))
    steps = ["captured", *(report.name for report in compiled.passes)]
    assert [file.name for file in files] == [
        f"{number:02}-{step}.txt" for number, step in enumerate(steps)
    ]
    assert "fused_add_rms_norm" not in files[0].read_text()
    assert "fused_add_rms_norm" in files[-1].read_text()
    (tmp_path / "file").write_text("")
    unwritable = CompilationConfig(backend="eager", dump_graphs=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"graphs cannot be written to the folder .*file"):
        opgraft.compile(Residuals().eval(), unwritable, args=example)
