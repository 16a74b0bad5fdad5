"""Passes that compute linear maps at once, or join what computes a tensor and its quantisation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, functional
from opgraft.errors import CompilationError
from opgraft.ops import Linear, QuantFP4, QuantFP8, RMSNorm, SiluAndMul
from opgraft.ops.quantization.fp4 import fp4_numbers
from support.blocks import WIDTH
from support.providers import CALLS, provide
from torch import Tensor, nn

ROW = 4 * WIDTH  # of which a half is whole groups of 32
EAGER = CompilationConfig(level=1)


def counts(compiled: opgraft.Compiled, name: str) -> tuple[int, int]:
    (report,) = (report for report in compiled.passes if report.name == name)
    return report.matched, report.replaced


def reasons(compiled: opgraft.Compiled, name: str) -> tuple[str, ...]:
    (report,) = (report for report in compiled.passes if report.name == name)
    assert all(reason in str(report) for reason in report.left)
    return report.left


def forms(compiled: opgraft.Compiled) -> Counter[str]:
    """The semantic nodes of a graph by the name of their form."""
    targets = [str(node.target) for node in compiled.graph.graph.nodes]
    return Counter(name.split(".")[1] for name in targets if name.startswith("opgraft."))


class Projections(nn.Module):
    """Query, key and value of one tensor, and a map of it that has a bias."""

    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            [Linear(WIDTH, size, bias) for size, bias in zip((32, 8, 8), biases, strict=True)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(each(x) for each in self.maps)


def projections(*biases: bool) -> Projections:
    model = Projections(*biases).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()
    return model


def expected(model: Projections, x: Tensor) -> list[Tensor]:
    return [
        x.double() @ each.weight.double().T + (0 if each.bias is None else each.bias.double())
        for each in model.maps
    ]


def expect_computed(compiled: opgraft.Compiled, model: Projections) -> None:
    for size in (1, 2, 9):
        x = torch.randn(size, 5, WIDTH)
        for found, wanted in zip(compiled(x), expected(model, x), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_maps_of_one_tensor_are_one(bias: bool) -> None:
    """Linear maps of one tensor become one over the memory of all weights, in which writes to each are seen."""
    model = projections(bias, bias, bias)
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, WIDTH),))
    assert counts(compiled, "joint_linears") == (1, 1)
    assert forms(compiled)["linear"] == 1
    expect_computed(compiled, model)
    model.maps[1].weight.mul_(2)  # type: ignore[operator]
    expect_computed(compiled, model)


def test_a_model_compiled_again_has_the_same_memory() -> None:
    """The second compilation finds the weights where the first has put them, and both stay right."""
    model = projections(False, False, False)
    opgraft.freeze(model)
    compiled = [opgraft.compile(model, EAGER, args=(torch.randn(3, 5, WIDTH),)) for _ in range(2)]
    assert compiled[0].graph.get_parameter("joint_0") is compiled[1].graph.get_parameter("joint_0")
    for each in compiled:
        expect_computed(each, model)
    model.maps[0].weight = nn.Parameter(torch.randn(32, WIDTH), requires_grad=False)
    third = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, WIDTH),))
    expect_computed(third, model)
    with pytest.raises(
        CompilationError, match=r"maps\.0\.weight of Projections is another one than when it was"
    ):
        compiled[0](torch.randn(2, 5, WIDTH))


@pytest.mark.parametrize("biases", [(True, False, False), (True, True, False)])
def test_maps_that_differ_stay_apart(biases: tuple[bool, ...]) -> None:
    """Maps of which some have a bias are left as they are."""
    model = projections(*biases)
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, WIDTH),))
    assert counts(compiled, "joint_linears") == (1, 0)
    assert reasons(compiled, "joint_linears") == ("weights cannot lie together",)
    expect_computed(compiled, model)


def test_maps_of_a_provider_are_one() -> None:
    """Layers of a replacement that comes as the form are semantic nodes, too: its kernel computes them at once."""
    calls: list[Any] = []

    def linear(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        calls.append(weight.shape)
        return functional.linear.native(x, weight, *others)

    class Counted(Linear):
        functional_oot = {"linear": linear}  # noqa: RUF012

        def forward_oot(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
            return linear(input, self.weight, self.bias, self.activation, residual)

    Linear.register_oot(Counted)
    model = projections(False, False, False)
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, WIDTH),))
    assert counts(compiled, "joint_linears") == (1, 1)
    calls.clear()
    compiled(torch.randn(2, 5, WIDTH))
    assert calls == [(48, WIDTH)]
    expect_computed(compiled, model)


class Quantizing(nn.Module):
    """Norms, with and without a sum, and a gated activation, each quantised; the first by two layers alike."""

    def __init__(self, quantize: QuantFP8 | QuantFP4, has_scale: bool) -> None:
        super().__init__()
        self.first, self.second, self.read = (RMSNorm(ROW, eps=eps) for eps in (1e-5, 0.1, 1e-3))
        self.act = SiluAndMul()
        self.quantize = quantize
        self.register_buffer("scale", torch.tensor([0.02]) if has_scale else None)

    def quantized(self, x: Tensor) -> Iterator[Tensor]:
        yield from self.quantize(x, self.scale)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.first(x)
        summed = x + x.flip(-1) * 0.5
        read = self.read(x * 2)
        return (
            *self.quantized(normed),
            *self.quantized(normed),
            *self.quantized(self.second(summed)),
            *self.quantized(self.act(summed)),
            *self.quantized(read),
            read,
            summed,
        )


@pytest.mark.parametrize(
    ("quantize", "has_scale", "form"),
    [
        (lambda: QuantFP8(True, (-1, -1)), True, "quant_fp8_static"),
        (lambda: QuantFP8(False, (1, -1)), False, "quant_fp8_dynamic"),
        (lambda: QuantFP8(False, (1, 4)), False, "quant_fp8_dynamic"),
        (QuantFP4, True, "quant_fp4"),
        (QuantFP4, False, "quant_fp4"),
    ],
    ids=["scale", "token", "group", "NVFP4", "MXFP4"],
)
def test_results_are_quantised_by_the_form_that_computes_them(
    quantize: Callable[[], QuantFP8 | QuantFP4], has_scale: bool, form: str
) -> None:
    """Norms and gated activations are joined with what quantises them, epsilon and groups kept, but where a norm is
    read besides; the bits are those of one after the other."""
    model = Quantizing(quantize(), has_scale).eval().requires_grad_(False)
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, ROW),))
    format = form.removesuffix("_static").removesuffix("_dynamic")
    assert counts(compiled, f"rms_norm_{format}") == (2, 2)
    assert counts(compiled, f"silu_and_mul_{format}") == (1, 1)
    found = {
        name: count for name, count in forms(compiled).items() if "quant" in name or "norm" in name
    }
    assert found == {
        f"rms_norm_{form}": 1,
        f"fused_add_rms_norm_{form}": 1,
        f"silu_and_mul_{form}": 1,
        form: 1,
        "rms_norm": 1,
    }
    for size in (1, 2, 9):
        x = torch.randn(size, 5, ROW)
        for ours, theirs in zip(compiled(x), model(x), strict=True):
            if ours.dtype == torch.uint8:
                ours, theirs = (fp4_numbers(each, torch.float32) for each in (ours, theirs))
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=2**-8)


def test_a_kernel_for_a_part_is_not_passed_over() -> None:
    """Where somebody provides a kernel for quantisation alone, norm and quantisation stay apart, and it runs."""
    calls: list[Any] = []

    def quant_fp8_dynamic(x: Tensor, *others: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        calls.append(x.shape)
        return functional.quant_fp8_dynamic.native(x, *others, **settings)

    class Counted(QuantFP8):
        functional_oot = {"quant_fp8_dynamic": quant_fp8_dynamic}  # noqa: RUF012

    QuantFP8.register_oot(Counted)
    model = Quantizing(QuantFP8(False, (1, -1)), False).eval().requires_grad_(False)
    compiled = opgraft.compile(model, EAGER, args=(torch.randn(3, 5, ROW),))
    assert (counts(compiled, "rms_norm_quant_fp8"), counts(compiled, "silu_and_mul_quant_fp8")) == (
        (2, 0),
        (1, 0),
    )
    assert reasons(compiled, "rms_norm_quant_fp8") == ("a provider's kernel is not passed over",)
    calls.clear()
    compiled(torch.randn(2, 5, ROW))
    assert len(calls) == 4


@pytest.mark.parametrize("is_joined_by_the_same", [True, False])
def test_kernels_of_one_provider_make_way_for_its_joined_kernel(
    is_joined_by_the_same: bool,
) -> None:
    """A joined kernel replaces separate ones of the same provider, and leaves those of others alone."""
    provide(RMSNorm, "rms_norm", "rms_norm_quant_fp8_dynamic")
    provide(SiluAndMul, "silu_and_mul", "silu_and_mul_quant_fp8_dynamic")
    another = {} if is_joined_by_the_same else {"__module__": "somebody_else"}
    provide(QuantFP8, "quant_fp8_dynamic", **another)
    model = Quantizing(QuantFP8(False, (1, -1)), False).eval().requires_grad_(False)
    settings = CompilationConfig(level=1, pass_config={"add_rms_norm": False})
    compiled = opgraft.compile(model, settings, args=(torch.randn(3, 5, ROW),))
    replaced = (2, 1) if is_joined_by_the_same else (0, 0)
    assert counts(compiled, "rms_norm_quant_fp8") == (2, replaced[0])
    assert counts(compiled, "silu_and_mul_quant_fp8") == (1, replaced[1])
    CALLS.clear()
    x = torch.randn(2, 5, ROW)
    found = compiled(x)
    joined = {"rms_norm_quant_fp8_dynamic": 2, "silu_and_mul_quant_fp8_dynamic": 1}
    apart = {"rms_norm": 3, "silu_and_mul": 1, "quant_fp8_dynamic": 4}
    left = {"rms_norm": 1, "quant_fp8_dynamic": 1}
    assert Counter(CALLS) == ({**joined, **left} if is_joined_by_the_same else apart)
    for ours, theirs in zip(found, model(x), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=2**-8)


class ScaledLater(nn.Module):
    """A norm, and its quantisation by a scale that is computed of the norm's input only then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.quantize = RMSNorm(ROW), QuantFP8(True, (-1, -1))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        codes, _ = self.quantize(normed, x.abs().amax().reshape(1) / 448)
        return codes


def test_a_scale_that_is_computed_later() -> None:
    """A place that is left, as the scale is not there yet where the norm is, is counted, and the record says why."""
    compiled = opgraft.compile(ScaledLater().eval(), EAGER, args=(torch.randn(3, 5, ROW),))
    assert counts(compiled, "rms_norm_quant_fp8") == (1, 0)
    assert reasons(compiled, "rms_norm_quant_fp8") == ("a scale is computed after rms_norm",)
