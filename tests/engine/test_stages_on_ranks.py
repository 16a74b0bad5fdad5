"""Models cut into stages over real ranks: the tokens and logits of one rank, each with its part of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import prod
from pathlib import Path

import pytest
import torch
from opgraft.config import CompilationMode
from opgraft.distributed import get_pp_group
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import DistributedError
from opgraft.models import load_model
from opgraft.models.stages import evenly
from support.engines import engine, expect_empty, news, prompts, recorded, replaced, settings
from support.random_decoders import (
    DECODERS,
    HYBRIDS,
    THROUGH_TRANSFORMERS,
    hybrid,
    through_transformers,
    written,
)
from support.ranks import Ranks

QUICK = (
    "llama 3, with biases, tied",
    "gemma3",
    "deepseek v3, with experts",
    "bamba",
    "lfm2",
    "gpt_neox",
    "cohere2",
)
"""Of all ways to cut, a case each; the others are as one of these."""

CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*DECODERS, *HYBRIDS, *THROUGH_TRANSFORMERS)
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, pipeline=2) as ranks:
        yield ranks


def served(
    folder: str, compiled: bool = False
) -> tuple[list[list[int]], list[torch.Tensor], dict[str, int]]:
    """Outputs and logits of requests in chunks beside each other, more than the cache holds, and bytes of weights."""
    given = settings(Path(folder), max_num_batched_tokens=11, num_blocks=25, max_model_len=40)
    if compiled:
        mode = CompilationMode.STOCK_TORCH_COMPILE
        given = replaced(given, compilation_config={"mode": mode, "backend": "eager"})
    core = EngineCore(given)
    given = [
        recorded(f"r{number}", prompt, 20)
        for number, prompt in enumerate([*prompts(5, 17, 9, 3), [7] * 17])
    ]
    core.add([request for request, _ in given])
    for output in news(core):
        assert output.error is None
    expect_empty(core)
    runner = core.executor.worker.runner
    return (
        [request.output for request, _ in given],
        [torch.stack(list(recorder.logits.values())) for _, recorder in given if recorder.logits],
        {name: value.nbytes for name, value in runner.model.named_parameters()},
    )


def make(name: str, folder: Path) -> None:
    if name in THROUGH_TRANSFORMERS:
        through_transformers(name, folder)
    elif name in HYBRIDS:
        hybrid(name, folder)
    else:
        family, values = DECODERS[name]
        written(family, folder, **values)


@pytest.mark.parametrize("name", CASES)
def test_two_stages(name: str, tmp_path: Path, two: Ranks) -> None:
    """Two stages give the tokens and logits of one rank, and no rank has the weights of the other's layers."""
    make(name, tmp_path)
    outputs, logits, whole = served(str(tmp_path))
    (first_out, none, first), (last_out, found, last) = two.run(served, str(tmp_path))
    assert first_out == last_out == outputs
    assert not none
    for ours, theirs in zip(found, logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert {**first, **last} == whole
    both = first.keys() & last.keys()
    assert not any("layers" in name for name in both)
    assert not any("lm_head" in name or "embed_out" in name for name in first)


def test_compiled_stages(tmp_path: Path, two: Ranks) -> None:
    """Each stage is compiled by itself, and the tokens are those of one rank."""
    written("Llama", tmp_path, num_hidden_layers=2)
    outputs, _, _ = served(str(tmp_path))
    assert [found for found, _, _ in two.run(served, str(tmp_path), True)] == [outputs] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline": 3}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_other_sizes(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Three stages, and two stages of two tensor ranks each, give the tokens of one rank."""
    make("gemma2", tmp_path / "windows")
    make("bamba", tmp_path / "states")
    with Ranks(prod(sizes.values()), **sizes) as ranks:
        for folder in ("windows", "states"):
            outputs, _, _ = served(str(tmp_path / folder))
            assert [found for found, _, _ in ranks.run(served, str(tmp_path / folder))] == [
                outputs
            ] * len(ranks.ends)


def layers(folder: str, chosen: tuple[int, ...]) -> list[str] | str:
    given = settings(Path(folder))
    given = replaced(given, parallel={"stage_layers": chosen})
    try:
        return list(load_model(given).model.layers._modules)
    except DistributedError as error:
        return str(error)


def test_layers_of_stages(tmp_path: Path, two: Ranks) -> None:
    """By hand, or by bytes: the stage with a large head has fewer layers. What does not add up is refused."""
    written("Llama", tmp_path, num_hidden_layers=6, vocab_size=1200)
    assert two.run(layers, str(tmp_path), ()) == [list("01234"), list("5")]
    assert two.run(layers, str(tmp_path), (1, 5)) == [list("0"), list("12345")]
    for chosen in ((3, 4), (6,), (0, 6)):
        for told in two.run(layers, str(tmp_path), chosen):
            assert "6 layers go to 2 stages" in told
    written("Llama", tmp_path / "single", num_hidden_layers=1)
    for told in two.run(layers, str(tmp_path / "single"), ()):
        assert "the pipeline has 2 stages, and LlamaForCausalLM has 1 layers" in told


def test_bytes_are_spread_evenly() -> None:
    """As even as layers allow, each stage with one at least; among equals the later stage takes more."""
    assert evenly([1] * 10, 3) == (3, 3, 4)
    assert evenly([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    assert evenly([1, 1, 1, 9], 3) == (1, 2, 1)
    assert evenly([1, 1], 2) == (1, 1)


def served_with_faults(folder: str, stage: int) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Serve requests while the layers of a stage fail in one step; return tokens, and errors."""
    core = engine(Path(folder), max_num_batched_tokens=11)
    layer = list(core.executor.worker.runner.model.model.layers)[-1]
    calls, forward = count(1), layer.forward

    def failing(*given: torch.Tensor) -> object:
        if next(calls) == 5 and get_pp_group().rank_in_group == stage:
            raise RuntimeError("kernel trouble")
        return forward(*given)

    layer.forward = failing
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    given = [
        Request(f"r{number}", prompt, params)
        for number, prompt in enumerate(prompts(4, 6, 3, 9, 5, 7))
    ]
    core.add(given)
    errors = {output.request_id: output.error for output in news(core) if output.error is not None}
    expect_empty(core)
    return {each.request_id: each.output for each in given if each.request_id not in errors}, errors


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails(tmp_path: Path, two: Ranks, stage: int) -> None:
    """The requests of the step end with the error of the stage it came from, on all ranks; others have their tokens."""
    make("llama", tmp_path)
    right, _ = served_with_faults(str(tmp_path), 9)
    (tokens, errors), (tokens_there, errors_there) = two.run(
        served_with_faults, str(tmp_path), stage
    )
    assert tokens == tokens_there
    assert errors.keys() == errors_there.keys()
    assert errors
    assert tokens
    assert {name: right[name] for name in tokens} == tokens
    for error in (*errors.values(), *errors_there.values()):
        assert "RuntimeError: kernel trouble" in error
