"""Models with experts in the engine on two ranks: the tokens and logits of one, while experts move between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.distributed import get_ep_group
from opgraft.engine.core import EngineCore
from opgraft.errors import ConfigError
from opgraft.ops import FusedMoE
from support.engines import news, prompts, recorded, replaced, serve, settings
from support.random_decoders import written
from support.ranks import Ranks

EXPERTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "mixtral"
    written("Mixtral", path, num_local_experts=EXPERTS, num_experts_per_tok=2, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def replicas() -> Iterator[Ranks]:
    with Ranks(2, data=2) as ranks:
        yield ranks


def skewed(
    hidden_states: Any, logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, ...]:
    """Route as the model does, but for a liking for the last experts, which are on one rank at first."""
    shares, chosen = (
        (logits + torch.arange(EXPERTS, device=logits.device) * 0.4).softmax(-1).topk(top_k)
    )
    return shares / shares.sum(-1, keepdim=True), chosen


def served(
    folder: str, **parallel: int
) -> tuple[list[list[int]], list[torch.Tensor], list[tuple[int, ...]]]:
    """Outputs and logits of requests in chunks beside each other, and where experts stand in the end."""
    given = settings(Path(folder), max_num_batched_tokens=11, num_blocks=24, max_model_len=40)
    core = EngineCore(replaced(given, parallel=parallel))
    layers = [
        each for each in core.executor.worker.runner.model.modules() if isinstance(each, FusedMoE)
    ]
    for layer in layers:
        layer.custom_routing_function = skewed
    requests = [
        recorded(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts(5, 17, 9, 3))
    ]
    serve(core, [request for request, _ in requests])
    return (
        [request.output for request, _ in requests],
        [torch.stack(list(recorder.logits.values())) for _, recorder in requests],
        [layer.placement.experts for layer in layers if layer.placement is not None],
    )


def on_rank(
    folder: str, redundant: int
) -> tuple[list[list[int]], list[torch.Tensor], list[tuple[int, ...]]]:
    balance = {"expert_balance_steps": 4, "expert_moves": 2}
    return served(folder, expert=get_ep_group().world_size, redundant_experts=redundant, **balance)


@pytest.mark.parametrize("redundant", [0, 4])
def test_two_ranks(redundant: int, folder: Path, two: Ranks) -> None:
    """Two ranks with half of the experts each give the tokens and logits of one, and experts move under way."""
    outputs, logits, _ = served(str(folder))
    answers = two.run(on_rank, str(folder), redundant)
    for found, there, placed in answers:
        assert found == outputs
        for ours, theirs in zip(there, logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        first = tuple(place % EXPERTS for place in range(EXPERTS + redundant))
        assert all(experts != first for experts in placed)
    assert answers[0][2] == answers[1][2]


def counted(folder: str) -> int:
    """Steps that the balancer counts, of which the first rank cannot sample the last one."""
    parallel = {"expert": get_ep_group().world_size, "expert_balance_steps": 100}
    core = EngineCore(replaced(settings(Path(folder)), parallel=parallel))
    runner, first = core.executor.worker.runner, get_ep_group().rank_in_group == 0
    sample, steps = runner._sample, itertools.count(1)

    def failing(*given: Any) -> Any:
        if next(steps) == 3:
            raise MemoryError
        return sample(*given)

    if first:
        runner._sample = failing
    core.add([recorded("r", prompts(5)[0], 3)[0]])
    assert any(output.error for output in news(core)) == first
    return runner.balancer._steps


def test_a_step_that_fails_on_one_rank(folder: Path, two: Ranks) -> None:
    """The ranks go on to count alike, as later they place experts together."""
    assert two.run(counted, str(folder)) == [3, 3]


def refused(folder: str) -> str:
    given = settings(Path(folder))
    with pytest.raises(ConfigError) as caught:
        EngineCore(replaced(given, parallel={"expert": get_ep_group().world_size}))
    return str(caught.value)


def test_replicas_that_share_experts(folder: Path, replicas: Ranks) -> None:
    """Engines of data replicas step each when it has work, so experts that all of them must call are refused."""
    for told in replicas.run(refused, str(folder)):
        assert told.startswith("parallel.expert is 2, and the engine's tensor group has 1 rank")
        assert "data replicas" in told


def own_engine(folder: str) -> list[list[int]]:
    return served(folder)[0]


def test_replicas_with_all_experts(folder: Path, replicas: Ranks) -> None:
    """Data replicas that have every expert are engines of their own."""
    assert replicas.run(own_engine, str(folder)) == [served(str(folder))[0]] * 2
