"""Models whose layers ranks share, compiled: collectives are nodes, and ranks have the logits of the model itself."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.compilation.cache import ENTRY
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.models import load_model
from support.exchanges import names
from support.random_decoders import DECODERS, written
from support.ranks import Ranks
from torch import Tensor, nn

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose biases the first rank alone adds, so that the ranks have unlike graphs."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    family, values = DECODERS["llama 3, with biases, tied"]
    written(family, folder, **{**values, "num_hidden_layers": 2})
    return str(folder)


class WithLogits(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.decoder: Any = load_model(
            OpgraftConfig(model=ModelConfig(name=folder, dtype="float32"))
        )

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.decoder.compute_logits(self.decoder(ids, positions))
        return logits


def inputs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(
        3, 99, (size,), generator=torch.Generator().manual_seed(size)
    ), torch.arange(size)


def compiled_logits(
    folder: str, settings: dict[str, Any], sizes: list[int]
) -> tuple[list[Tensor], Counter[str]]:
    """The logits for each size, once they are those of the model itself, and the operators of the graph."""
    model = WithLogits(folder).eval()
    compiled = opgraft.compile(model, CompilationConfig(**settings), args=inputs(8))
    found = []
    with torch.no_grad():
        for size in sizes:
            found.append(compiled(*inputs(size)))
            torch.testing.assert_close(found[-1], model(*inputs(size)), rtol=1e-5, atol=1e-5)
    return found, names(compiled) if getattr(compiled, "graph", None) is not None else Counter()


def expect_equal(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


EXPECTED: dict[tuple[str, ...], dict[str, int]] = {
    (): {"all_reduce_rms_norm": 5, "linear": 9},
    ("all_reduce_rms_norm",): {"all_reduce": 5, "linear": 9},
    ("sequence_parallelism",): {"reduce_scatter_rows": 5, "all_gather_rows": 5, "linear": 9},
    ("sequence_parallelism", "async_tensor_parallelism"): {
        "reduce_scatter_rows": 1,
        "linear_reduce_scatter_rows": 4,
        "all_gather_rows_linear": 5,
    },
}
"""By the passes that ``pass_config`` names: collectives and linear maps of two layers, embedding and logits."""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"level": 0}, marks=pytest.mark.slow),
        pytest.param(
            {"level": 1, "pass_config": {"all_reduce_rms_norm": False}}, marks=pytest.mark.slow
        ),
        {"level": 1, "splitting_ops": ["opgraft::all_reduce_rms_norm", "opgraft::all_gather"]},
        {"level": 1, "pass_config": {"sequence_parallelism": True}},
        {
            "level": 2,
            "backend": "aot_eager",
            "custom_ops": ["none"],
            "pass_config": {"sequence_parallelism": True, "async_tensor_parallelism": True},
        },
    ],
    ids=str,
)
def test_at_a_level(settings: dict[str, Any], llama: str, two: Ranks) -> None:
    """One graph serves 50 sizes, those that ranks do not divide too; the collectives of layers, embedding and logits
    are nodes of it, as linear maps are, joined with what is around them as far as settings say so."""
    (first, graph), (second, _) = two.run(compiled_logits, llama, settings, [*range(1, 51)])
    expect_equal(first, second)
    if settings["level"]:
        expected = {"all_gather": 1, **EXPECTED[tuple(settings.get("pass_config", {}))]}
        words = ("all_", "_scatter", "linear")
        assert {
            name: count for name, count in graph.items() if any(word in name for word in words)
        } == expected


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated"
)  # torch's own, where inductor starts
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("level", "cache"), [(3, False), (2, True)])
def test_by_inductor(
    level: int, cache: bool, apart: bool, llama: str, two: Ranks, tmp_path: Path
) -> None:
    """Generated code calls the collectives, from the cache too, of all rows and of parts."""
    settings = {"level": level, "cache": cache, "pass_config": {"sequence_parallelism": apart}}
    settings |= {"cache_folder": str(tmp_path)} if cache else {}
    for _ in range(1 + cache):
        (first, _), (second, _) = two.run(compiled_logits, llama, settings, [1, 2, 7, 50])
        expect_equal(first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_an_entry_that_one_rank_has_lost(llama: str, two: Ranks, tmp_path: Path) -> None:
    """The rank that compiles anew compares its code with the model, and the other rank joins the exchanges."""
    settings = {"level": 2, "cache": True, "cache_folder": str(tmp_path)}
    two.run(compiled_logits, llama, settings, [7])
    of_models = [
        file.parent for file in tmp_path.glob(f"*/{ENTRY}") if "signature" in file.read_text()
    ]
    assert len(of_models) == 2
    shutil.rmtree(of_models[0])
    (first, _), (second, _) = two.run(compiled_logits, llama, settings, [1, 7])
    expect_equal(first, second)
