"""The linear layer: on few rows and on many, and on tiles of AMX where the CPU has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.linear.spec import ACTIVATIONS
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor, nn
from torch.nn import functional as F

SPEC = SPECS["linear"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 9, 33, 769)
PARTS = {"highest": 3, "high": 2, "medium": 2}
each_activation = pytest.mark.parametrize("activation", list(ACTIVATIONS))
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


@pytest.fixture
def tiles(kernels: Any) -> Any:
    """The ops of the plugin on a CPU with tiles."""
    import opgraft_cpu_kernels

    if "amx" not in opgraft_cpu_kernels.paths():
        pytest.skip("this CPU lacks AMX")
    opgraft_cpu_kernels.set_path("amx")
    return kernels


@pytest.fixture(autouse=True)
def restored_precision() -> Iterator[None]:
    """Whatever a test asks for, the next finds what there was."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def called(*run: Any) -> set[str]:
    """The ops of the plugin that run when the first argument is called on the others."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        run[0](*run[1:])
    names = {event.key for event in profile.key_averages()}
    return {name.split("::")[1] for name in names if name.startswith("opgraft_cpu_kernels::")}


def draw(
    rows: int, width: int, features: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(features, width) / width**0.5
    return torch.randn(rows, width).to(dtype), weight.to(dtype), torch.randn(features).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    y = x.double() @ weight.double().T
    return ACTIVATIONS[activation](y if bias is None else y + bias.double())


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item() if expected.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 64, 100, 1100])
def test_rows_alone(width: int, dtype: torch.dtype, path: str) -> None:
    """A row is the same bit for bit whatever rows stand beside it, few or many."""
    torch.manual_seed(0)
    x, weight, bias = draw(11, width, 37, dtype)
    run = torch.ops.opgraft_cpu_kernels.linear
    with torch.no_grad():
        together = run(x, weight, bias)
        assert distance(together, exact(x, weight, bias)) < {torch.float32: 1e-6}.get(dtype, 5e-3)
        for count in (1, 2, 3, 4, 5, 6, 7, 8):
            assert run(x[:count], weight, bias).equal(together[:count])
        for row in range(11):
            assert run(x[row : row + 1], weight, bias).equal(together[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "features"), [(7, 1), (100, 37), (577, 96), (1600, 33), (2101, 257), (3301, 70)]
)
def test_many_rows(width: int, features: int, dtype: torch.dtype, path: str) -> None:
    """Rows at any distance, of any number of inputs and outputs, are right, and the same bit for bit beside others."""
    torch.manual_seed(0)
    x, weight, bias = draw(500, width + 5, features, dtype)
    x, weight = x[:, 5:], weight[:, 5:].contiguous()
    run = torch.ops.opgraft_cpu_kernels.linear
    with torch.no_grad():
        together = run(x, weight, bias)
        assert distance(together, exact(x, weight, bias)) < {torch.float32: 3e-6}.get(dtype, 5e-3)
        for count in (112, 113, 131):
            assert run(x[-count:], weight, bias).equal(together[-count:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_with_what_follows(dtype: torch.dtype, path: str) -> None:
    """Activation and residual follow the sums, and a NaN stays in its row, where rows end within a pair too."""
    torch.manual_seed(0)
    x, weight, bias = draw(120, 33, 50, dtype)
    x[7, 0] = float("nan")
    residual = torch.randn(120, 50).to(dtype)
    with torch.no_grad():
        got = torch.ops.opgraft_cpu_kernels.linear(x, weight, bias, "silu", residual)
    expected = exact(x, weight, bias, "silu") + residual.double()
    assert got[7].isnan().all()
    others = [row for row in range(120) if row != 7]
    assert distance(got[others], expected[others]) < {torch.float32: 1e-6}.get(dtype, 5e-3)


@pytest.mark.parametrize(
    ("rows", "frozen", "own"), [(96, True, True), (97, True, False), (97, False, True)]
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_many_rows_of_a_frozen_layer_are_left_to_the_packed_copy(
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    frozen: bool,
    own: bool,
) -> None:
    """The kernel over the weight as it is computes few rows, and many of a weight that has no packed copy."""
    import opgraft_cpu_kernels
    from opgraft_cpu_kernels import linear

    if "avx512_bf16" not in opgraft_cpu_kernels.paths():
        pytest.skip("this CPU lacks avx512_bf16")
    opgraft_cpu_kernels.set_path("avx512_bf16")
    calls, run = list[int](), linear._linear
    monkeypatch.setattr(
        linear, "_linear", lambda x, *others: calls.append(len(x)) or run(x, *others)
    )
    layer = nn.Linear(256, 512).to(dtype).requires_grad_(False).eval()
    if frozen:
        opgraft.freeze(layer)
    x = torch.randn(rows, 256).to(dtype)
    with torch.no_grad():
        got = linear.linear(x, layer.weight, layer.bias)
    assert calls == [rows] * own
    assert distance(got, exact(x, layer.weight, layer.bias)) < {torch.float32: 3e-6}.get(
        dtype, 5e-3
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", list(SPEC.variants))
def test_values(variant: str, dtype: torch.dtype, sized: Callable[[OpSpec], OpSpec]) -> None:
    """On each path the op on rows and the function compute what the reference computes in float64."""
    from opgraft_cpu_kernels import linear

    for call in (torch.ops.opgraft_cpu_kernels.linear, linear.linear):
        with torch.no_grad():
            checks.check_values(sized(SPEC), variant, dtype, call)


@pytest.mark.parametrize("rows", [0, 1, 3, 33, 97])
@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("features", SIZES)
@pytest.mark.parametrize("parts", [2, 3])
def test_tiles_of_any_size(tiles: Any, rows: int, width: int, features: int, parts: int) -> None:
    """Products of any sizes are right: to float32 with three parts, to 2^-15 of the magnitudes with two."""
    x, weight, bias = draw(rows, width, features)
    packed = tiles.pack_linear(weight, parts)
    for given in (None, bias):
        got, expected = tiles.packed_linear(x, weight, packed, given), exact(x, weight, given)
        assert got.shape == expected.shape
        if parts == 2:
            assert (
                (got - expected).abs() <= 2**-15 * exact(x.abs(), weight.abs(), bias.abs())
            ).all()
        else:
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1.3e-6)


@each_activation
def test_tiles_with_what_follows(tiles: Any, activation: str) -> None:
    """Bias, activation and residual are applied in this order, over inputs of any strides and dimensions."""
    x, weight, bias = draw(6 * 7, 70, 45)
    packed = tiles.pack_linear(weight, 3)
    residual = torch.randn(45, 42).T
    for shaped in (x, torch.full((42, 75), torch.nan)[:, 2:72].copy_(x), x.T.contiguous().T):
        got = tiles.packed_linear(shaped, weight, packed, bias, activation, residual)
        expected = exact(x, weight, bias, activation) + residual.double()
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1.3e-6)
    cube = tiles.packed_linear(x.view(6, 7, 70), weight, packed, bias, activation)
    torch.testing.assert_close(
        cube.double().flatten(0, 1), exact(x, weight, bias, activation), atol=1e-5, rtol=1.3e-6
    )


@pytest.mark.parametrize("sizes", [(512, 384, 384), (100, 1536, 384)])
def test_tiles_are_as_accurate_as_float32(tiles: Any, sizes: tuple[int, int, int]) -> None:
    """Six products of parts lose no more than torch's float32 does."""
    x, weight, bias = draw(*sizes)
    got = tiles.packed_linear(x, weight, tiles.pack_linear(weight, 3), bias)
    expected = exact(x, weight, bias)
    assert distance(got, expected) <= 1.5 * distance(F.linear(x, weight, bias), expected)


@pytest.mark.parametrize("precision", list(PARTS))
def test_the_precision_is_that_of_the_call(tiles: Any, precision: str) -> None:
    """The setting of torch decides when a layer is called, not when its weight was packed."""
    op, x = ops.Linear(256, 128), torch.randn(64, 256)
    opgraft.freeze(op)
    op(x)
    torch.set_float32_matmul_precision(precision)
    loss = distance(op(x), exact(x, op.weight, op.bias))
    assert loss < 2**-21 if PARTS[precision] == 3 else 2**-21 < loss < 2**-15
    assert "packed_linear" in called(op, x)


@pytest.mark.parametrize(
    "value", [torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max]
)
def test_what_bfloat16_cannot_hold(tiles: Any, value: float) -> None:
    """Infinities, NaN and the largest numbers, in inputs and weights, give what float32 gives."""
    x, op = torch.randn(40, 96), ops.Linear(96, 80)
    opgraft.freeze(op)
    x[7, 11] = value
    torch.testing.assert_close(op(x), F.linear(x, op.weight, op.bias), equal_nan=True)
    x = torch.randn(40, 96)
    op.weight[5, 3] = value
    torch.testing.assert_close(op(x), F.linear(x, op.weight, op.bias), equal_nan=True)


def test_weights_that_change(tiles: Any) -> None:
    """A packed weight is made anew after a change in place, and after one that must be announced."""
    op, x = ops.Linear(128, 128), torch.randn(64, 128)
    opgraft.freeze(op)
    op(x)
    op.weight.mul_(2)
    assert distance(op(x), exact(x, op.weight, op.bias)) < 1e-6
    op.weight.data.mul_(2)
    opgraft.refresh(op)
    assert distance(op(x), exact(x, op.weight, op.bias)) < 1e-6
    assert called(op, x) == {"packed_linear"}
    op.weight = nn.Parameter(torch.randn(128, 128))
    opgraft.freeze(op)
    assert distance(op(x), exact(x, op.weight, op.bias)) < 1e-6


def test_which_kernel_runs(tiles: Any) -> None:
    """Few rows take the weight as it is, many are tiled; the forms do what the module does."""
    op = ops.Linear(128, 192, activation="gelu")
    opgraft.freeze(op)
    for rows, name in ((1, "linear"), (4, "linear"), (64, "packed_linear")):
        x = torch.randn(rows, 128)
        assert name in called(op, x)
        assert name in called(functional.linear, x, op.weight, op.bias, "gelu")
    computed = torch.randn(192, 128)
    assert called(functional.linear, torch.randn(64, 128), computed) == set()


def test_forced_paths_have_no_tiles(tiles: Any) -> None:
    """On another path than amx nothing is packed for tiles, and what was packed computes the same."""
    import opgraft_cpu_kernels

    op, x = ops.Linear(128, 128), torch.randn(64, 128)
    opgraft.freeze(op)
    packed = tiles.pack_linear(op.weight, 3)
    opgraft_cpu_kernels.set_path("avx2")
    assert called(op, x) == set()
    assert tiles.pack_linear(op.weight, 3).numel() == 0
    assert (
        distance(tiles.packed_linear(x, op.weight, packed, op.bias), exact(x, op.weight, op.bias))
        < 1e-6
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_compiled_code_counts_rows(dtype: torch.dtype, path: str) -> None:
    """What compilers trace of the kernel is one op, that computes few rows and leaves many to the kernel in Python;
    opgraft's own linear where the path in force has no kernel for few rows."""
    from opgraft_cpu_kernels import linear

    x, weight, bias = draw(5, 64, 96, dtype)
    few = linear.FEW.get((path, dtype))
    leaves_many = few != linear.UNLIMITED or path == linear.KEEPS_COPIES
    with torch.no_grad():
        for rows in (1, 2, 200):
            given = (
                draw(rows, 64, 96, dtype)[0],
                weight,
                bias,
                "silu",
                torch.randn(rows, 96).to(dtype),
            )
            got, ran = linear.compiled(*given), called(linear.compiled, *given)
            expected = exact(*given[:3], "silu") + given[4].double()
            assert distance(got, expected) < {torch.float32: 1e-6, torch.float64: 1e-12}.get(
                dtype, 5e-3
            )
            if few is None:
                assert not ran
            else:
                assert "linear_of_rows" in ran
                assert ("linear_of_many_rows" in ran) == (rows == 200 and leaves_many)
        with pytest.raises(ValueError, match="linear"):
            linear.compiled(x[:, 1:], weight, bias)


@pytest.mark.parametrize("rows", [2, 64])
def test_gradients_and_autocast(tiles: Any, rows: int) -> None:
    """Where a gradient is required, or under autocast, none of these kernels runs."""
    op, x = ops.Linear(128, 128), torch.randn(rows, 128)
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.grad, x.sum(0).expand(128, 128))
    with torch.no_grad(), torch.autocast("cpu"):
        assert op(x).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 64])
def test_compilation(tiles: Any, rows: int) -> None:
    """A layer compiles whole, and gives the same."""
    op, x = ops.Linear(128, 128), torch.randn(rows, 128)
    opgraft.freeze(op)
    torch.testing.assert_close(torch.compile(op, fullgraph=True, backend="aot_eager")(x), op(x))


def test_threads(tiles: Any) -> None:
    """However panels and rows are shared among threads, results are the same."""
    threads = torch.get_num_threads()
    for rows in (1, 40, 96, 300):
        x, weight, bias = draw(rows, 384, 500)
        packed, results = tiles.pack_linear(weight, 3), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results += [
                    (tiles.packed_linear(x, weight, packed, bias), tiles.linear(x, weight, bias))
                ]
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            assert all(
                torch.equal(ours, theirs) for ours, theirs in zip(results[0], other, strict=True)
            )


def test_strided_weights_are_not_tried(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that would refuse a weight is not called, as an exception takes longer than a small layer."""
    from opgraft_cpu_kernels import linear

    called: list[Any] = []
    monkeypatch.setattr(linear, "_linear", lambda *arguments: called.append(arguments))
    weight, x = torch.randn(64, 64), torch.randn(1, 64)
    for strided in (weight.t(), nn.Parameter(weight.t()), weight[:, ::2], weight.to_sparse()):
        with torch.no_grad():
            result = linear.linear(x[:, : strided.shape[1]], strided)
        torch.testing.assert_close(result, x[:, : strided.shape[1]] @ strided.to_dense().t())
    assert called == []


def test_bad_arguments(kernels: Any) -> None:
    """The ops refuse what does not fit before they read it."""
    x, weight, bias = draw(3, 8, 5)
    for arguments in (
        (x, weight[:, :7]),
        (x, weight, bias[:4]),
        (x, weight, bias, "celu"),
        (x, weight.half()),
    ):
        with pytest.raises(ValueError, match="linear: "):
            kernels.linear(*arguments)
    with pytest.raises(ValueError, match="residual has shape"):
        kernels.linear(x, weight, bias, "none", x)
    with pytest.raises(ValueError, match="what pack_linear returned"):
        kernels.packed_linear(x, weight, bias)
