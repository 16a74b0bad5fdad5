"""Graphs in pieces, and static graphs of pieces or of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, PluggableClass
from opgraft.compat.ahead_of_time import write_package
from opgraft.compilation.static_graph import StaticGraph
from opgraft.errors import CompilationError, ConfigError
from opgraft.ops import Attention, Linear, RMSNorm, SiLU
from opgraft.ops.attention.node import AttentionNodes
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH = 8
SDPA = "aten::scaled_dot_product_attention"


class Layer(nn.Module):
    """Attention of each row to those of its sequence, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, eps=1e-5)
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.out = Linear(WIDTH, WIDTH)
        self.act = SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, _ = x.shape
        rows = self.norm(x).reshape(
            sequences * length, WIDTH
        )  # a size that is a multiple of the batch's
        query, key, value = self.qkv(rows).view(sequences, length, 3 * WIDTH).chunk(3, dim=-1)
        return x + self.act(self.out(scaled_dot_product_attention(query, key, value)))


class Decoder(nn.Module):
    """Layers one behind the other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        given = x
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "given": given, "length": 5}


@pytest.fixture
def decoder() -> Decoder:
    model = Decoder().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=0.5)
    return model


def compiled(model: nn.Module, backend: str = "counting", **settings: Any) -> opgraft.Compiled:
    return opgraft.compile(
        model, CompilationConfig(backend=backend, **settings), args=(torch.randn(4, 5, WIDTH),)
    )  # type: ignore[no-any-return]


def execution(found: opgraft.Compiled) -> opgraft.Decision:
    return found.decision.parts[-1]


def expect_alike(
    found: opgraft.Compiled, model: nn.Module, sizes: Any = (1, 2, 3, 5, 8, 50)
) -> None:
    earlier = []
    for size in sizes:
        x = torch.randn(size, 5, WIDTH)
        result, expected = found(x), model(x)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        earlier.append((result["hidden"], expected["hidden"]))
    for result, known in earlier:  # no later call has written to it
        torch.testing.assert_close(result, known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_layers_of_attention_give_two_pieces_each_and_one_more(
    layers: int, counting: list[Any]
) -> None:
    """What is before the first, between two and behind the last has code each; that between two serves for all."""
    model = Decoder(layers).eval().requires_grad_(False)
    found = compiled(model, splitting_ops=(SDPA,))
    assert execution(found).chosen.startswith(f"{2 * layers + 1} pieces")
    assert len(counting) == min(layers + 1, 3)
    assert [(each.name, each.accepted, each.reason) for each in execution(found).candidates] == [
        (SDPA, True, f"{layers} cuts")
    ]
    expect_alike(found, model)


def test_equal_pieces_have_weights_of_their_own(decoder: Decoder, counting: list[Any]) -> None:
    """A write to a layer's weight is seen, though its piece shares code with others."""
    found = compiled(decoder, splitting_ops=(SDPA,))
    decoder.layers[1].out.weight.mul_(2)  # type: ignore[union-attr,operator]
    expect_alike(found, decoder)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_calls_are_padded_to_the_next_size(
    decoder: Decoder, mode: str, counting: list[Any]
) -> None:
    """Every size of the batch has the model's results: those that are recorded, between them, and above them."""
    made: list[tuple[int, ...]] = []

    class Seen(StaticGraph):
        def __init__(self, run: Any, inputs: Any, before: Any = None) -> None:
            super().__init__(run, inputs, before)
            made.append(tuple(inputs[0].shape))

    PluggableClass.register_oot(Seen, name="static_graph")
    found = compiled(decoder, graph_mode=mode, capture_sizes=(4, 1))
    pieces = {"piecewise": 4, "full": 1}[mode]
    assert len(made) == 2 * pieces  # all of them when it was compiled
    assert {shape[0] for shape in made if len(shape) == 3} == {4, 1}
    assert execution(found).reason == "recorded for batches of 1, 4"
    expect_alike(found, decoder, range(1, 12))
    assert len(made) == 2 * pieces


def test_padding_holds_nothing_that_others_read(decoder: Decoder, counting: list[Any]) -> None:
    """Rows that an earlier call has left behind, and that are no numbers, harm no later one."""
    found = compiled(decoder, graph_mode="piecewise", capture_sizes=(8,))
    found(torch.full((8, 5, WIDTH), torch.nan))
    expect_alike(found, decoder, (3,))


def test_what_mixes_rows_of_a_batch_is_refused(counting: list[Any]) -> None:
    """Padding would change what it computes, which the comparison with the model finds."""

    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    with pytest.raises(
        CompilationError, match=r"Centred compiled differs from the model itself where .* is 3"
    ):
        compiled(Centred().eval(), graph_mode="full", capture_sizes=(1, 4))


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.sum((1, 2)).gt(-1e9).nonzero().flatten()
        return x.index_select(0, rows) * 2


def test_what_the_host_must_see_is_not_recorded(counting: list[Any]) -> None:
    """An operator whose result has as many rows as values say is named, with what to do; cut there, the rest runs."""
    with pytest.raises(CompilationError, match=r"cannot record aten::nonzero.*splitting_ops"):
        compiled(Chosen().eval(), graph_mode="full")
    found = compiled(Chosen().eval(), graph_mode="piecewise", splitting_ops=("aten::nonzero",))
    x = torch.randn(3, 5, WIDTH)
    torch.testing.assert_close(found(x), x * 2)


def test_attention_is_never_recorded(counting: list[Any]) -> None:
    """A recording would read the batch of its own step for ever, so the node of a layer is refused by its tag."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention(2, 8, 1.0, prefix="attn")
            self.attn.is_node = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self.attn(x, x, x)
            return attended

    model = Attending().eval()
    config = CompilationConfig(backend="counting", graph_mode="full", capture_sizes=(1, 4))
    with (
        AttentionNodes({"attn": model.attn}).entered(),
        pytest.raises(
            CompilationError,
            match=r"cannot record opgraft::attend_layer, as it is tagged cudagraph_unsafe",
        ),
    ):
        opgraft.compile(model, config, args=(torch.randn(3, 16),))


@pytest.mark.parametrize(("settings", "message"), [
    ({"splitting_ops": ("scaled_dot_product_attention",)}, r"splitting_ops has 'scaled_dot.*namespace::name"),
    ({"splitting_ops": ("aten::scaled_dot",)}, "torch knows no such operator"),
    ({"splitting_ops": ("aten::nonzero",)}, r"has 'aten::nonzero', and the graph does not call it: .*aten::"),
    ({"splitting_ops": (SDPA, "opgraft::all_reduce")}, r"has 'opgraft::all_reduce', and the graph does not call it"),
    ({"capture_sizes": (1,)}, "capture_sizes is set, and compilation_config.graph_mode is none"),
    ({"graph_mode": "full", "mode": "STOCK_TORCH_COMPILE"}, "graph_mode is set, and is for the mode FULL"),
    ({"graph_mode": "partly"}, "one of none, piecewise, full"),
    ({"graph_mode": "full", "capture_sizes": (0, 1)}, r"capture_sizes is \(0, 1\): use sizes of at least 1"),
])  # fmt: skip
def test_wrong_settings(
    decoder: Decoder, settings: dict[str, Any], message: str, counting: list[Any]
) -> None:
    """The error names the setting, its value and what to write."""
    with pytest.raises(ConfigError, match=message):
        compiled(decoder, **settings)


def test_one_size_is_dynamic_where_graphs_are_recorded(
    decoder: Decoder, counting: list[Any]
) -> None:
    """Without a batch there is nothing to record graphs for, and the error names the sizes."""
    config = CompilationConfig(backend="counting", graph_mode="full")
    with pytest.raises(ConfigError, match="the graph has none for dynamic sizes"):
        opgraft.compile(decoder, config, args=(torch.randn(4, 5, WIDTH),), dynamic_shapes=())


def test_a_size_is_not_exchanged(counting: list[Any]) -> None:
    """A model that returns the size of a tensor cannot be in pieces, and the error says so."""

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return scaled_dot_product_attention(x, x, x) * 2, x.shape[0]

    with pytest.raises(CompilationError, match="returns the size of a tensor"):
        compiled(Sized().eval(), splitting_ops=(SDPA,))


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.slow
def test_pieces_by_inductor(decoder: Decoder) -> None:
    """Generated code of pieces serves any size of the batch."""
    expect_alike(
        compiled(decoder, "inductor", graph_mode="piecewise", capture_sizes=(1, 4)), decoder
    )


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"splitting_ops": (SDPA,)}, {"graph_mode": "full", "capture_sizes": (1, 4)}]
)
def test_code_of_pieces_is_kept(
    decoder: Decoder, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one compilation has written the next one loads, and weights stay the model's own."""
    written: list[Path] = []

    def writing(graph: Any, example: Any, file: Path) -> None:
        written.append(file)
        write_package(graph, example, file)

    monkeypatch.setattr("opgraft.compilation.packages.write_package", writing)
    settings = {**settings, "cache": True, "cache_folder": str(tmp_path / "cache")}
    model = (
        decoder.layers[1] if "graph_mode" in settings else decoder
    )  # which returns a constant, too
    number = 1 if "graph_mode" in settings else 3
    for _ in range(2):
        found, x = compiled(model, "inductor", **settings), torch.randn(3, 5, WIDTH)
        decoder.layers[1].out.weight.mul_(2)  # type: ignore[union-attr,operator]
        torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=1e-5)
        assert len(written) == number


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.slow
def test_what_returns_a_size_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A package would return a size as a tensor, so the code of such a model is not kept."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return self.out(x), x.shape[0]

    model = Sized().eval().requires_grad_(False)
    found = compiled(model, "inductor", cache=True, cache_folder=str(tmp_path / "cache"))
    for size in (1, 3):
        x = torch.randn(size, 5, WIDTH)
        result, returned = found(x)
        torch.testing.assert_close(result, model(x)[0], rtol=1e-5, atol=1e-5)
        assert type(returned) is int
        assert returned == size
    assert "returns something besides tensors" in caplog.text
