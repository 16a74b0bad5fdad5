"""Codes in tiles: their kernel beside float64, and layers that hold them so."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.linear.quantized.quantizers import quantize_int4, quantize_int8
from opgraft.ops.linear.quantized.storage import dequantize, in_tiles, scales_in_tiles
from opgraft.ops.weights import process_weights_after_loading
from opgraft.quantization import GGUFConfig, Int4Config, Int8Config
from quantization.test_gguf import drawn, lazy
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
KINDS = ("int8", "symmetric", "offsets")
ROWS = {"few": (1, 3, 4, 9), "many": (130,)}
CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": Int8Config,
    "int4": Int4Config,
    "int4 symmetric": lambda: Int4Config(symmetric=True),
    "Q4_1": lambda: GGUFConfig({"down.weight": "Q4_1"}),
    "Q8_0": lambda: GGUFConfig({"down.weight": "Q8_0"}),
}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_config = pytest.mark.parametrize("config", CONFIGS)


@pytest.fixture(params=["amx", "avx512_bf16"])
def tiled(kernels: Any, request: pytest.FixtureRequest) -> Any:
    """The ops, on each path that takes tiles."""
    import opgraft_cpu_kernels

    if request.param not in opgraft_cpu_kernels.paths():
        pytest.skip(f"this CPU lacks {request.param}")
    opgraft_cpu_kernels.set_path(request.param)
    return kernels


def made(
    features: int, width: int, group: int | None, kind: str
) -> tuple[list[Tensor | None], Tensor]:
    """Codes, scales and offsets in tiles, and the weight that they stand for."""
    plain = torch.randn(features, width) / width**0.5
    rows = (
        quantize_int4(plain, group, kind == "symmetric")
        if kind != "int8"
        else (*quantize_int8(plain, group), None)
    )
    scales = [None if each is None else scales_in_tiles(each) for each in rows[1:]]
    return [in_tiles(rows[0], width), *scales], dequantize(*rows, width, torch.float64)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    if expected.numel():
        largest = expected.abs().amax(-1, keepdim=True).clamp(min=1)
        assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * largest).all()


@each_kind
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(tiled: Any, dtype: torch.dtype, rows: str, kind: str) -> None:
    """Results are those of float64, to the last digits of each dtype: inputs are not rounded to the codes' few bits."""
    for width, group in ((32, 32), (96, 96), (160, 32), (576, 64), (70, None), (769, None)):
        for features in (32, 96):
            weight, plain = made(features, width, group, kind)
            for count in ROWS[rows]:
                x, bias = torch.randn(count, width).to(dtype), torch.randn(features).to(dtype)
                x[0] *= torch.logspace(-4, 4, width)  # of very different sizes, side by side
                got = tiled.quantized_linear(x, *weight, bias)
                assert_near(got, x.double() @ plain.T + bias.double(), dtype)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_dtypes_of_scales(tiled: Any, scale_dtype: torch.dtype) -> None:
    """Scales and offsets may have another dtype than inputs have."""
    codes, scales, offsets = quantize_int4(torch.randn(64, 96) / 8, 32)
    assert offsets is not None
    scales, offsets = scales.to(scale_dtype), offsets.to(scale_dtype)
    plain = dequantize(codes, scales, offsets, 96, torch.float64)
    for rows in (1, 130):
        x = torch.randn(rows, 96)
        got = tiled.quantized_linear(
            x, in_tiles(codes, 96), scales_in_tiles(scales), scales_in_tiles(offsets)
        )
        assert_near(got, x.double() @ plain.T, torch.float32)


@each_kind
def test_what_x_may_be(tiled: Any, kind: str) -> None:
    """Strided and empty inputs, those of several dimensions, zeros, and rows with what is no number."""
    weight, plain = made(64, 96, 32, kind)
    wide = torch.randn(5, 3, 2, 96)
    for x in (
        wide[:, 1],
        wide.transpose(0, 2),
        torch.randn(96, 7).T,
        torch.randn(4, 192)[:, ::2],
        wide[:0],
    ):
        assert_near(tiled.quantized_linear(x, *weight), x.double() @ plain.T, torch.float32)
    assert torch.equal(tiled.quantized_linear(torch.zeros(2, 96), *weight), torch.zeros(2, 64))
    for value in (torch.inf, torch.nan):
        x = torch.randn(6, 96)
        x[1, 3] = value
        assert tiled.quantized_linear(x, *weight).isfinite().all(1).tolist() == [
            True,
            False,
            True,
            True,
            True,
            True,
        ]


@each_kind
def test_a_row_is_the_same_among_others(tiled: Any, kind: str) -> None:
    """A row has the same bits alone and among few, on any number of threads."""
    weight, _ = made(320, 576, 32, kind)
    x, threads = torch.randn(9, 576), torch.get_num_threads()
    alone = torch.cat([tiled.quantized_linear(row, *weight) for row in x.split(1)])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(tiled.quantized_linear(x, *weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_paths_without_tiles(kernels: Any, path: str) -> None:
    """The form computes with tiles on every path, compiled too; the op says where it cannot."""
    from opgraft_cpu_kernels import quantized

    weight, plain = made(64, 96, 32, "offsets")
    x = torch.randn(3, 96)
    compiled = torch.compile(functional.quantized_linear, fullgraph=True, backend="aot_eager")
    for run in (quantized.quantized_linear, compiled):
        assert_near(run(x, *weight), x.double() @ plain.T, torch.float32)
    if path not in quantized.TILED:
        with pytest.raises(
            NotImplementedError, match=f"quantized_linear: the path {path} has no kernel for tiles"
        ):
            kernels.quantized_linear(x, *weight)


def test_bad_tiles(tiled: Any) -> None:
    """The op refuses what does not fit before it reads it."""
    (codes, scales, offsets), _ = made(64, 96, 32, "offsets")
    assert codes is not None
    assert scales is not None
    assert offsets is not None
    x = torch.randn(3, 96)
    for arguments in (
        (torch.randn(3, 64), codes, scales),
        (x, codes[:, :2], scales),
        (x, codes.char(), scales),
        (x, codes, scales[:1]),
        (x, codes, scales.mT),
        (x, codes, scales, offsets[:, :1]),
        (x, codes, scales.repeat(1, 2, 1)),
    ):
        with pytest.raises(ValueError, match="quantized_linear: "):
            tiled.quantized_linear(*arguments)


def layer_of(config: str, features: int = 64, seed: int = 0) -> Any:
    """A layer with 96 inputs that was loaded."""
    layer: Any = ops.ReplicatedLinear(
        96, features, quant_config=CONFIGS[config](), prefix="down", return_bias=False
    )
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(features, 96, generator=generator) / 10
    given = lazy(config, drawn(config, features, 96, seed)) if config.startswith("Q") else plain
    layer.weight.weight_loader(layer.weight, given)
    layer.bias.data.copy_(torch.randn(features, generator=generator))
    process_weights_after_loading(layer)
    return layer


def in_rows(config: str, seed: int = 0) -> Any:
    """The same layer without tiles."""
    import opgraft_cpu_kernels

    before = opgraft_cpu_kernels.path()
    opgraft_cpu_kernels.set_path("scalar")
    try:
        layer = layer_of(config, seed=seed)
    finally:
        opgraft_cpu_kernels.set_path(before)
    assert layer.weight.dim() == 2
    return layer


def expect_saved(layer: nn.Module, expected: nn.Module) -> None:
    saved, others = layer.state_dict(), expected.state_dict()
    assert [*saved] == [*others]
    assert all(
        torch.equal(saved[name], other) and saved[name].dtype == other.dtype
        for name, other in others.items()
    )


def weight_of(layer: Any) -> Tensor:
    state = layer.state_dict()
    return dequantize(state["weight"], state["scales"], state.get("offsets"), 96, torch.float64)


@each_config
def test_layers_hold_tiles_only(tiled: Any, config: str) -> None:
    """A loaded layer has its codes in tiles, in no more memory, and computes and saves what it would in rows."""
    layer, expected, x = layer_of(config), in_rows(config), torch.randn(3, 96)
    assert layer.weight.dim() == 3
    assert sum(each.nbytes for each in layer.parameters()) <= sum(
        each.nbytes for each in expected.parameters()
    )
    expect_saved(layer, expected)
    assert_near(layer(x), x.double() @ weight_of(layer).T + layer.bias.double(), torch.float32)
    assert "in tiles" in layer.quant_method.remark(layer)


@each_config
def test_copies(tiled: Any, config: str) -> None:
    """Copies, pickled ones and those of torch.save compute the same bits, and are loaded apart from one another."""
    layer, x, buffer = layer_of(config), torch.randn(3, 96), io.BytesIO()
    expected = layer(x)
    torch.save(layer, buffer)
    buffer.seek(0)
    pickled = pickle.loads(pickle.dumps(layer))  # noqa: S301  # our own
    copies = copy.deepcopy(layer), pickled, torch.load(buffer, weights_only=False)
    other = in_rows(config, seed=1)
    for each in copies:
        assert torch.equal(each(x), expected)
        expect_saved(each, layer)
        each.load_state_dict(other.state_dict())
        expect_saved(each, other)
        assert_near(each(x), x.double() @ weight_of(other).T + other.bias.double(), torch.float32)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_anew(tiled: Any, assign: bool) -> None:
    """What is loaded counts at the next call; parts may be left out; other shapes are refused by name."""
    layer, other = layer_of("int4"), layer_of("int4", seed=1)
    codes = {"weight": other.state_dict()["weight"]}
    layer.load_state_dict(codes, strict=False, assign=assign)
    assert torch.equal(layer.state_dict()["weight"], codes["weight"])
    layer.load_state_dict(other.state_dict(), assign=assign)
    x = torch.randn(3, 96)
    assert torch.equal(layer(x), other(x))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(
            {"weight": torch.zeros(32, 64, dtype=torch.uint8)}, strict=False, assign=assign
        )


def test_the_rows_are_released(tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds the codes in rows once they are in tiles."""
    from opgraft_cpu_kernels import tiles

    seen: list[weakref.ref[Any]] = []

    def watched(rows: Tensor, in_features: int) -> Tensor:
        seen.append(weakref.ref(rows.untyped_storage()))
        return in_tiles(rows, in_features)

    monkeypatch.setattr(tiles, "in_tiles", watched)
    layer_of("int4")
    gc.collect()
    assert [reference() for reference in seen] == [None]


def test_what_stays_in_rows(tiled: Any) -> None:
    """Outputs that fill no tile, groups that do not, and layers whose form another kernel computes."""
    with opgraft.set_config(opgraft.OpgraftConfig(providers={"quantized_linear": "opgraft"})):
        assert layer_of("int4").weight.dim() == 2
    assert layer_of("int4", features=48).weight.dim() == 2
    grouped: Any = ops.ReplicatedLinear(
        96, 64, quant_config=Int4Config(group_size=16), prefix="down"
    )
    grouped.weight.weight_loader(grouped.weight, torch.randn(64, 96))
    process_weights_after_loading(grouped)
    assert grouped.weight.dim() == 2


@each_config
def test_the_path_changes(tiled: Any, config: str) -> None:
    """A layer computes what it did on a path that takes no tiles, and after it on one that does."""
    import opgraft_cpu_kernels

    layer, x = layer_of(config), torch.randn(3, 96)
    before, path = layer(x), opgraft_cpu_kernels.path()
    for other in opgraft_cpu_kernels.paths():
        opgraft_cpu_kernels.set_path(other)
        assert_near(layer(x), before.double(), torch.float32)
    opgraft_cpu_kernels.set_path(path)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
def test_embeddings(tiled: Any, kind: str, plugin: Path) -> None:
    """Rows are looked up as without tiles, bit by bit, and a head that is tied computes with the same tiles."""
    data = drawn(kind, 64, 96)
    config = GGUFConfig({"embed.weight": kind})
    embedding, plain = (
        ops.VocabParallelEmbedding(64, 96, quant_config=config, prefix="embed") for _ in range(2)
    )
    for each in (embedding, plain):
        each.weight.weight_loader(each.weight, lazy(kind, data))
    process_weights_after_loading(embedding)
    assert (embedding.weight.dim(), plain.weight.dim()) == (3, 2)
    ids = torch.tensor([[3, 63, 33], [0, 3, 3]])
    assert torch.equal(embedding(ids), plain(ids))
    head: Any = ops.ParallelLMHead(64, 96).tie_weights(embedding)
    assert head is embedding
    x, rows = torch.randn(2, 96), plain(torch.arange(64))
    assert_near(ops.LogitsProcessor(64)(head, x), x.double() @ rows.double().T, torch.float32)
