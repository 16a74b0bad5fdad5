"""Linear layers over weights in 12 bits, on every path of this CPU: the bits of the plain layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.linear.lossless.storage import LosslessWeight, from_12_bits, to_12_bits
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
SPEC = SPECS["lossless_linear"]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 25, 40, 79, 80, 97, 200)
SHAPES = ((1, 64), (5, 31), (7, 200), (13, 576), (70, 100), (300, 192), (9, 2112), (600, 70))


def drawn(features: int, width: int) -> Tensor:
    return (torch.randn(features, width) / width**0.5).bfloat16()


def adversarial(features: int, width: int) -> Tensor:
    """Return a weight with zeros, subnormals and all finite exponents, so most units are plain."""
    words = torch.randint(-(2**15), 2**15, (features, width)).to(torch.int16)
    weight = words.view(torch.bfloat16)
    weight = torch.where(weight.isfinite(), weight, 0)
    # Rows of few exponents beside rows of all: streams of rows differ in their plain units.
    weight[::3] = drawn(features, width)[::3]
    return weight


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def lossless() -> Any:
    from opgraft_cpu_kernels import lossless

    return lossless.lossless_linear


@pytest.fixture
def plain(path: str) -> Callable[..., Tensor]:
    """The plugin's kernel over plain weights, in force on each path."""
    from opgraft_cpu_kernels import linear

    return linear.linear


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("variant", SPEC.variants)
def test_values(variant: str, sized: Callable[[OpSpec], OpSpec]) -> None:
    """On each path the kernel computes what the reference computes in float64."""
    checks.check_values(sized(SPEC), variant, torch.bfloat16, lossless())


@pytest.mark.parametrize("variant", SPEC.variants)
def test_strides(variant: str, path: str) -> None:
    """Inputs and biases may lie in memory as they like."""
    checks.check_strides(SPEC, variant, lossless())


@pytest.mark.parametrize("draw", [drawn, adversarial])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_have_the_bits_of_the_plain_layer(
    plain: Callable[..., Tensor], shape: tuple[int, int], draw: Any
) -> None:
    """For any number of rows, odd sizes and plain units anywhere, no bit differs."""
    weight = draw(*shape)
    made = to_12_bits(weight)
    bias = torch.randn(shape[0]).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).bfloat16()
        assert same_bits(lossless()(x, *made, bias), plain(x, weight, bias)), rows
        assert same_bits(lossless()(x, *made), plain(x, weight)), rows


@pytest.mark.parametrize("rows", [1, 6, 90])
def test_what_is_no_number(plain: Callable[..., Tensor], rows: int) -> None:
    """Infinities and NaN of a weight reach the outputs that they reach over the plain weight."""
    weight = drawn(40, 200)
    weight[3, 5] = torch.inf
    weight[4, 150] = -torch.inf
    weight[7, 199] = torch.nan
    x = torch.randn(rows, 200).bfloat16()
    got = lossless()(x, *to_12_bits(weight))
    torch.testing.assert_close(got, plain(x, weight), rtol=0, atol=0, equal_nan=True)
    assert got[:, 7].isnan().all()
    assert got[:, [3, 4]].isinf().all()


@pytest.mark.parametrize("draw", [drawn, adversarial])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 64), (3, 0)], ids=str)
def test_the_library_stores_as_the_definition(
    kernels: Any, path: str, shape: tuple[int, int], draw: Any
) -> None:
    """Both make the same tensors, and the library looks up rows with the same numbers."""
    weight = draw(*shape) if all(shape) else torch.zeros(shape, dtype=torch.bfloat16)
    made = kernels.to_12_bits(weight)
    for got, expected in zip(made, to_12_bits(weight), strict=True):
        assert got.shape == expected.shape
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    if shape[0]:
        rows = torch.randint(0, shape[0], (2, 5))
        assert same_bits(kernels.lossless_rows(*made, shape[1], rows), weight[rows])


def test_threads(kernels: Any) -> None:
    """However outputs are shared among threads, results are the same."""
    threads = torch.get_num_threads()
    weight = adversarial(500, 512)
    made = to_12_bits(weight)
    for rows in (1, 7, 40, 100):
        x = torch.randn(rows, 512).bfloat16()
        results = []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(lossless()(x, *made))
                assert all(map(torch.equal, kernels.to_12_bits(weight)[:3], made[:3]))
        finally:
            torch.set_num_threads(threads)
        assert all(same_bits(other, results[0]) for other in results[1:])


def test_which_kernel_runs(kernels: Any) -> None:
    """The op and the form run the kernel in bfloat16; the definition runs in other dtypes."""
    op = ops.LosslessLinear(96, 40, dtype=torch.bfloat16)
    for x, expected in ((torch.randn(2, 96), set()), (torch.ones(2, 96).bfloat16(), {NAME})):
        op.bias = None if op.bias is None else torch.nn.Parameter(op.bias.to(x.dtype), False)
        with torch.profiler.profile() as profile:
            op(x)
        names = {event.key for event in profile.key_averages()}
        assert {name for name in names if name.startswith("opgraft_cpu_kernels::")} == expected


NAME = "opgraft_cpu_kernels::lossless_linear"


def test_compilation(kernels: Any) -> None:
    """A layer compiles whole, with the same bits."""
    weight = drawn(7, 200)
    made = to_12_bits(weight)
    compiled = torch.compile(functional.lossless_linear, fullgraph=True, backend="aot_eager")
    for rows in (1, 40, 120):
        x = torch.randn(rows, 200).bfloat16()
        assert same_bits(compiled(x, *made), lossless()(x, *made))


def test_empty(kernels: Any) -> None:
    """No rows, no outputs or no inputs give what they give over a plain weight."""
    made = to_12_bits(drawn(6, 64))
    assert lossless()(torch.ones(2, 0, 64).bfloat16(), *made).shape == (2, 0, 6)
    none = to_12_bits(torch.zeros(0, 64).bfloat16())
    assert lossless()(torch.ones(3, 64).bfloat16(), *none).shape == (3, 0)
    without = to_12_bits(torch.zeros(6, 0).bfloat16())
    assert lossless()(torch.ones(3, 0).bfloat16(), *without).tolist() == [[0.0] * 6] * 3


def test_bad_arguments(kernels: Any) -> None:
    """The ops refuse what does not fit before they read it."""
    made = LosslessWeight(*kernels.to_12_bits(drawn(12, 128)))
    x = torch.randn(3, 128).bfloat16()
    run = kernels.lossless_linear
    for wrong in (
        (torch.randn(3, 64).bfloat16(), *made),
        (x.float(), *made),
        (x, *made._replace(exponents=made.exponents[:5])),
        (x, *made._replace(places=made.places + 1)),
        (x, *made._replace(places=made.places[:0], units=made.units[:0])),
        (x, *made._replace(units=made.units[:, :32])),
        (x, *made._replace(codes=made.codes.char())),
    ):
        with pytest.raises(ValueError, match="lossless_linear: "):
            run(*wrong, None, 100)
    with pytest.raises(ValueError, match="bias has shape"):
        run(x, *made, torch.ones(5).bfloat16(), 100)
    with pytest.raises(IndexError, match="row 12 of 12"):
        kernels.lossless_rows(*made, 128, torch.tensor([12]))
    with pytest.raises(ValueError, match="to_12_bits: weight has shape"):
        kernels.to_12_bits(torch.ones(3, 64))


def test_numbers_of_units_in_any_order(kernels: Any, path: str) -> None:
    """Numbers that are in no order, negative or too large reach no memory of others."""
    made = LosslessWeight(*to_12_bits(adversarial(30, 192)))
    count = len(made.places)
    x = torch.randn(3, 192).bfloat16()
    for places in (
        made.places.flip(0),
        torch.full((count,), -5, dtype=torch.int32),
        torch.full((count,), 2**30, dtype=torch.int32),
    ):
        places[-1] = made.places[-1]
        changed = made._replace(places=places)
        for rows in (x, x.repeat(40, 1)):
            assert kernels.lossless_linear(rows, *changed, None, 1000).shape == (len(rows), 30)
        assert kernels.lossless_rows(*changed, 192, torch.arange(30)).shape == (30, 192)
    assert same_bits(from_12_bits(*made, 192), kernels.lossless_rows(*made, 192, torch.arange(30)))
