"""Every parallel form gives the tokens of one rank, while prefixes are reused, prompts cut, and sequences preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opgraft import LLM, SamplingParams
from opgraft.engine.core import EngineCore
from opgraft.engine.step import Step
from support.engines import prompts
from support.random_decoders import written

pytestmark = pytest.mark.usefixtures("warm_workers")

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 40,
    "block_size": 4,
    "cache.num_blocks": 13,
    "max_num_batched_tokens": 11,
    "max_num_seqs": 8,
    "load.progress": False,
}
"""Too few blocks for all requests, whose prompts come in chunks."""

GIVEN = prompts(5, 17, 9, 3, 12, 8, 14, 6)
GIVEN += [[*GIVEN[1][:12], 3], [*GIVEN[1][:12], 4]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=15, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=15, ignore_eos=True, n=2, logprobs=1, repetition_penalty=1.2),
]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "experts": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    ),
}

FORMS = [
    pytest.param("dense", {"tensor": 2}),
    pytest.param("dense", {"pipeline": 3}),
    pytest.param("dense", {"data": 2}),
    pytest.param("dense", {"data": 2, "tensor": 2}),
    pytest.param("dense", {"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("experts", {"tensor": 2, "expert": 2}),
    pytest.param("experts", {"data": 2, "expert": 2}),
    pytest.param("experts", {"data": 2, "tensor": 2, "expert": 4}, marks=pytest.mark.slow),
]

Right = Callable[[str], tuple[Path, list[list[list[int]]]]]


def answers(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(GIVEN, [PARAMS[number % 2] for number in range(len(GIVEN))])
    assert [answer.error for output in outputs for answer in output.outputs if answer.error] == []
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    """Returns for a family its checkpoint, and what one rank answers with room for all."""
    known: dict[str, tuple[Path, list[list[list[int]]]]] = {}

    def right(name: str) -> tuple[Path, list[list[list[int]]]]:
        if name not in known:
            family, values = FAMILIES[name]
            folder = tmp_path_factory.mktemp("forms") / name
            written(family, folder, **values)
            plenty = SETTINGS | {
                "cache.num_blocks": 300,
                "max_num_batched_tokens": 300,
                "parallel.executor": "in_process",
            }
            with LLM(str(folder), **plenty) as one:
                known[name] = folder, answers(one)
        return known[name]

    return right


def cores(llm: LLM) -> list[EngineCore]:
    return [replica.engine.core for replica in llm.replicas.each]


def watch(core: EngineCore, chunks: Counter[int]) -> None:
    """Count the chunks of prompts that do not come to their end, and let blocks run out."""
    core.scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # which otherwise prevents preemptions
    submit = core.executor.submit

    def counting(step: Step) -> None:
        chunks[id(core)] += sum(each.count > 1 and not each.samples for each in step.sequences)
        submit(step)

    core.executor.submit = counting  # type: ignore[method-assign]


@pytest.mark.parametrize(("family", "sizes"), FORMS, ids=str)
def test_the_tokens_are_those_of_one_rank(family: str, sizes: dict[str, int], right: Right) -> None:
    """And each engine of the form has preempted, found prefixes and cut prompts."""
    folder, expected = right(family)
    chunks = Counter[int]()
    with LLM(
        str(folder), **SETTINGS, **{f"parallel.{name}": size for name, size in sizes.items()}
    ) as llm:
        engines = cores(llm)
        assert len(engines) == sizes.get("data", 1)
        for core in engines:
            assert len(core.executor.workers.links) == sizes.get("tensor", 1) * sizes.get(
                "pipeline", 1
            )
            watch(core, chunks)
        assert answers(llm) == expected
        for core in engines:
            counters = core.stats().counters
            assert counters.preemptions > 0
            assert counters.prefix_hits > 0
            assert chunks[id(core)] > 0
