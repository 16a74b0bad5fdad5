"""What the kernels refuse: derivatives, mixed devices, shared memory, other integers. And that nothing is half done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from torch import nn
from torch.autograd import forward_ad

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with"),
    # Torch compiles its forward-mode rules by torch.jit.script, of which it warns.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


FORWARD_MODE = pytest.mark.filterwarnings("ignore::FutureWarning")
"""The first use of forward mode makes torch script its own formulas, which torch 2.14 warns of."""


def derivative(call: Callable[..., Any], x: torch.Tensor, how: str) -> Any:
    if how == "jacfwd":
        return torch.func.jacfwd(call)(x)
    if how == "grad":
        return torch.func.grad(lambda x: call(x).sum())(x)
    if how == "compiled":
        return torch.compile(lambda x: call(x * 1.0).sum(), backend="aot_eager")(x.requires_grad_())
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).tangent


@FORWARD_MODE
@pytest.mark.parametrize("how", ["jacfwd", "grad", "compiled", "dual"])
def test_no_derivative_is_dropped_in_silence(kernels: Any, how: str) -> None:
    """A direct call where a derivative is asked for raises, however it is asked for."""
    with pytest.raises(
        (RuntimeError, NotImplementedError), match=r"not implemented|does not support"
    ):
        derivative(kernels.silu, torch.randn(4, 8), how)


@FORWARD_MODE
def test_derivatives_of_modules(plugin: object) -> None:
    """A model of bound ops has the derivatives of its native definitions, in forward mode too."""
    model, x = nn.Sequential(nn.Linear(4, 4), ops.SiLU(), nn.Linear(4, 4)), torch.randn(4)
    assert model[1].decision.chosen.endswith("forward_cpu")
    plain = nn.Sequential(model[0], nn.SiLU(), model[2])
    torch.testing.assert_close(torch.func.jacfwd(model)(x), torch.func.jacrev(plain)(x))
    expected = torch.func.jvp(plain, (x,), (x,))[1]
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(tangent, expected)


def test_tensors_of_two_devices(kernels: Any) -> None:
    """The op and the form refuse a weight on ``meta``, instead of returning memory that nothing was written to."""
    x, weight = torch.randn(4, 8), torch.ones(8, device="meta")
    for call in (kernels.rms_norm, functional.rms_norm):
        with pytest.raises(ValueError, match=r"rms_norm: .* on .*meta"):
            call(x, weight)


def test_heads_that_share_memory(kernels: Any) -> None:
    """Shared heads are not rotated in place, be it rows or heads that share, and the other tensor is not touched."""
    positions, cache = torch.arange(3), torch.randn(9, 8)
    good = torch.randn(3, 16)
    before = good.clone()
    for shared in (torch.randn(1, 16).expand(3, 16), torch.randn(3, 1, 8).expand(3, 2, 8)):
        for call in (kernels.rotary_embedding_, functional.rotary_embedding_):
            with pytest.raises(RuntimeError, match="more than one element"):
                call(positions, shared, good, 8, cache)
        with pytest.raises(RuntimeError, match="more than one element"):
            kernels.rotary_embedding_(positions, good, shared, 8, cache)
        assert torch.equal(good, before)


def test_heads_apart_are_rotated_where_they_lie(kernels: Any) -> None:
    """Heads in any order of their dimensions, with gaps, are rotated in place."""
    positions, cache = torch.arange(3), torch.randn(9, 8)
    for view in (
        torch.randn(2, 3, 8).transpose(0, 1),
        torch.randn(3, 2, 11)[..., :8],
        torch.randn(3, 21)[:, :16],
    ):
        expected, _ = functional.rotary_embedding.native(positions, view, view, 8, cache)
        kernels.rotary_embedding_(positions, view, None, 8, cache)
        torch.testing.assert_close(view, expected)


def test_a_key_that_does_not_fit(kernels: Any) -> None:
    """The query is not rotated if the key is refused."""
    positions, cache, query = torch.arange(3), torch.randn(9, 8), torch.randn(3, 16)
    before = query.clone()
    with pytest.raises(ValueError, match="tensor to rotate has shape"):
        kernels.rotary_embedding_(positions, query, torch.randn(3, 15), 8, cache)
    assert torch.equal(query, before)


def test_positions_that_are_no_integers(kernels: Any) -> None:
    """Positions are not truncated: the op refuses them, and so does the form."""
    x, cache = torch.randn(3, 16), torch.randn(9, 8)
    for call in (kernels.rotary_embedding, functional.rotary_embedding):
        with pytest.raises(ValueError, match=r"positions .*loat"):
            call(torch.tensor([0.0, 1.5, 2.0]), x, x, 8, cache)


def test_a_scalar_runs_the_native_definition(kernels: Any) -> None:
    """What has no rows is computed by the native definition, in eager and compiled code."""
    x = torch.tensor(2.0)
    compiled = torch.compile(functional.silu, backend="aot_eager", fullgraph=True)
    for call in (functional.silu, compiled):
        torch.testing.assert_close(call(x), torch.nn.functional.silu(x))


def test_small_float16_where_they_are_flushed(kernels: Any) -> None:
    """float16 below its normal range are read right where float32 below its own are flushed to zero."""
    import opgraft_cpu_kernels

    opgraft_cpu_kernels.set_path("scalar")
    x = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    flushed = torch.set_flush_denormal(True)
    try:
        quantised = kernels.quant_fp8_static(x[None], torch.full((1,), 2.0**-24), [-1, -1])[0]
    finally:
        torch.set_flush_denormal(False)
    assert flushed
    assert torch.equal(
        quantised.float(),
        torch.arange(1, 1024).float().clamp(max=448).to(torch.float8_e4m3fn).float(),
    )


@pytest.mark.parametrize(
    "name", ["silu_and_mul_with_clamp", "swiglustep_and_mul", "swigluoai_and_mul"]
)
@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_limits_below_zero(kernels: Any, name: str, limit: float) -> None:
    """A limit that leaves nothing between it and its negative is refused by the op, the form and the definition."""
    form = getattr(functional, name)
    for call in (getattr(kernels, name), form, form.native):
        with pytest.raises(
            ValueError, match=f"{name}: limit is .*expected a number that is not negative"
        ):
            call(torch.randn(3, 8), limit=limit)


def test_panels_of_another_weight(kernels: Any) -> None:
    """A packed weight is read only if all its extents and its dtype are those that packing gives."""
    x, weight = torch.randn(4, 40), torch.randn(70, 40)
    for shape in (
        (3, 2, 1, 2, 512),
        (3, 2, 4, 2, 512),
        (3, 2, 3, 1, 512),
        (3, 2, 3, 2, 256),
        (3, 1, 3, 2, 512),
    ):
        with pytest.raises(
            ValueError, match="packed_linear: x has dtype Float and packed has shape"
        ):
            kernels.packed_linear(x, weight, torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match="and dtype Float, expected float32 and what pack_linear returned"
    ):
        kernels.packed_linear(x, weight, torch.zeros(3, 2, 3, 2, 512))


def test_the_path_is_chosen_in_one_place(kernels: Any) -> None:
    """The path is set by the module only, which keeps its name; what it keeps is what is in force."""
    import opgraft_cpu_kernels

    assert not hasattr(kernels, "set_path")
    for name in opgraft_cpu_kernels.paths():
        opgraft_cpu_kernels.set_path(name)
        assert kernels.path() == opgraft_cpu_kernels.path() == name
