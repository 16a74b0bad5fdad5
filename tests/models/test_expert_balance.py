"""Experts that move between ranks by the tokens that they compute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, ParallelConfig, QuantizationSettings
from opgraft.distributed import get_dp_group, get_ep_group, get_tp_group
from opgraft.engine.expert_balancer import ExpertBalancer
from opgraft.models import load_model
from opgraft.ops import FusedMoE
from opgraft.ops.fused_moe.balance import heaviest_rank, moves, nearest, place_by_load
from random_decoders import written
from ranks import Ranks

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


def test_a_placement_by_hand() -> None:
    """The hottest expert is replicated, and its replicas are on different ranks, beside cold ones."""
    loads = [90, 10, 20, 30, 0, 60]
    placed = place_by_load(loads, 8, 2)
    assert placed == [[0, 3, 5, 4], [0, 5, 2, 1]]
    assert heaviest_rank(loads, [*placed[0], *placed[1]], 2) == 105


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
    written("Mixtral", path, num_local_experts=EXPERTS, num_experts_per_tok=TOPK, num_hidden_layers=2)
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
            parallel=ParallelConfig(expert=size, redundant_experts=redundant, expert_balance_steps=3),
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
        layer.register_forward_pre_hook(lambda layer, args, counts=counts: count(layer, args, counts))
    balancer = ExpertBalancer.of(model, ParallelConfig(expert=2, expert_balance_steps=3, expert_moves=2))
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
        changed = [zip(old, new.experts, strict=True) for old, (_, new) in zip(before, balancer.layers, strict=True)]
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


def skewed(hidden_states: Any, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, ...]:
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


def test_off_by_default(folder: Path) -> None:
    """Without the setting nothing is recorded, and there is no balancer."""
    model = load_model(OpgraftConfig(model=ModelConfig(name=str(folder))))
    assert not next(layer for layer in model.modules() if isinstance(layer, FusedMoE)).records
    assert ExpertBalancer.of(model, OpgraftConfig().resolved().parallel) is None
    assert get_tp_group().world_size == 1
