"""A request's tokens and logits are those of transformers, however its tokens came to be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from support.engines import (
    BLOCK,
    copies_of,
    engine,
    expect_empty,
    expect_right,
    news,
    plain_logits,
    prompts,
    recorded,
    serve,
)
from support.random_decoders import DECODERS, THROUGH_TRANSFORMERS, through_transformers, written

FAMILIES = (*DECODERS, *THROUGH_TRANSFORMERS, "qwen2_moe", "ernie4_5_moe")


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a family's random weights, and transformers' model of them."""
    name = request.param
    folder = tmp_path_factory.mktemp("engine") / name
    if name in DECODERS:
        family, values = DECODERS[name]
        return folder, written(family, folder, **values)
    return folder, through_transformers(name, folder)


every_family = pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
with_and_without_windows = pytest.mark.parametrize(
    "checkpoint", ["llama", "mistral", "gemma3"], indirect=True
)


def crowded_engine(folder: Path) -> EngineCore:
    """An engine whose cache has room for one request of the longest context."""
    limits = {"max_model_len": 48, "max_num_batched_tokens": 9, "max_num_seqs": 8}
    needed = engine(folder, **limits).cache.most_blocks(48, 9)
    return engine(folder, num_blocks=needed, **limits)


@every_family
def test_in_chunks_and_after_preemption(checkpoint: tuple[Path, Any]) -> None:
    """Prompts come in chunks beside other requests, and some are computed anew as the cache is small."""
    folder, model = checkpoint
    core = crowded_engine(folder)
    pairs = [
        recorded(str(i), prompt, 10)
        for i, prompt in enumerate(prompts(1, 2, 3, 1, 2, 1, 19, 30, 11, 25))
    ]
    serve(core, [request for request, _ in pairs])
    assert any(request.num_preemptions for request, _ in pairs)
    for request, recorder in pairs:
        expect_right(model, request, recorder)


@every_family
def test_from_a_reused_prefix_beside_random_neighbours(checkpoint: tuple[Path, Any]) -> None:
    """What earlier requests computed is found again: of prompts, of prompts with their answers, and in part."""
    folder, model = checkpoint
    core = engine(folder)
    first, _ = recorded("first", prompts(22)[0])
    serve(core, [first])
    same, same_logits = recorded("same", first.prompt)
    longer, longer_logits = recorded("longer", [*first.prompt, *first.output, *prompts(3)[0]])
    branch, branch_logits = recorded("branch", [*first.prompt[:9], *prompts(13)[0]])
    neighbours = [
        Request(f"n{i}", prompt, SamplingParams(max_tokens=9))
        for i, prompt in enumerate(prompts(5, 1, 17))
    ]
    serve(core, [same, neighbours[0], longer, neighbours[1], branch, neighbours[2]])
    assert same.num_cached == 21 // BLOCK * BLOCK
    assert longer.num_cached == 33 // BLOCK * BLOCK
    assert branch.num_cached in (
        0,
        9 // BLOCK * BLOCK,
    )  # 0 where a window has slid over what both begin with
    for request, logits in ((same, same_logits), (longer, longer_logits), (branch, branch_logits)):
        expect_right(model, request, logits)


@pytest.mark.parametrize("checkpoint", ["llama", "gemma2", "deepseek v2"], indirect=True)
def test_nothing_is_found_of_a_request_that_failed(checkpoint: tuple[Path, Any]) -> None:
    """One that is NaN from some token on leaves nothing to those that begin as it did before."""
    folder, model = checkpoint
    core = engine(folder, max_num_batched_tokens=32)
    spoilt = core.executor.worker.runner.model.get_submodule(
        "model.embed_tokens"
    ).register_forward_hook(
        lambda module, given, found: found.masked_fill((given[0] == 98)[:, None], torch.nan)
    )
    first, second = ([token for token in prompt if token != 98] for prompt in prompts(18, 30))
    core.add([Request("sick", [*first, 98, *second], SamplingParams(max_tokens=2))])
    assert [output.request_id for output in news(core) if output.error] == ["sick"]
    spoilt.remove()
    request, recorder = recorded("well", [*first, 5, 6, 7])
    serve(core, [request])
    expect_right(model, request, recorder)


@with_and_without_windows
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_chunks_of_any_size(checkpoint: tuple[Path, Any], budget: int) -> None:
    """A step may have room for a single token, for some, or for all prompts at once."""
    folder, model = checkpoint
    core = engine(folder, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    pairs = [recorded(str(i), prompt) for i, prompt in enumerate(prompts(23, 4, 9))]
    serve(core, [request for request, _ in pairs])
    for request, recorder in pairs:
        expect_right(model, request, recorder)


@with_and_without_windows
def test_requests_that_come_and_go(checkpoint: tuple[Path, Any]) -> None:
    """Neighbours that arrive and are aborted between the steps of a request do not change it."""
    folder, model = checkpoint
    core = engine(folder, num_blocks=60, max_num_batched_tokens=16)
    request, recorder = recorded("request", prompts(18)[0], 24)
    core.add([request])
    generator = torch.Generator().manual_seed(3)
    others = 0
    while request.finish_reason is None:
        length = int(torch.randint(1, 40, (), generator=generator))
        core.add(
            [
                Request(
                    f"other {others}", prompts(length)[0], SamplingParams(max_tokens=4, seed=others)
                )
            ]
        )
        others += 1
        if others % 3 == 0 and (running := [r for r in core.scheduler.running if r is not request]):
            core.abort(running[0].request_id)
        core.step()
    for _ in news(core):
        pass
    expect_empty(core)
    expect_right(model, request, recorder)


@with_and_without_windows
@pytest.mark.parametrize("length", [22, 21, 3])
def test_several_answers(
    checkpoint: tuple[Path, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of n answers is that of a request of its own with its seed, from logits that transformers has."""
    folder, model = checkpoint
    prompt = prompts(length)[0]
    together, recorder = recorded("together", prompt, temperature=1, seed=5, n=3)
    core = engine(folder)
    copies = copies_of(core, monkeypatch)
    siblings = together.split()
    serve(core, siblings)
    assert [sibling.num_cached for sibling in siblings] == [0, length - 1, length - 1]
    assert len(copies) == (2 * len(core.cache.kinds) if (length - 1) % BLOCK else 0)
    assert len({tuple(sibling.output) for sibling in siblings}) == 3
    for sibling in siblings:
        expect_right(model, sibling, recorder)
    alone = [recorded(str(seed), prompt, temperature=1, seed=seed)[0] for seed in (5, 6, 7)]
    serve(engine(folder, max_num_seqs=1), alone)
    assert [sibling.output for sibling in siblings] == [request.output for request in alone]


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
def test_answers_whose_parent_was_preempted(checkpoint: tuple[Path, Any]) -> None:
    """Siblings whose prompt is gone, or has slid out of a window, compute it anew."""
    folder, model = checkpoint
    core = crowded_engine(folder)
    asked = [
        recorded(str(i), p, 16, temperature=1, seed=i, n=5) for i, p in enumerate(prompts(3, 2, 1))
    ]
    siblings = [sibling for request, _ in asked for sibling in request.split()]
    serve(core, siblings)
    assert any(sibling.num_preemptions for sibling in siblings)
    for sibling in siblings:
        expect_right(model, sibling, asked[int(sibling.request_id[0])][1])


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_first_tokens_of_siblings_are_distributed_as_the_logits_say(
    checkpoint: tuple[Path, Any],
) -> None:
    """The first tokens of many answers pass a chi-square test against the softmax of transformers' logits."""
    folder, model = checkpoint
    prompt, count = prompts(10)[0], 1000
    request = Request("many", prompt, SamplingParams(n=count, max_tokens=1, temperature=1, seed=0))
    siblings = request.split()
    serve(engine(folder, max_num_seqs=64), siblings)
    expected = plain_logits(model, prompt, [0])[0].double().softmax(-1) * count
    found = torch.bincount(
        torch.tensor([s.output[0] for s in siblings]), minlength=len(expected)
    ).double()
    common = expected >= 5
    distances = (found - expected)[common].square() / expected[common]
    freedom = int(common.sum()) - 1
    assert freedom > 20
    assert distances.sum() < freedom + 4 * (2 * freedom) ** 0.5
