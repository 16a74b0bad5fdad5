"""Drafts with several ranks: each computes them, one samples, and all know which were accepted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from opgraft.distributed import get_world_group
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import Step, StepResult
from support.engines import engine, news, prompts, replaced, settings
from support.random_decoders import written
from support.ranks import Ranks


def requests() -> list[Request]:
    """Greedy requests, whose answers soon repeat themselves, and drawn ones."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    drawn = SamplingParams(temperature=0.2, seed=3, max_tokens=30, ignore_eos=True)
    lengths = (5, 12, 9, 3)
    return [
        Request(f"{number}", prompt * 2, drawn if number % 2 else greedy)
        for number, prompt in enumerate(prompts(*lengths))
    ]


def tokens_of(core: EngineCore) -> dict[str, list[int | None]]:
    core.add(requests())
    found: dict[str, list[int | None]] = {}
    for output in news(core):
        assert output.error is None
        found.setdefault(output.request_id, []).append(output.token)
    return found


def with_other_times(folder: str) -> tuple[dict[str, list[int | None]], tuple[int, ...]]:
    """Serve requests on a rank of a launcher, of which the second measures that rows cost much."""
    given = replaced(settings(Path(folder)), speculation={"method": "suffix", "exact": False})
    core = EngineCore(given)
    if get_world_group().rank == 1:
        runner = core.executor.worker.runner
        execute = runner.execute

        def slow(step: Step) -> StepResult:
            rows = sum(each.count for each in step.sequences)
            return dataclasses.replace(execute(step), seconds={"model": 100.0**rows})

        runner.execute = slow
    found = tokens_of(core)
    counters = core.stats().counters
    return found, (counters.steps, counters.drafts, counters.draft_tokens)


def test_ranks_of_a_launcher_draft_alike(tmp_path: Path) -> None:
    """Each rank has a scheduler, and all go by the times of the first rank, so none waits for another step."""
    folder = tmp_path / "llama"
    written("Llama", folder)
    right = tokens_of(engine(folder))
    with Ranks(2) as two:
        (first, counted), other = two.run(with_other_times, str(folder))
    assert (first, counted) == other
    assert first == right
    assert min(counted)


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_ranks_follow_drafts(split: str, tmp_path: Path, warm_workers: None) -> None:
    """With layers shared and with layers in stages, the tokens are those of one rank without drafts."""
    folder = tmp_path / "mistral"
    written("Mistral", folder, sliding_window=9, head_dim=16)
    right = tokens_of(engine(folder))
    given = replaced(
        settings(folder),
        parallel={split: 2},
        speculation={"method": "ngram", "exact": False, "adaptive": False},
    )
    core = EngineCore(given)
    try:
        assert tokens_of(core) == right
        counters = core.stats().counters
        assert 0 < counters.accepted_tokens < counters.draft_tokens
    finally:
        core.shutdown()
