"""``opgraft.compile``: capture, lowering, backends, and inputs that do not fit."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy
import opgraft
import pytest
import torch
from opgraft import CompilationConfig, CompilationMode, OpgraftConfig, functional
from opgraft.compilation.description import modules_of
from opgraft.errors import CompilationError, ConfigError, RecompilationError
from opgraft.ops import RMSNorm
from support.blocks import WIDTH, Block
from torch import fx, nn

EAGER = CompilationConfig(backend="eager")


def semantic(compiled: opgraft.Compiled) -> Counter[str]:
    """The semantic nodes of a graph by their names."""
    targets = [str(node.target) for node in compiled.graph.graph.nodes]
    return Counter(name.split(".")[1] for name in targets if name.startswith("opgraft."))


def lowering(compiled: opgraft.Compiled, form: str) -> opgraft.Decision:
    (decision,) = (
        part for part in compiled.decision.parts if part.subject == f"lowering of {form}"
    )
    return decision


def expect_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("custom_ops", ["all", "none"])
def test_one_graph_serves_every_size(
    block: Block, x: torch.Tensor, counting: list[fx.GraphModule], custom_ops: str
) -> None:
    """One graph of semantic nodes, whether ops are enabled or not, gives what the model gives for 50 batch sizes."""
    kinds = [type(module) for module in block.modules()]
    config = CompilationConfig(backend="counting", custom_ops=[custom_ops])
    compiled = opgraft.compile(block, config, args=(x,))
    assert {name: count for name, count in semantic(compiled).items() if "norm" in name} == {
        "rms_norm": 1,
        "fused_add_rms_norm": 1,
    }
    assert semantic(compiled)["linear"] == 2
    for size in range(1, 51):
        batch = torch.randn(size, 5, WIDTH)
        expect_equal(compiled(batch), block(batch))
    assert len(counting) == 1
    assert [type(module) for module in block.modules()] == kinds


def test_ops_made_after_a_capture_are_of_the_same_classes(
    block: Block, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """What a capture notes in classes of ops is no change by a plugin: nobody is named, no class is made anew."""
    opgraft.compile(block, EAGER, args=(x,))
    again = Block()
    assert [type(module) for module in again.modules()] == [type(each) for each in block.modules()]
    assert "assigned to" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*script_method.*")
def test_inductor_generates_code_for_every_size(block: Block, x: torch.Tensor) -> None:
    """Inductor is given the whole graph at once, and its code serves any size of the batch."""
    compiled = opgraft.compile(block, CompilationConfig(backend="inductor"), args=(x,))
    for size in (1, 2, 50):
        batch = torch.randn(size, 5, WIDTH)
        expect_equal(compiled(batch), block(batch))


def test_export_comes_first(block: Block, x: torch.Tensor) -> None:
    """The decision says that torch.export has captured the model, and that nothing else was tried."""
    decision = opgraft.compile(block, EAGER, args=(x,)).decision.parts[0]
    assert decision.chosen == "torch.export"
    assert [(c.name, c.accepted, c.reason) for c in decision.candidates][1:] == [
        ("Dynamo", False, "not needed")
    ]


class ThroughNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.maximum(x.numpy(), 0)) * 2


def test_dynamo_captures_what_export_cannot() -> None:
    """Where code leaves torch, Dynamo captures it, and the decision has export's reason."""
    model, x = ThroughNumpy().eval(), torch.randn(3, 4)
    compiled = opgraft.compile(model, EAGER, args=(x,))
    for size in (1, 2, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), model(x))
    decision = compiled.decision.parts[0]
    assert decision.chosen == "Dynamo"
    (export,) = (candidate for candidate in decision.candidates if candidate.name == "torch.export")
    assert export.reason.startswith("failed: ")


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_branch_on_values_is_refused() -> None:
    """A model whose code depends on values has no graph; the error has the reasons of both ways to one."""
    with pytest.raises(
        CompilationError, match=r"Branching cannot be captured.*torch\.export: .*Dynamo: .*Next: "
    ):
        opgraft.compile(Branching().eval(), EAGER, args=(torch.randn(3, 4),))


def test_an_operator_without_a_fake_rule_is_named() -> None:
    """A graph needs to know what an operator returns without calling it; the error names the one that does not say."""
    with torch.library._scoped_library("opgraft_untold", "DEF") as library:
        library.define("untold(Tensor x) -> Tensor")
        library.impl("untold", lambda x: x + 1, "CPU")

        class Untold(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = torch.ops.opgraft_untold.untold(x)
                return found

        with pytest.raises(
            CompilationError, match=r"Untold cannot be captured.*opgraft_untold\.untold.*Next: "
        ):
            opgraft.compile(Untold().eval(), EAGER, args=(torch.randn(3, 4),))


class ApartForOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x


def test_a_batch_of_one_is_verified() -> None:
    """A model that computes something else for a batch of one is refused when it is compiled."""
    with pytest.raises(
        CompilationError, match=r"ApartForOne compiled differs .* where the dynamic size is 1"
    ):
        opgraft.compile(ApartForOne().eval(), EAGER, args=(torch.randn(3, 4),))


def test_verification_leaves_buffers_as_they_were() -> None:
    """A model that counts its calls in a buffer has counted none when it is compiled, and counts in its graph."""

    class Counting(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    model = Counting().eval()
    compiled = opgraft.compile(model, EAGER, args=(torch.zeros(2, 3),))
    assert model.calls.item() == 0
    assert compiled(torch.zeros(5, 3))[0, 0].item() == 1
    assert model.calls.item() == 1


def test_nodes_become_the_kernels_of_providers(block: Block, x: torch.Tensor) -> None:
    """A node whose op has a replacement with that form runs its kernel, and the decision names it."""
    calls = []

    def rms_norm(
        x: Any, weight: Any = None, eps: float = 1e-6, variance_size: Any = None
    ) -> torch.Tensor:
        calls.append(x.shape)
        return functional.rms_norm.native(x, weight, eps, variance_size) * 2

    class Doubled(RMSNorm):
        functional_oot = {"rms_norm": rms_norm}  # noqa: RUF012

    RMSNorm.register_oot(Doubled)
    replaced = Block().eval().requires_grad_(False)
    replaced.load_state_dict(block.state_dict())
    compiled = opgraft.compile(replaced, EAGER, args=(x,))
    calls.clear()
    found = compiled(x)
    assert calls == [x.shape] * 2
    expect_equal(found, replaced(x))
    assert semantic(compiled)["rms_norm"] == 2
    chosen = lowering(compiled, "rms_norm")
    assert str(chosen.chosen).endswith("Doubled.forward_oot")
    assert chosen.reason.startswith("2 nodes")
    assert lowering(compiled, "silu_and_mul").chosen == "silu_and_mul.native, inlined"


def test_a_method_without_a_form_stays_opaque(block: Block, x: torch.Tensor) -> None:
    """A replacement that is a method only is computed as it is, and shows no semantic node."""

    class Own(RMSNorm):
        def forward_oot(self, x: Any, residual: Any = None) -> Any:
            return x + 1

    RMSNorm.register_oot(Own)
    replaced = Block().eval().requires_grad_(False)
    compiled = opgraft.compile(replaced, EAGER, args=(x,))
    assert "rms_norm" not in semantic(compiled)
    expect_equal(compiled(x), replaced(x))


def test_writes_to_weights_are_seen(block: Block, x: torch.Tensor) -> None:
    """A compiled model computes with the parameters of the model as they are at a call."""
    compiled = opgraft.compile(block, EAGER, args=(x,))
    block.first.weight.mul_(3)
    block.mlp.get_submodule("down").weight.add_(1)
    expect_equal(compiled(x), block(x))


def test_modes(block: Block, x: torch.Tensor, counting: list[fx.GraphModule]) -> None:
    """NONE gives the model itself, STOCK_TORCH_COMPILE what torch.compile makes, DYNAMO_TRACE_ONCE a graph as it is."""

    def compiled(mode: CompilationMode) -> Any:
        return opgraft.compile(block, CompilationConfig(mode=mode, backend="counting"), args=(x,))

    assert compiled(CompilationMode.NONE) is block
    expect_equal(compiled(CompilationMode.STOCK_TORCH_COMPILE)(x), block(x))
    assert len(counting) == 1
    traced = compiled(CompilationMode.DYNAMO_TRACE_ONCE)
    for size in (1, 7):
        expect_equal(traced(x[:1].expand(size, -1, -1)), block(x[:1].expand(size, -1, -1)))
    assert len(counting) == 2
    assert traced.decision.parts[0].chosen == "Dynamo"
    assert not traced.passes


STOCK = CompilationConfig(mode=CompilationMode.STOCK_TORCH_COMPILE, backend="eager")
GUARDS = [
    (lambda x: x[:1], r"2 <= x\.size\(\)\[0\]"),
    (lambda x: x.double(), "tensor 'x' dtype mismatch. expected Float, actual Double"),
]


@pytest.mark.parametrize(("other", "guard"), GUARDS, ids=["size", "dtype"])
@pytest.mark.parametrize("example", [True, False])
def test_strict_mode_compiles_nothing_anew(other: Any, guard: str, example: bool) -> None:
    """A call that needs another graph of torch.compile after the warm-up is an error in strict mode, which names the
    guard and what to do; otherwise it is compiled. Any size from two on is served."""
    model, x = ThroughNumpy().eval(), torch.randn(3, 4)
    for strict in (True, False):
        with opgraft.set_config(OpgraftConfig(strict=strict)):
            compiled = opgraft.compile(model, STOCK, args=(x,) if example else ())
        for size in (3, 2, 9):
            y = torch.randn(size, 4)
            torch.testing.assert_close(compiled(y), model(y))
        if not strict:
            torch.testing.assert_close(compiled(other(x)), model(other(x)))
            continue
        message = (
            f"strict mode: ThroughNumpy would be .* guard fails: 0/0: {guard}. Next: .*mode to FULL"
        )
        with pytest.raises(RecompilationError, match=message):
            compiled(other(x))
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("strict", [True, False])
def test_strict_mode_has_no_programs_of_other_sizes(
    strict: bool, counting: list[fx.GraphModule]
) -> None:
    """A backend whose programs have fixed sizes makes those of the example and of a batch of one; in strict mode
    another one is an error, which says what to do."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    known = torch._dynamo.backends.registry._COMPILER_FNS  # as of the fixture, which sets them back
    known["openxla"] = known["counting"]
    with opgraft.set_config(OpgraftConfig(strict=strict)):
        compiled = opgraft.compile(model, CompilationConfig(level=2, backend="openxla"), args=(x,))
    for batch in (x, x[:1]):
        torch.testing.assert_close(compiled(batch), model(batch))
    assert len(counting) == 2
    other = torch.randn(7, 4)
    if strict:
        message = r"strict mode: the backend openxla would compile .* sizes \[\[7, 4\]\], .* OPGRAFT_STRICT=0"
        with pytest.raises(RecompilationError, match=message):
            compiled(other)
    else:
        torch.testing.assert_close(compiled(other), model(other))
    assert len(counting) == 3 - strict


def test_what_dynamo_captured_is_not_compiled_anew() -> None:
    """A graph that Dynamo captured is for its example's dtypes and any size, in strict mode as otherwise."""
    with opgraft.set_config(OpgraftConfig(strict=True)):
        compiled = opgraft.compile(ThroughNumpy().eval(), EAGER, args=(torch.randn(3, 4),))
    assert compiled.decision.parts[0].chosen == "Dynamo"
    assert compiled(torch.randn(1, 4)).shape == (1, 4)
    with pytest.raises(
        CompilationError, match=r"torch\.float64 on cpu for x, and was captured for torch\.float32"
    ):
        compiled(torch.randn(3, 4).double())


def test_errors_of_the_model_come_through_in_strict_mode() -> None:
    """What the model raises in a call is no recompilation, and the next call is served."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 4).sum(-1) if x.shape[1] == 4 else self.missing  # type: ignore[return-value]

    with opgraft.set_config(OpgraftConfig(strict=True)):
        compiled = opgraft.compile(Failing().eval(), STOCK)
        for _ in range(2):
            with pytest.raises(Exception, match="missing"):
                compiled(torch.randn(3, 5))
        assert compiled(torch.randn(3, 4)).shape == (3,)


def test_the_settings_that_hold_apply(
    block: Block, x: torch.Tensor, counting: list[fx.GraphModule]
) -> None:
    """Without a config of its own, a compilation takes the backend that is set."""
    with opgraft.set_config(
        OpgraftConfig(compilation_config=CompilationConfig(backend="counting"))
    ):
        opgraft.compile(block, args=(x,))
    assert len(counting) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c, x: c(x.double()),
            "called with torch.float64 on cpu for x, and was captured for torch.float32",
        ),
        (
            lambda c, x: c(x[:, :4]),
            r"called with the shape (3, 4, 16) for x, and was captured for [",
        ),
        (lambda c, x: c(x[0]), "called with the shape (5, 16) for x"),
        (lambda c, x: c(x[:0]), "none of them 0"),
        (lambda c, x: c(x, scale=3.0), "called with other arguments than its example had"),
        (lambda c, x: c(3), "called with 3 for x, and was captured for a tensor"),
        (lambda c, x: c(x.to_sparse()), "a tensor of the layout torch.sparse_coo for x"),
        (lambda c, x: c(x, 2), "called with 2 where its example had 2.0, which is a constant"),
        (lambda c, x: c(x, x), "where its example had 2.0, which is a constant of the graph"),
        (
            lambda c, x: c(x, 3.0),
            "called with 3.0 where its example had 2.0, which is a constant of the graph",
        ),
        (lambda c, x: c(x.clone().requires_grad_(), 2.0), "requires a gradient"),
        (
            lambda c, x: c.model.train() and c(x),
            "Block is in training mode, and was compiled in evaluation mode",
        ),
    ],
)
def test_calls_that_do_not_fit(block: Block, x: torch.Tensor, call: Any, message: str) -> None:
    """A call with other inputs than the graph was captured for says which, and what was expected."""
    scale = (2.0,) if "its example had 2.0" in message or "gradient" in message else ()
    compiled = opgraft.compile(block, EAGER, args=(x, *scale))
    compiled(x, *scale)  # which fits: what is known of it says nothing of another call
    with pytest.raises(CompilationError, match=re.escape(message)):
        call(compiled, x)


def test_autocast_is_refused(block: Block, x: torch.Tensor) -> None:
    """Under autocast a graph would compute in other dtypes than were captured."""
    compiled = opgraft.compile(block, EAGER, args=(x,))
    with torch.autocast("cpu"), pytest.raises(CompilationError, match="autocast"):
        compiled(x)


def test_what_cannot_be_compiled(block: Block, x: torch.Tensor) -> None:
    """Training mode, an example of one row, a backend that does not exist and one that fails are errors."""
    with pytest.raises(CompilationError, match=r"Block is in training mode.*call model\.eval\(\)"):
        opgraft.compile(Block().train(), EAGER, args=(x,))
    partly = Block().eval()
    partly.mlp.train()
    with pytest.raises(CompilationError, match=r"compile: mlp of Block is in training mode"):
        opgraft.compile(partly, EAGER, args=(x,))
    endless = Block().eval()
    endless.mlp.outer = endless
    assert opgraft.compile(endless, CompilationConfig(level=0), args=(x,)) is endless
    with pytest.raises(
        CompilationError, match=r"Block has no end of modules, .*: mlp\.outer\.mlp\.outer"
    ):
        modules_of(endless)
    with pytest.raises(TypeError, match="args of type list, expected a tuple"):
        opgraft.compile(block, EAGER, args=[x])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="config of type list: an example of the arguments is args="
    ):
        opgraft.compile(block, [x])  # type: ignore[arg-type]
    with pytest.raises(
        CompilationError, match=r"args= is missing: .*opgraft\.compile\(model, args=\(x,\)\)"
    ):
        opgraft.compile(block, EAGER)
    with pytest.raises(CompilationError, match=r"no call of Block\.forward: .*'y'"):
        opgraft.compile(block, EAGER, args=(x,), kwargs={"y": 1})
    with pytest.raises(CompilationError, match=r"shape \(1, 5, 16\).*give examples of two rows"):
        opgraft.compile(block, EAGER, args=(x[:1],))
    with pytest.raises(ConfigError, match=r"backend is 'inducter', .* did you mean 'inductor'\?"):
        opgraft.compile(block, CompilationConfig(backend="inducter"), args=(x,))
    torch._dynamo.register_backend(lambda module, example: 1 / 0, name="broken")
    with pytest.raises(
        CompilationError, match="backend broken fails on the graph: ZeroDivisionError"
    ):
        opgraft.compile(block, CompilationConfig(backend="broken"), args=(x,))
