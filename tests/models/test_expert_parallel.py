"""Experts over several ranks: each has whole experts, and tokens travel to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Site
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, ParallelConfig
from opgraft.distributed import get_dp_group, get_ep_group
from opgraft.errors import LayerError
from opgraft.models import load_model
from opgraft.ops import FusedMoE, TransformersFusedMoE
from support.random_decoders import DEEPSEEK_EXPERTS, LATENT, ROUTED, written
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **ROUTED,
            "num_local_experts": 8,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOss", {**ROUTED, "num_local_experts": 8, "sliding_window": 5}),
    "deepseek_v2": (
        "DeepseekV2",
        {**LATENT, **DEEPSEEK_EXPERTS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **DEEPSEEK_EXPERTS, "q_lora_rank": 20}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By family: the folder, and the model of transformers."""
    folder = tmp_path_factory.mktemp("experts")
    return {
        name: (folder / name, written(family, folder / name, **v))
        for name, (family, v) in FAMILIES.items()
    }


@pytest.fixture(
    scope="module", params=[{"tensor": 2}, {"data": 2}, {"tensor": 2, "data": 2}], ids=str
)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, int]]:
    """A job, and how many of its ranks have tokens of their own."""
    sizes = request.param
    world = sizes.get("tensor", 1) * sizes.get("data", 1)
    with Ranks(world, **sizes) as started:
        yield started, sizes.get("data", 1)


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 99, (count,), generator=torch.Generator().manual_seed(count))


def loaded(folder: str, **parallel: Any) -> Any:
    return load_model(
        OpgraftConfig(
            model=ModelConfig(name=folder, dtype="float32"),
            load=LoadConfig(device="cpu", progress=False),
            parallel=ParallelConfig(**parallel),
        )
    )


@torch.no_grad()
def logits_of(model: Any, count: int) -> torch.Tensor:
    logits: torch.Tensor = model.compute_logits(model(ids(count), torch.arange(count)))
    return logits


def experts_of(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, FusedMoE)]


def bytes_of_experts(model: Any) -> int:
    return sum(layer.w13_weight.nbytes + layer.w2_weight.nbytes for layer in experts_of(model))


def on_rank(
    folder: str, steps: Sequence[Sequence[int]], redundant: int = 0
) -> tuple[list[torch.Tensor], int, int]:
    """The logits of steps, of which each data replica has so many tokens; bytes of experts; places of a layer."""
    model = loaded(folder, expert=get_ep_group().world_size, redundant_experts=redundant)
    replica = get_dp_group().rank_in_group
    layers = experts_of(model)
    results = [logits_of(model, step[replica]) for step in steps]
    return results, bytes_of_experts(model), len(layers[0].w13_weight)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("redundant", [0, 4])
def test_logits(
    family: str, redundant: int, ranks: tuple[Ranks, int], checkpoints: dict[str, tuple[Path, Any]]
) -> None:
    """Ranks with whole experts each give the logits of one rank, whoever has how many tokens, and none too."""
    job, replicas = ranks
    folder, reference = checkpoints[family]
    alone = loaded(str(folder))
    whole = bytes_of_experts(alone)
    steps = [(17, 3), (5, 0), (0, 11), (1, 1)] if replicas == 2 else [(17,), (1,)]
    for rank, (results, size, places) in enumerate(job.run(on_rank, str(folder), steps, redundant)):
        world = len(job.processes)
        assert places == (8 + redundant) // world
        assert size * 8 * world == whole * (8 + redundant)
        for step, logits in zip(steps, results, strict=True):
            count = step[rank * replicas // world]
            with torch.no_grad():
                expected = reference(ids(count)[None]).logits[0] if count else torch.empty(0, 99)
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def chosen_by_caller(
    tokens: torch.Tensor, chosen: torch.Tensor, ep_size: int, redundant: int = 0
) -> torch.Tensor:
    """What four experts of the same weights on every rank make of tokens."""
    layer = TransformersFusedMoE(
        4, 2, 8, 6, tp_size=1, ep_size=ep_size, num_redundant_experts=redundant, reduce_results=True
    )
    generator = torch.Generator().manual_seed(1)
    for parameter, shape in ((layer.w13_weight, (4, 12, 8)), (layer.w2_weight, (4, 8, 6))):
        layer.weight_loader(parameter, torch.randn(shape, generator=generator))
    output: torch.Tensor = layer(
        tokens, chosen, torch.linspace(0.2, 1.1, chosen.numel()).reshape(chosen.shape)
    )
    return output


def chosen_on_rank(tokens: torch.Tensor, chosen: torch.Tensor, redundant: int) -> torch.Tensor:
    return chosen_by_caller(tokens, chosen, get_ep_group().world_size, redundant)


def refused_choice(tokens: torch.Tensor, chosen: torch.Tensor) -> str:
    with pytest.raises(ValueError, match="topk_ids") as caught:
        chosen_on_rank(tokens, chosen, 0)
    return str(caught.value)


@pytest.mark.parametrize("redundant", [0, 4])
def test_a_choice_of_no_expert(redundant: int, ranks: tuple[Ranks, int]) -> None:
    """An id of -1 adds nothing where ranks share experts, as on one rank."""
    tokens = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([[0, -1], [-1, -1], [3, 2], [-1, 1]])
    expected = chosen_by_caller(tokens, chosen, 1)
    for found in ranks[0].run(chosen_on_rank, tokens, chosen, redundant):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_choice_of_an_expert_that_is_not_there(ranks: tuple[Ranks, int]) -> None:
    """Ids beyond the experts are refused where ranks share them, as on one rank."""
    for said in ranks[0].run(refused_choice, torch.zeros(1, 8), torch.tensor([[0, 4]])):
        assert said.startswith(
            "TransformersFusedMoE: topk_ids reach from 0 to 4, expected those of 4 experts"
        )


PLUGIN = """
import torch
from opgraft import PluggableClass
from opgraft.ops.moe.fused.exchange import ExpertExchange

platforms = "any"
CALLS = []

@PluggableClass.register_oot("expert_exchange")
class VendorExchange(ExpertExchange):
    def __call__(self, x, topk_weights, owners, ids, experts):
        CALLS.append((len(x), sorted(set(owners.flatten().tolist()))))
        size, rank = self.group.world_size, self.group.rank_in_group
        counts = self.group.all_gather(torch.tensor([len(x)]), 0).tolist()
        start = sum(counts[:rank])
        every = [self._of_all(each, counts, start) for each in (x, topk_weights, owners + 1, ids)]
        tokens, weights, owners, ids = every
        made = experts(tokens, weights, torch.where(owners == rank + 1, ids, -1).to(torch.int32))
        return self.group.all_reduce(made)[start : start + len(x)]

    def _of_all(self, own, counts, start):
        whole = own.new_zeros(sum(counts), own.shape[1])
        whole[start : start + len(own)] = own
        return self.group.all_reduce(whole)
"""


def by_vendor(
    folder: str, steps: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], list[Any], list[str]]:
    """The logits of steps, calls of the plugin's exchange, and the class of each layer's exchange."""
    import vendor_exchange

    model = loaded(folder, expert=get_ep_group().world_size)
    replica = get_dp_group().rank_in_group
    results = [logits_of(model, step[replica]) for step in steps]
    return (
        results,
        vendor_exchange.CALLS,
        [type(layer.exchange).__name__ for layer in experts_of(model)],
    )


def test_an_exchange_of_a_plugin(site: Site, checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """A plugin's way of tokens to experts is called in place of ours, by replicas without tokens too."""
    site.plugin("vendor-exchange", PLUGIN)
    folder, reference = checkpoints["mixtral"]
    steps = [(17, 3), (5, 0), (0, 11)]
    with Ranks(2, path=[str(site.folder)], plugins="vendor_exchange", data=2) as job:
        answers = job.run(by_vendor, str(folder), steps)
    for replica, (results, calls, classes) in enumerate(answers):
        assert set(classes) == {"VendorExchange"}
        assert [count for count, _ in calls] == [step[replica] for step in steps for _ in classes]
        assert {owner for _, owners in calls for owner in owners} == {0, 1}
        for step, logits in zip(steps, results, strict=True):
            count = step[replica]
            with torch.no_grad():
                expected = reference(ids(count)[None]).logits[0] if count else torch.empty(0, 99)
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def refused(folder: str) -> str:
    with pytest.raises(LayerError) as caught:
        loaded(folder, expert=get_ep_group().world_size)
    return str(caught.value)


def test_experts_that_ranks_do_not_divide(ranks: tuple[Ranks, int], tmp_path: Path) -> None:
    """The error names the layer, both numbers and the setting that helps."""
    written("Mixtral", tmp_path, num_local_experts=5)
    for said in ranks[0].run(refused, str(tmp_path)):
        assert "model.layers.0.mlp.experts" in said
        assert (
            f"5 experts and 0 redundant ones cannot be shared by {len(ranks[0].processes)} ranks"
            in said
        )
        assert "parallel.redundant_experts" in said


def test_redundant_experts_of_one_rank(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Without ranks that share experts there is no use for redundant ones."""
    with pytest.raises(
        LayerError, match="num_redundant_experts is 2, expected 0 where ep_size is 1"
    ):
        loaded(str(checkpoints["mixtral"][0]), redundant_experts=2)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "top_k is 9, expected 1 to 8"),
        (
            "deepseek_v3",
            {"n_group": 3},
            "num_expert_group is 3 and topk_group 2, expected a divisor of 8 experts",
        ),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 5},
            "top_k is 5, expected 1 to 4, the experts to choose from",
        ),
    ],
)
def test_numbers_of_experts_that_do_not_fit(
    family: str,
    values: dict[str, Any],
    words: str,
    checkpoints: dict[str, tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    """A config whose numbers contradict each other is refused before weights are read, with the layer's name."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints[family][0], folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **values}), "utf-8")
    with pytest.raises(LayerError, match=rf"model.layers.\d.mlp.experts'?: {words}"):
        loaded(str(folder))
