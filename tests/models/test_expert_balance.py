"""Experts that move between ranks by the tokens that they compute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from opgraft.config import (
    LoadConfig,
    ModelConfig,
    OpgraftConfig,
    ParallelConfig,
    QuantizationSettings,
)
from opgraft.distributed import get_dp_group, get_ep_group, get_tp_group
from opgraft.engine.runner.expert_balancer import ExpertBalancer
from opgraft.errors import LayerError
from opgraft.functional import fused_experts
from opgraft.models import load_model
from opgraft.models.load import load_weights
from opgraft.ops import FusedMoE, UnquantizedFusedMoEMethod
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused.balance import heaviest_rank, moves, nearest, place_by_load
from opgraft.ops.moe.fused.placement import ExpertPlacement
from support.random_decoders import written
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

EXPERTS, TOPK = 8, 2


def drawn(seed: int) -> tuple[list[int], int, int]:
    """Loads of some experts, places and ranks."""
    chance = random.Random(seed)  # noqa: S311  # no secret
    ranks = chance.choice([1, 2, 3, 4])
    places = ranks * chance.randint(1, 6)
    experts = chance.randint(1, places)
    return [chance.choice([0, 1, 5, 80, 400]) for _ in range(experts)], places, ranks


@pytest.mark.parametrize("seed", range(40))
def test_a_placement(seed: int) -> None:
    """Every expert has a place, ranks have equally many, and the expert with the most tokens a replica has the most."""
    loads, places, ranks = drawn(seed)
    placed = place_by_load(loads, places, ranks)
    assert [len(experts) for experts in placed] == [places // ranks] * ranks
    replicas = Counter(expert for experts in placed for expert in experts)
    assert set(replicas) == set(range(len(loads)))
    assert replicas[loads.index(max(loads))] == max(replicas.values())
    assert max(replicas.values()) <= ranks or places > ranks * len(loads)


def test_a_placement_by_hand() -> None:
    """The hottest expert is replicated, and its replicas are on different ranks, beside cold ones."""
    loads = [90, 10, 20, 30, 0, 60]
    placed = place_by_load(loads, 8, 2)
    assert placed == [[0, 3, 5, 4], [0, 5, 2, 1]]
    assert heaviest_rank(loads, [*placed[0], *placed[1]], 2) == 105


@pytest.mark.parametrize(
    ("loads", "places", "most"),
    [([1000, 1, 1, 1], 8, 501.5), ([1000, 10, 10, 10, 10, 10], 10, 525)],
)
def test_no_more_replicas_than_ranks(loads: list[int], places: int, most: float) -> None:
    """A third replica on two ranks would stand beside another one, and take a place from others."""
    placed = place_by_load(loads, places, 2)
    assert [experts.count(0) for experts in placed] == [1, 1]
    assert heaviest_rank(loads, [*placed[0], *placed[1]], 2) == most


def test_replicas_take_turns() -> None:
    """Single tokens, as steps of one sequence have them, go to each of an expert's replicas alike."""
    placement = ExpertPlacement(4, 4, 2, 0, "a layer")
    places = [int(placement.choose(torch.tensor([[2]]))) for _ in range(4)]
    assert places == [2, 6, 2, 6]


@pytest.mark.parametrize("seed", range(40))
def test_moves(seed: int) -> None:
    """Moves lead from any placement to any other, by one or two at once, and no expert is ever without a place."""
    loads, places, ranks = drawn(seed)
    current = [place % len(loads) for place in range(places)]
    target = nearest(current, place_by_load(loads, places, ranks))
    stays = sum(a == b for a, b in zip(current, target, strict=True))
    count = 0
    for together in moves(current, target):
        assert len(together) <= 2
        for place, expert in together:
            current[place] = expert
        assert set(current) == set(range(len(loads)))
        count += len(together)
    assert current == target
    assert count <= 2 * (places - stays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    written(
        "Mixtral", path, num_local_experts=EXPERTS, num_experts_per_tok=TOPK, num_hidden_layers=2
    )
    return path


@pytest.fixture(scope="module", params=[{"tensor": 2}, {"data": 2}], ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2, **request.param) as ranks:
        yield ranks


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 99, (count,), generator=torch.Generator().manual_seed(count))


def model_of(folder: str, redundant: int, method: str | None) -> Any:
    size = get_ep_group().world_size
    return load_model(
        OpgraftConfig(
            model=ModelConfig(name=folder, dtype="float32"),
            load=LoadConfig(device="cpu", progress=False),
            parallel=ParallelConfig(
                expert=size, redundant_experts=redundant, expert_balance_steps=3
            ),
            quantization=QuantizationSettings(method=method),
        )
    )


def balanced(folder: str, redundant: int, method: str | None) -> dict[str, Any]:
    with torch.inference_mode():
        return watched(folder, redundant, method)


def watched(folder: str, redundant: int, method: str | None) -> dict[str, Any]:
    """Step until the experts have moved, and once more; return what was seen on the way."""
    model = model_of(folder, redundant, method)
    layers = [layer for layer in model.modules() if isinstance(layer, FusedMoE)]
    for layer in layers:  # the router likes the last experts, which are on one rank
        layer.custom_routing_function = skewed
    chosen = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in layers]
    for counts, layer in zip(chosen, layers, strict=True):
        layer.register_forward_pre_hook(
            lambda layer, args, counts=counts: count(layer, args, counts)
        )
    balancer = ExpertBalancer.of(
        model, ParallelConfig(expert=2, expert_balance_steps=3, expert_moves=2)
    )
    assert balancer is not None
    tokens = ids(40 if get_dp_group().rank_in_group == 0 else 9)
    positions = torch.arange(len(tokens))
    logits, moved = [], []
    for _ in range(16):
        logits.append(model.compute_logits(model(tokens, positions)))
        if len(logits) == 3:
            recorded = balancer.loads()
            ran = [get_dp_group().all_reduce(each).tolist() for each in chosen]
        before = [placement.experts for _, placement in balancer.layers]
        moved.append(balancer.after_step())
        changed = [
            zip(old, new.experts, strict=True)
            for old, (_, new) in zip(before, balancer.layers, strict=True)
        ]
        assert sum(old != new for pairs in changed for old, new in pairs) == moved[-1]
    for _, placement in balancer.layers:
        placement.loads.zero_()
    model(tokens, positions)
    after = get_ep_group().all_gather(torch.stack([p.loads for _, p in balancer.layers]), dim=1)
    return {
        "logits": logits,
        "moved": moved,
        "recorded": recorded,
        "ran": ran,
        "after": after.reshape(len(layers), 2, -1).sum(-1).tolist(),
        "experts": [placement.experts for _, placement in balancer.layers],
    }


def skewed(
    hidden_states: Any, logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, ...]:
    """Route as the model does, but for a liking for the last experts."""
    shares, chosen = (logits + torch.arange(EXPERTS) * 0.4).softmax(-1).topk(top_k)
    return shares / shares.sum(-1, keepdim=True), chosen


def count(layer: Any, args: tuple[Any, ...], counts: torch.Tensor) -> None:
    _, chosen = layer.select_experts(*args)
    counts += torch.bincount(chosen.flatten(), minlength=EXPERTS)


@pytest.mark.parametrize(("redundant", "method"), [(0, None), (4, None), (4, "int8")])
def test_balancing(redundant: int, method: str | None, two: Ranks, folder: Path) -> None:
    """Loads are those that ran, two experts move between steps at most, logits stay, and the busiest rank has less."""
    results = two.run(balanced, str(folder), redundant, method)
    for seen in results:
        assert seen["recorded"] == seen["ran"]
        assert max(seen["moved"]) == 2
        assert sum(seen["moved"]) > 2
        assert seen["moved"][-1] == 0, "moving has not ended"
        for logits in seen["logits"][1:]:
            torch.testing.assert_close(logits, seen["logits"][0], rtol=1e-5, atol=1e-5)
        for loads, busy in zip(seen["ran"], seen["after"], strict=True):
            first = [place % EXPERTS for place in range(EXPERTS + redundant)]
            assert max(busy) < heaviest_rank(loads, first, 2) / 3, "of one step, not of three"
    assert results[0]["experts"] == results[1]["experts"]


class PackedMethod(UnquantizedFusedMoEMethod):
    """Keeps the weights of each expert in one tensor of its own name, and a factor of each."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.sizes = layer.w13_weight.shape[1:], layer.w2_weight.shape[1:]
        both = torch.cat((layer.w13_weight.flatten(1), layer.w2_weight.flatten(1)), 1)
        del layer.w13_weight, layer.w2_weight
        layer.register_buffer("factors", both.abs().amax(1))
        layer.register_buffer("packed", both / layer.factors.unsqueeze(1))

    def expert_tensors(self, layer: Any) -> list[torch.Tensor]:
        return [layer.packed, layer.factors]

    def apply(
        self, layer: Any, x: Any = None, weights: Any = None, ids: Any = None, *shared: Any
    ) -> Any:
        w13, w2 = (layer.packed * layer.factors.unsqueeze(1)).split(
            [each.numel() for each in self.sizes], 1
        )
        shaped = (part.reshape(-1, *size) for part, size in zip((w13, w2), self.sizes, strict=True))
        return fused_experts(x, *shaped, weights, ids)


def moved_in_parts() -> tuple[list[int], bool]:
    """Moves after each step while experts travel that are larger than what the first pauses send; and whether each
    expert has its own weights in the end."""
    size, hidden = get_ep_group().world_size, 512
    layer = FusedMoE(
        EXPERTS,
        TOPK,
        hidden,
        hidden,
        tp_size=1,
        ep_size=size,
        enable_eplb=True,
        reduce_results=True,
    )
    placement = layer.placement
    for place, expert in enumerate(placement.local):
        layer.w13_weight.data[place], layer.w2_weight.data[place] = expert, expert / 2
    layer.custom_routing_function = skewed
    balancer = ExpertBalancer(layer, every=2, most=2)
    x, logits, moved = torch.zeros(4, hidden), torch.zeros(4, EXPERTS), []
    for _ in range(2):
        layer(x, logits)
        balancer.after_step()
    while balancer.waiting:
        moved.append(balancer.after_step())
    own = torch.tensor(placement.local).reshape(-1, 1, 1)
    return moved, bool((layer.w13_weight == own).all() and (layer.w2_weight == own / 2).all())


def test_experts_that_take_several_pauses(two: Ranks) -> None:
    """Weights are sent a part in each pause; experts change their places when all has arrived, bit by bit."""
    for moved, own in two.run(moved_in_parts):
        assert moved[0] == 0, "an expert of 3 MiB was there after one pause"
        assert max(moved) == 2
        assert own


def moved_beside(step: float) -> tuple[int, int]:
    """Bytes that are sent in a pause, at first and after steps of so many seconds, with idle time between them."""
    layer = layer_of(None, get_ep_group().world_size)
    balancer = ExpertBalancer(layer, every=2, most=2)
    first, layer.custom_routing_function = balancer._bytes, skewed
    for _ in range(8):
        routed(layer)
        sleep(0.03)
        balancer.after_step(perf_counter() - step)
    return first, balancer._bytes


def test_idle_time_is_no_part_of_a_step(two: Ranks) -> None:
    """Where requests are few, no more is sent in a pause than beside the steps that there are."""
    for first, last in two.run(moved_beside, 0.0):
        assert last == first


def test_pauses_that_are_nothing_beside_a_step(two: Ranks) -> None:
    """However short a pause was, the next ones send more: large experts would else take thousands of steps."""
    for first, last in two.run(moved_beside, 1000.0):
        assert last > first


class SilentMethod(PackedMethod):
    """Does not say what it keeps."""

    def expert_tensors(self, layer: Any) -> Any:
        return UnquantizedFusedMoEMethod.expert_tensors(self, layer)


class By(QuantizationConfig):
    """Gives layers of experts one method."""

    def __init__(self, method: type[UnquantizedFusedMoEMethod]) -> None:
        super().__init__()
        self.method = method

    def get_name(self) -> str:
        return "packed"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def from_config(cls, config: Any) -> By:
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return self.method(layer.moe_config)


SHAPES = {"gate_up_proj": (EXPERTS, 12, 8), "down_proj": (EXPERTS, 8, 6)}


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def layer_of(config: QuantizationConfig | None, ep_size: int, seed: int = 0) -> Any:
    made = FusedMoE(
        EXPERTS,
        TOPK,
        8,
        6,
        quant_config=config,
        tp_size=1,
        ep_size=ep_size,
        enable_eplb=True,
        reduce_results=True,
    )
    load_weights(made, weights_of(seed))
    return made


def routed(layer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    output: torch.Tensor = layer(
        torch.randn(9, 8, generator=generator), torch.randn(9, EXPERTS, generator=generator)
    )
    return output


def packed_and_moved(wait: int) -> tuple[list[torch.Tensor], int]:
    """What a layer with a method of its own gives while its experts move, and how many did."""
    layer = layer_of(By(PackedMethod), get_ep_group().world_size)
    layer.custom_routing_function = skewed
    balancer = ExpertBalancer(layer, every=1, most=2)
    results, moved = [], 0
    for _ in range(wait):
        results.append(routed(layer))
        moved += balancer.after_step()
    return results, moved


def test_a_method_that_keeps_weights_otherwise(two: Ranks) -> None:
    """Experts move whose weight method has them under names of its own: it says which."""
    alone = layer_of(None, 1)
    alone.custom_routing_function = skewed
    expected = routed(alone)
    for results, moved in two.run(packed_and_moved, 8):
        assert moved >= 2
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def silent() -> str:
    with pytest.raises(LayerError) as caught:
        ExpertBalancer(layer_of(By(SilentMethod), get_ep_group().world_size), every=1, most=2)
    return str(caught.value)


def test_a_method_that_does_not_say_what_it_keeps(two: Ranks) -> None:
    """The balancer refuses it at start, where it moved nothing and noted that it had."""
    for said in two.run(silent):
        assert (
            "SilentMethod keeps of them tensors of the shapes [], expected some, each of 4 experts"
            in said
        )


def loaded_again(names: str) -> torch.Tensor:
    layer = layer_of(None, get_ep_group().world_size)
    layer.place_experts([7, 1, 2, 6, 4, 5, 3, 0])
    load_weights(layer, weights_of(1) if names == "in one" else by_expert(weights_of(1)))
    return routed(layer)


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    gate, up = weights["gate_up_proj"].chunk(2, 1)
    by_name = {"gate_proj": gate, "up_proj": up, "down_proj": weights["down_proj"]}
    return {
        f"{e}.{name}.weight": weight[e] for name, weight in by_name.items() for e in range(EXPERTS)
    }


@pytest.mark.parametrize("names", ["in one", "by expert"])
def test_weights_that_are_loaded_after_experts_have_moved(names: str, two: Ranks) -> None:
    """A checkpoint that is loaded again fills the places as they are by then."""
    expected = routed(layer_of(None, 1, seed=1))
    for result in two.run(loaded_again, names):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_places_where_nothing_is_shared() -> None:
    """A layer of which each rank has a part of every expert has no places, and says so."""
    with pytest.raises(
        LayerError, match="its experts are placed, and each rank has a part of all: set ep_size"
    ):
        layer_of(None, 1).place_experts(range(EXPERTS))


def test_off_by_default(folder: Path) -> None:
    """Without the setting nothing is recorded, and there is no balancer."""
    model = load_model(OpgraftConfig(model=ModelConfig(name=str(folder))))
    assert not next(layer for layer in model.modules() if isinstance(layer, FusedMoE)).records
    assert ExpertBalancer.of(model, OpgraftConfig().resolved().parallel) is None
    assert get_tp_group().world_size == 1
