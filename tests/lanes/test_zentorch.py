"""The plugin opgraft-zentorch on AMD's zentorch itself. Run by ``make test-zentorch``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import opgraft
import pytest
import torch
from opgraft import current_platform, functional, load_plugins, ops
from opgraft.registry.state import PluginStatus, host_state
from torch import Tensor, nn

pytest.importorskip(
    "zentorch", reason="zentorch is not installed here; make test-zentorch runs these tests"
)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def zentorch_plugin(fresh_host: None, plugin: Callable[[str], None]) -> None:
    """The plugin, installed by pip, on a processor that it takes."""
    plugin("opgraft-zentorch")
    if "avx512f" not in current_platform().capability().features:
        pytest.skip("the processor has no AVX-512, which zentorch needs")
    load_plugins()


def operators_of(call: Callable[[], Any]) -> set[str]:
    """Return the names of zentorch's operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = {event.key for event in profile.key_averages()}
    return {name.removeprefix("zentorch::") for name in names if name.startswith("zentorch::")}


def frozen(dtype: torch.dtype, rows: int = 48, columns: int = 64) -> nn.Parameter:
    """Return a weight that is declared frozen."""
    layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
    opgraft.freeze(layer)
    return layer.weight


def close(ours: Tensor, exact: Tensor) -> None:
    bound = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.double(), exact.double(), atol=bound, rtol=bound)


def test_the_plugin_is_active() -> None:
    """The kernels of the plugin are bound, and the log handler of zentorch's import is gone."""
    assert host_state().plugins["zentorch"].status is PluginStatus.ACTIVATED
    assert ops.Linear(8, 8).decision.chosen == "ZenLinear.forward_cpu"
    assert ops.RMSNorm(8).decision.chosen == "ZenRMSNorm.forward_cpu"
    ours = [handler for handler in logging.root.handlers if "pytest" not in str(type(handler))]
    assert ours == []


def test_the_whole_kit(whole_kit: Callable[[str], str]) -> None:
    """The plugin's own test file passes: every check of the kit, in each dtype."""
    assert re.search(r"\d\d+ passed", whole_kit("opgraft-zentorch"))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_frozen_weight(rows: int, activation: str, with_residual: bool) -> None:
    """zentorch multiplies by a frozen weight with any number of rows, and fuses what follows."""
    dtype = torch.bfloat16
    weight = frozen(dtype)
    x = torch.randn(rows, 64).to(dtype)
    bias = torch.randn(48).to(dtype)
    residual = torch.randn(48, rows).to(dtype).T if with_residual else None
    arguments = (x, weight, bias, activation, residual)
    ran = operators_of(lambda: functional.linear(*arguments))
    fused = "_binary" if with_residual and activation != "relu" else ""
    assert f"zentorch_linear_unary{fused}" in ran
    with torch.no_grad():
        wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
        close(functional.linear(*arguments), functional.linear.native(*wide))


@dtypes
def test_a_weight_that_is_written_to(dtype: torch.dtype) -> None:
    """No result is of former numbers: zentorch's own copies of weights are never used."""
    weight = torch.randn(48, 64).to(dtype)
    x = torch.randn(40, 64).to(dtype)
    for _ in range(3):
        close(functional.linear(x, weight), functional.linear.native(x.double(), weight.double()))
        weight.mul_(-2)


@dtypes
def test_many_weights_in_turn(dtype: torch.dtype) -> None:
    """Weights in the memory of freed ones are multiplied by their own numbers."""
    for size in torch.randint(1, 40, (200,)).tolist():
        x = torch.randn(40, 4 * size).to(dtype)
        weight = torch.randn(size, 4 * size).to(dtype) / size
        close(functional.linear(x, weight), functional.linear.native(x.double(), weight.double()))


def test_relu_keeps_a_nan() -> None:
    """zentorch's own relu returns 0 for NaN, so torch's runs."""
    out = functional.linear(
        torch.full((40, 64), torch.nan).bfloat16(), frozen(torch.bfloat16), None, "relu"
    )
    assert out.isnan().all()


@dtypes
@pytest.mark.parametrize("rows", [1, 40])
def test_integers(dtype: torch.dtype, rows: int) -> None:
    """8-bit layers agree with the definition. A row with a NaN or an infinity becomes NaN."""
    codes = nn.Parameter(torch.randint(-127, 128, (48, 64), dtype=torch.int8), requires_grad=False)
    holder = nn.Module()
    holder.codes = codes
    opgraft.freeze(holder)
    scales = torch.rand(48) / 1000
    x = torch.randn(rows, 64).to(dtype)
    call = partial(functional.int8_dynamic_linear, x, codes, scales)
    assert "zentorch_dynamic_qlinear" in operators_of(call)
    close(call(), functional.int8_dynamic_linear.native(x.double(), codes, scales))
    x[0, 3] = torch.inf
    assert call()[0].isnan().all()


@pytest.mark.parametrize("masked", ["no", "causal", "numbers", "truth values"])
def test_attention(masked: str) -> None:
    """Attention runs on zentorch for every mask, and a query without keys gets zeros."""
    query, key, value = (torch.randn(2, 4, 7, 32) for _ in range(3))
    refused = torch.rand(7, 7) > 0.5
    refused[3] = True
    numbers = torch.zeros(7, 7).masked_fill(refused, -torch.inf)
    mask = {"numbers": numbers, "truth values": ~refused}.get(masked)
    form = functional.scaled_dot_product_attention
    with_gaps = key.mT.contiguous().mT
    call = partial(form, query, with_gaps, value, mask, is_causal=masked == "causal")
    assert operators_of(call) == {"zentorch_sdpa"}
    wide = None if mask is None else numbers.double()
    exact = form.native(
        query.double(), key.double(), value.double(), wide, is_causal=masked == "causal"
    )
    close(call(), exact)


def test_norms() -> None:
    """zentorch computes a norm in half types, and the norm of a sum in float32 only."""
    weight = torch.randn(64)
    x = torch.randn(2, 3, 64)
    single = partial(functional.rms_norm, x.bfloat16(), weight.bfloat16())
    assert operators_of(single) == {"zentorch_rms_norm"}
    summed = partial(functional.fused_add_rms_norm, x, x, weight)
    assert operators_of(summed) == {"zentorch_add_rms_norm_"}
    half = x.bfloat16()
    rounded = partial(functional.fused_add_rms_norm, half, half, weight.bfloat16())
    assert operators_of(rounded) == set()
