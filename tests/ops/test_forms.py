"""What every form promises beyond its values: gradients, autocast, its name, copies, and where it does not look."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from opgraft import functional
from opgraft.binding.functional import FUNCTIONALS, register_functional, unregister
from opgraft.binding.specialisation import bind
from opgraft.errors import ConflictError
from opgraft.ops import SiluAndMul
from opgraft.ops.checks import expect_in_range, values_are_known
from opgraft.ops.fakes import like
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("silu_", "x", lambda: [draw(3, 5)]),
        ("fused_add_rms_norm_", "x and residual", lambda: [draw(3, 5), draw(3, 5), draw(5)]),
        ("fused_add_gemma_rms_norm_", "x and residual", lambda: [draw(3, 5), draw(3, 5), draw(5)]),
        (
            "rotary_embedding_",
            "query and key",
            lambda: [torch.arange(3), draw(3, 8), draw(3, 4), 4, draw(7, 4)],
        ),
    ],
)
def test_in_place_registered_ops_refuse_gradients(
    name: str, written: str, arguments: Callable[[], list[Any]]
) -> None:
    """Each argument alone that requires a gradient is refused, by name and before anything is written."""
    op, plain = getattr(torch.ops.opgraft, name), name.removesuffix("_")
    floating = [
        index
        for index, value in enumerate(arguments())
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    for index in floating:
        given = arguments()
        argument = op.default._schema.arguments[index].name
        given[index].requires_grad_()
        before = [value.detach().clone() for value in given if isinstance(value, Tensor)]
        with pytest.raises(
            ValueError,
            match=rf"{name}: {argument} requires a gradient, and {written} would be written to in place where a "
            rf"gradient is required: use torch\.ops\.opgraft\.{plain}, or",
        ):
            op(*given)
        assert all(
            map(torch.equal, before, [value for value in given if isinstance(value, Tensor)])
        )
        with torch.no_grad():
            op(*given)
        with torch.inference_mode():
            op(*arguments())


def test_a_form_that_only_writes_advises_no_other() -> None:
    """What has no variant out of place is not named as the way out."""
    key, cache = draw(3, 2, 4).requires_grad_(), torch.zeros(2, 2, 2, 4, 4)
    reason = r"write_kv_cache: key requires a gradient, and cache would be .*: give it detached, or use torch\.no_grad"
    with pytest.raises(ValueError, match=reason):
        torch.ops.opgraft.write_kv_cache(key, draw(3, 2, 4), cache, torch.arange(3))


def test_an_in_place_write_is_counted() -> None:
    """A registered op that writes over what autograd has saved makes the backward raise, not wrong."""
    x = draw(4).requires_grad_()
    saved = draw(4)
    y = x * saved
    torch.ops.opgraft.silu_(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_in_place_form_is_differentiable() -> None:
    """The form itself is torch's own in-place operation, with its gradient."""
    x = draw(3, 5).requires_grad_()
    z = x * 1
    functional.silu_(z)
    (got,) = torch.autograd.grad(z.sum(), x)
    (expected,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(got, expected)


def penalty_gradients(call: Callable[..., Tensor], arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the squared norm of the gradients, as a gradient penalty has them."""
    leaves = [value.clone().requires_grad_() for value in arguments]
    gradients = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("silu", lambda: [draw(3, 5)]),
        ("gelu_and_mul", lambda: [draw(3, 10)]),
        ("linear", lambda: [draw(3, 5), draw(4, 5), draw(4)]),
        ("rms_norm", lambda: [draw(3, 5), draw(5)]),
        ("conv2d", lambda: [draw(2, 3, 6, 5), draw(4, 3, 3, 2), draw(4)]),
    ],
)
def test_registered_ops_are_differentiable_twice(
    name: str, arguments: Callable[[], list[Tensor]]
) -> None:
    """A gradient penalty through the registered op has the gradients of one through the native definition."""
    given = arguments()
    got = penalty_gradients(getattr(torch.ops.opgraft, name), given)
    for ours, theirs in zip(got, penalty_gradients(FUNCTIONALS[name].native, given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_tensor_in_two_places_has_both_gradients() -> None:
    """Query and key that are one tensor get the sum of their gradients, once and twice differentiated."""
    x = draw(1, 2, 3, 4)

    def attend(call: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x.sin(), x, x)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (got,) = penalty_gradients(attend(torch.ops.opgraft.scaled_dot_product_attention), [x])
        (expected,) = penalty_gradients(attend(F.scaled_dot_product_attention), [x])
    torch.testing.assert_close(got, expected)


def test_forms_without_gradients_require_none() -> None:
    """Quantised values and scales never require a gradient, whatever the input does."""
    x = draw(3, 8, dtype=torch.float32).requires_grad_()
    q, scale = torch.ops.opgraft.quant_fp8_dynamic(x, (1, -1))
    again = torch.ops.opgraft.quant_fp8_static(x, scale, (1, -1))
    assert [made.requires_grad for made in (q, scale, again)] == [False] * 3
    assert {
        name for name, made in FUNCTIONALS.items() if not made.differentiable and not made.mutates
    } == {
        "quant_fp8_static",
        "quant_fp8_dynamic",
        "quant_fp4",
        "int8_dynamic_linear",
        "fp8_linear",
        "quantized_experts",
        *(
            f"{name}_quant_fp4"
            for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "all_reduce_rms_norm")
        ),
        "rms_norm_quant_fp8_static",
        "rms_norm_quant_fp8_dynamic",
        "fused_add_rms_norm_quant_fp8_static",
        "fused_add_rms_norm_quant_fp8_dynamic",
        "silu_and_mul_quant_fp8_static",
        "silu_and_mul_quant_fp8_dynamic",
        "scaled_dot_product_attention_quant_fp8_static",
        *(f"all_reduce_rms_norm{end}" for end in ("", "_quant_fp8_static", "_quant_fp8_dynamic")),
        "all_reduce_gemma_rms_norm",
        "linear_reduce_scatter_rows",
        "all_gather_rows_linear",
    }


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", lambda: [draw(3, 5, dtype=torch.float32), draw(4, 5, dtype=torch.float32)]),
        (
            "conv2d",
            lambda: [draw(2, 3, 6, 5, dtype=torch.float32), draw(4, 3, 3, 2, dtype=torch.float32)],
        ),
        (
            "scaled_dot_product_attention",
            lambda: [draw(1, 2, 3, 4, dtype=torch.float32) for _ in range(3)],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registered_ops_run_without_autocast(
    name: str, arguments: Callable[[], list[Tensor]], dtype: torch.dtype
) -> None:
    """Under autocast result and gradients are what they are without it, of the dtype that the fake rule tells."""
    call = getattr(torch.ops.opgraft, name)
    given = [value.to(dtype).requires_grad_() for value in arguments()]
    expected = torch.autograd.grad(call(*given).sum(), given)
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else torch.float16):
        result = call(*given)
        assert (
            result.dtype
            == FUNCTIONALS[name].fake(*(value.to("meta") for value in given)).dtype
            == dtype
        )
        assert torch.compile(call, backend="aot_eager", fullgraph=True)(*given).dtype == dtype
        got = torch.autograd.grad(result.sum(), given)
    assert torch.equal(result, call(*given))
    assert all(map(torch.equal, got, expected))


def test_a_kernel_that_comes_as_a_method_only_is_told_of() -> None:
    """The decision says that forms do not reach a kernel without a table, and a base's table is not taken for it."""

    def fast(x: Tensor) -> Tensor:
        return SiluAndMul.forward_native(SiluAndMul(), x)

    class Table(SiluAndMul):
        functional_oot: ClassVar = {"silu_and_mul": fast}

        def forward_oot(self, x: Tensor) -> Tensor:
            return fast(x)

    class MethodOnly(Table):
        def forward_oot(self, x: Tensor) -> Tensor:
            return super().forward_oot(x)

    note = "brings no functional_oot, so functional forms, if the op has any, run their native definition"
    assert note not in str(bind(SiluAndMul).decision)
    assert "brings no functional" not in str(bind(SiluAndMul).decision)
    SiluAndMul.register_oot(Table)
    assert bind(SiluAndMul).function("silu_and_mul") is fast
    assert note not in str(bind(SiluAndMul).decision)
    SiluAndMul.register_oot(MethodOnly, priority=1)
    binding = bind(SiluAndMul)
    assert (binding.owner, binding.function("silu_and_mul")) == (MethodOnly, None)
    assert note in " ".join(str(bind(SiluAndMul).decision).split())


@pytest.fixture
def own_forms() -> Iterator[None]:
    """Forms that the test registers are forgotten afterwards."""
    known = set(FUNCTIONALS)
    yield
    for name in set(FUNCTIONALS) - known:
        unregister(FUNCTIONALS[name])


@pytest.mark.usefixtures("own_forms")
def test_a_second_form_of_a_name_is_refused() -> None:
    """The error names both definitions with file, line and distribution, and the first stays, registered too."""

    def twice_defined(x: Tensor) -> Tensor:
        return x + 1

    first = register_functional("silu", like)(twice_defined)

    def another(x: Tensor) -> Tensor:
        return x + 2

    another.__name__ = "twice_defined"
    with pytest.raises(
        ConflictError, match=r"(?s)'twice_defined'.*test_forms\.py:\d+ \(.*test_forms\.py:\d+ \("
    ):
        register_functional("silu", like)(another)
    assert FUNCTIONALS["twice_defined"] is first
    x = draw(3)
    torch.testing.assert_close(torch.ops.opgraft.twice_defined(x), x + 1)
    unregister(first)
    register_functional("silu", like)(another)
    torch.testing.assert_close(torch.ops.opgraft.twice_defined(x), x + 2)


def test_a_reloaded_form_takes_the_place_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reloading a module registers its forms anew."""
    (tmp_path / "module_with_a_form.py").write_text(
        "from opgraft.ops.fakes import like\n"
        "from opgraft.binding.functional import register_functional\n"
        "from torch import Tensor\n\n\n"
        "@register_functional('silu', like)\n"
        "def reloaded_form(x: Tensor) -> Tensor:\n"
        "    return x + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("module_with_a_form")
    before = module.reloaded_form
    try:
        importlib.reload(module)
        assert FUNCTIONALS["reloaded_form"] is module.reloaded_form is not before
    finally:
        unregister(FUNCTIONALS["reloaded_form"])
        del sys.modules["module_with_a_form"]


def test_the_registry_is_read_only() -> None:
    """Forms are added by the decorator only."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        FUNCTIONALS["silu"] = functional.gelu  # type: ignore[index]
    assert functional.silu is FUNCTIONALS["silu"]


@pytest.mark.parametrize("name", functional.__all__)
def test_a_form_is_its_own_copy(name: str) -> None:
    """Copies and what comes out of a pickle are the form itself, so that the kernel bound to it is found."""
    made = getattr(functional, name)
    assert copy.copy(made) is copy.deepcopy(made) is made
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(made, protocol)) is made  # noqa: S301  # what was just written


def rotated(positions: Tensor, query: Tensor) -> Tensor:
    cache = torch.linspace(0, 1, 28).reshape(7, 4)
    return functional.rotary_embedding(positions, query, query, 4, cache)[0]


def test_forms_under_vmap() -> None:
    """Values are not looked at in torch.vmap, whose results are those of a loop."""
    positions, query = torch.randint(7, (5, 3)), torch.randn(5, 3, 8)
    got = torch.vmap(rotated)(positions, query)
    torch.testing.assert_close(
        got, torch.stack([rotated(p, q) for p, q in zip(positions, query, strict=True)])
    )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_forms_under_make_fx(mode: str) -> None:
    """Values are not taken for constants by a tracer: what is traced for some positions holds for others."""
    positions, query = torch.randint(7, (3,)), torch.randn(3, 8)
    traced = make_fx(rotated, tracing_mode=mode)(positions, query)
    other = torch.randint(7, (3,))
    torch.testing.assert_close(traced(other, query), rotated(other, query))


def encoded(bounds: Tensor, x: Tensor) -> Tensor:
    return functional.mm_encoder_attn(x, x, x, 2, 2, 0.5, bounds)


def test_lengths_are_no_constants_in_a_trace() -> None:
    """A traced encoder attends within the sequences that it is given, not within those that it was traced with."""
    x = torch.randn(1, 6, 8)
    traced = make_fx(encoded)(torch.tensor([0, 2, 6]), x)
    other = torch.tensor([0, 5, 6])
    torch.testing.assert_close(traced(other, x), encoded(other, x))


def test_values_are_known_outside_of_traces() -> None:
    """Plain tensors are looked at, and positions out of range raise."""
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(values_are_known(x)) or x)(torch.arange(3))
    assert seen == [False]
    assert values_are_known(torch.arange(3))
    assert not values_are_known(torch.arange(3, device="meta"))
    with pytest.raises(ValueError, match="reach from 0 to 2, expected 0 to 1"):
        expect_in_range("op", "positions", torch.arange(3), 2)
