"""Shadow mode: kernels compared with native definitions, on inputs of every kind, and at no cost where it is off."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CustomOp, OpgraftConfig, PluggableLayer, functional, set_config
from opgraft.binding.shadow import ShadowRow
from opgraft.config import ShadowConfig
from opgraft.ops import Linear, RMSNorm, ScaledDotProductAttention, SiluAndMul
from torch import nn

ALWAYS = OpgraftConfig(shadow=ShadowConfig(share=1))


def replaced(kernel: Any, target: Any = RMSNorm, **attributes: Any) -> Any:
    """Replace an op by one with this kernel."""
    return target.register_oot(type("Acme", (target,), {"forward_oot": kernel, **attributes}))


def row(op: str = "rms_norm") -> ShadowRow:
    """What shadow mode says of the one kernel of an op."""
    (found,) = [each for each in opgraft.shadow_report().rows if each.op == op]
    return found


@pytest.fixture
def always() -> Iterator[None]:
    """Every call is compared."""
    with set_config(ALWAYS):
        yield


def test_off_leaves_no_trace() -> None:
    """Without shadow mode an op runs the kernel itself, as a form does, and nothing is counted."""

    def fast(x: torch.Tensor) -> torch.Tensor:
        return functional.silu_and_mul.native(x)

    acme = replaced(lambda self, x: fast(x), SiluAndMul, functional_oot={"silu_and_mul": fast})
    op = SiluAndMul()
    assert type(op).forward is vars(acme)["forward_oot"]
    assert op.binding.kernel.winner.functional("silu_and_mul") is fast
    assert opgraft.shadow_report().rows == ()
    assert "share" in str(opgraft.shadow_report())


WRONG = {
    "values": (
        lambda y: y + 0.1,
        r"the result: 16 of 16 numbers are off .* of float32 \[2, 8\] it has .*, expected ",
    ),
    "one value": (
        lambda y: y.index_fill(0, torch.tensor(1), 7),
        r"8 of 16 numbers are off .* it has 7, expected",
    ),
    "dtype": (lambda y: y.double(), r"the result is float64 \[2, 8\].*, expected float32 \[2, 8\]"),
    "shape": (lambda y: y[:1], r"the result is float32 \[1, 8\].*, expected float32 \[2, 8\]"),
    "number": (lambda y: (y, y), "the result has 2 parts, expected 1"),
    "nothing": (lambda y: None, "the result is None, expected float32"),
    "not a number": (
        lambda y: y * float("nan"),
        r"16 of 16 numbers are off by .* at \[0, 0\] .* it has nan, expected",
    ),
}


@pytest.mark.parametrize("setting", [{"share": 1.0}, {"first_call": True}])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_found(
    case: str, setting: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong values, dtypes, shapes and numbers of results are logged once, with what the op was called with."""
    change, words = WRONG[case]
    replaced(lambda self, x, residual=None: change(self.forward_native(x, residual)))
    x = torch.randn(2, 8)
    with set_config(OpgraftConfig(shadow=ShadowConfig(**setting))):
        op = RMSNorm(8)
        for _ in range(3):
            op(x)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    (drift,) = [row().first_drift]
    assert record.getMessage().startswith("Acme.forward_oot of ")
    assert f"x: float32 [2, 8], from {x.min():.4g} to {x.max():.4g}" in drift
    assert vars(record)["opgraft.shadow.drift"] == drift
    assert pytest.approx(1 if "first_call" in setting else 3) == row().drifted
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(drift)


def test_a_right_kernel_is_not_blamed(always: None, caplog: pytest.LogCaptureFixture) -> None:
    """Sums in another order, of values of any size, stay within the tolerance; NaN and infinities are what they are."""

    def in_parts(
        self: Any, input: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts = zip(input.split(64, -1), self.weight.split(64, -1), strict=True)
        return sum(x @ w.T for x, w in parts) + self.bias  # type: ignore[return-value]

    replaced(in_parts, Linear)
    op = Linear(4096, 8)
    for scale in (1e-3, 1.0, 1e3):
        for dtype in (torch.float32, torch.bfloat16):
            op.to(dtype)(scale * torch.randn(4, 4096, dtype=dtype))
    op(torch.full((1, 4096), torch.inf, dtype=torch.bfloat16))
    assert (row("linear").compared, row("linear").drifted) == (7, 0), caplog.text


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.01])
def test_the_share_of_calls_is_compared_by_their_numbers(share: float) -> None:
    """The first call is compared, and then the same ones in each process: a share of all."""
    replaced(lambda self, x, residual=None: self.forward_native(x, residual))
    with set_config(OpgraftConfig(shadow=ShadowConfig(share=share))):
        op = RMSNorm(8)
        op(torch.randn(2, 8))
        assert row().compared == 1
        for _ in range(199):
            op(torch.randn(2, 8))
    assert (row().calls, row().compared) == (200, round(200 * share))


def test_the_first_call_of_each_choice_of_dtypes() -> None:
    """A kernel that is wrong for one dtype only is found by its first call with that."""
    replaced(
        lambda self, x, residual=None: (
            self.forward_native(x, residual) + (x.dtype == torch.bfloat16)
        )
    )
    with set_config(OpgraftConfig(shadow=ShadowConfig(first_call=True))):
        op = RMSNorm(8)
        for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
            op(torch.randn(2, 8, dtype=dtype))
    assert (row().calls, row().compared, row().drifted) == (4, 2, 1)


def test_threads_count_every_call(always: None) -> None:
    """Calls of many threads are all counted, and compared once each; the difference is logged once."""
    replaced(lambda self, x, residual=None: self.forward_native(x, residual) * 2)
    op = RMSNorm(8)
    x = torch.randn(2, 8)
    ready = threading.Barrier(8)

    def call() -> None:
        ready.wait()
        with set_config(ALWAYS):
            for _ in range(25):
                op(x)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (row().calls, row().compared, row().drifted) == (200, 200, 200)


@pytest.mark.parametrize("demote", [False, True])
def test_demotion(demote: bool) -> None:
    """With ``demote`` all ops of the kernel run the native definition from then on, which their decisions say."""
    replaced(lambda self, x, residual=None: self.forward_native(x, residual) + 1)
    with set_config(OpgraftConfig(shadow=ShadowConfig(share=1, demote=demote))):
        model = nn.ModuleList([RMSNorm(8), RMSNorm(8)])
        x = torch.randn(2, 8)
        expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
        model[0](x)
        for op in (*model, RMSNorm(8), functional.rms_norm):
            got = op(x) if op is not functional.rms_norm else op(x, torch.ones(8), 1e-6)
            right = torch.allclose(got, expected, atol=1e-5)
            assert right == (demote or op is functional.rms_norm)
        assert row().demoted == demote
        kinds = [type(op) for op in model]
        table = str(opgraft.explain(model))
        assert [type(op) for op in model] == kinds  # to tell of an op leaves it as it is
        assert (
            "shadow mode has found that Acme.forward_oot differs: the result" in table
        ) == demote
        assert ("RMSNorm.forward_native" in table) == demote
        assert f"{row().compared} of {row().calls} calls compared" in table or demote


def test_in_place_forms_run_on_copies(always: None) -> None:
    """What a form writes to its arguments is compared, and the arguments are written to once."""

    def norm_(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> None:
        functional.fused_add_rms_norm_.native(x, residual, *rest)
        if x.shape[0] == 3:
            residual.add_(1)

    def kernel(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return self.forward_native(x, residual)

    replaced(kernel, functional_oot={"fused_add_rms_norm_": norm_})
    weight = torch.rand(8)
    for tokens, drifted in ((2, 0), (3, 1)):
        x, residual = torch.randn(tokens, 8), torch.randn(tokens, 8)
        total = x + residual
        functional.fused_add_rms_norm_(x, residual, weight, 1e-6)
        torch.testing.assert_close(residual, total + (tokens == 3))
        torch.testing.assert_close(x, torch.nn.functional.rms_norm(total, (8,), weight, 1e-6))
        assert row().drifted == drifted
    assert "the argument residual: 24 of 24 numbers" in row().first_drift


def test_a_kernel_that_writes_to_what_it_should_only_read(always: None) -> None:
    """An argument that the native definition leaves as it is is compared too."""

    def kernel(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = self.forward_native(x)
        x.zero_()
        return result

    replaced(kernel, SiluAndMul)
    SiluAndMul()(torch.randn(2, 8))
    assert row("silu_and_mul").first_drift.startswith("the argument x: ")


def test_what_cannot_be_run_twice_is_left_out_with_the_reason(always: None) -> None:
    """Random results, writes to the op's own tensors, transforms and meta tensors are not compared, and it is said."""
    replaced(
        lambda self, *args, **kwargs: self.forward_native(*args, **kwargs),
        ScaledDotProductAttention,
    )
    attention = ScaledDotProductAttention()
    q = torch.randn(1, 2, 4, 8)
    before = torch.get_rng_state()
    first = attention(q, q, q, None, 0.5)
    torch.set_rng_state(before)
    torch.testing.assert_close(
        attention(q, q, q, None, 0.5), first
    )  # the second run has drawn nothing
    attention(*[q.to("meta")] * 3)
    remark = row("scaled_dot_product_attention").remark
    assert row("scaled_dot_product_attention").compared == 0
    replaced(lambda self, x: self.forward_native(x), SiluAndMul)
    torch.func.vmap(SiluAndMul())(torch.randn(3, 2, 8))
    for words in (
        "2 not compared: random numbers were drawn",
        "1 not compared: an argument is on the device meta",
    ):
        assert words in remark
    assert (
        "1 not compared: something follows its operators, such as torch.func"
        in row("silu_and_mul").remark
    )

    def counting(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        self.count.add_(1)
        return self.forward_native(x, residual)

    replaced(counting)
    op = RMSNorm(8)
    op.register_buffer("count", torch.zeros(()))
    op(torch.randn(2, 8))
    assert (
        row().remark
        == "1 not compared: it writes to count of its own, which a second run would find changed"
    )


def test_layers_that_may_keep_state_are_left_out(always: None) -> None:
    """A layer made of other ops, which may write to pages of a cache, is never run twice; the report says so."""

    @CustomOp.register("acme_layer")
    class Layer(PluggableLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    replaced(lambda self, x: x + 1, Layer)
    assert Layer()(torch.zeros(2)).sum() == 2
    assert row("acme_layer").compared == 0
    assert "may keep state, such as pages of a cache" in row("acme_layer").remark
    assert "no call is compared with the native definition: a layer" in str(Layer().decision)


def test_a_native_definition_that_raises_does_not_disturb_the_call(always: None) -> None:
    """The caller gets what the kernel computes; the reason is counted."""

    def native(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        raise ValueError("no")

    replaced(lambda self, x, residual=None: x, forward_native=native)
    assert RMSNorm(8)(torch.ones(2, 8)).sum() == 16
    assert (
        row().remark
        == "1 not compared: its native definition, or the comparison with it, raised ValueError: no"
    )


def test_gradients_pass_through_the_kernel(always: None) -> None:
    """The comparison records nothing, and leaves gradients to the kernel."""
    replaced(lambda self, x, residual=None: 3 * x)
    x = torch.randn(2, 8, requires_grad=True)
    RMSNorm(8)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 8), 3.0))


@pytest.mark.parametrize("form", [False, True])
def test_compiled_code_runs_without_a_shadow_and_heeds_a_demotion(form: bool) -> None:
    """A compiler traces the kernel alone, in one graph, which is reported; a demotion makes it trace anew."""

    def plus(x: torch.Tensor) -> torch.Tensor:
        return functional.silu_and_mul.native(x) + 1

    acme = {"functional_oot": {"silu_and_mul": plus}}
    replaced(lambda self, x: plus(x), SiluAndMul, **acme)
    with set_config(OpgraftConfig(shadow=ShadowConfig(share=1, demote=True))):
        op = functional.silu_and_mul if form else SiluAndMul()
        compiled = torch.compile(op, backend="eager", fullgraph=True)
        x = torch.randn(2, 8)
        expected = functional.silu_and_mul.native(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected + 1)
        assert (row("silu_and_mul").calls, row("silu_and_mul").compared) == (0, 0)
        assert "what was compiled is not compared" in row("silu_and_mul").remark
        op(x)  # outside of compiled code, where it is compared
        assert row("silu_and_mul").demoted
        torch.testing.assert_close(compiled(x), expected)


def test_exported_programs_hold_the_kernel_alone(always: None) -> None:
    """An export has the operators of the kernel, and none of a comparison."""
    replaced(lambda self, x: self.forward_native(x) + 1, SiluAndMul)
    op = SiluAndMul()
    x = torch.randn(2, 8)
    program = torch.export.export(op, (x,))
    torch.testing.assert_close(program.module()(x), functional.silu_and_mul.native(x) + 1)
    assert not [
        n for n in program.graph.nodes if "clone" in str(n.target) or "equal" in str(n.target)
    ]
    assert row("silu_and_mul").compared == 0
    assert "what was compiled is not compared" in row("silu_and_mul").remark
