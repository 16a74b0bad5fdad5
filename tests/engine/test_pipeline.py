"""Several steps at a time through the stages of a pipeline, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opgraft.engine.core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from support.engines import engine, news, prompts, replaced, settings
from support.random_decoders import written

SIZES: dict[str, Any] = {
    "num_blocks": 13,
    "max_model_len": 40,
    "max_num_batched_tokens": 11,
    "max_num_seqs": 8,
}
"""Too few blocks for all requests, whose prompts come in chunks."""

LENGTHS = (5, 17, 9, 3, 12, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "mistral"
    written("Mistral", folder, sliding_window=9, head_dim=16)
    return folder


@pytest.fixture(scope="module")
def core(folder: Path, warm_workers: None) -> Iterator[EngineCore]:
    core = EngineCore(replaced(settings(folder, **SIZES), parallel={"pipeline": 2}))
    core.scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # which otherwise prevents preemptions
    yield core
    core.shutdown()


def requests() -> list[Request]:
    """Requests of all kinds, two of which begin alike."""
    params = [
        SamplingParams(temperature=0, max_tokens=15, ignore_eos=True),
        SamplingParams(
            seed=5, max_tokens=15, ignore_eos=True, n=2, logprobs=1, repetition_penalty=1.2
        ),
    ]
    given = prompts(*LENGTHS)
    given.append([*given[1][:12], 3])
    made = [
        Request(f"r{number}", prompt, params[number % 2]) for number, prompt in enumerate(given)
    ]
    return [part for request in made for part in request.split()]


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[str, list[int]]:
    """The tokens of all requests on one rank."""
    return tokens_of(list(served(engine(folder, **SIZES))))


def served(core: EngineCore) -> Iterator[EngineOutput]:
    core.add(requests())
    return news(core)


def tokens_of(outputs: list[EngineOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        if output.token is not None:
            found.setdefault(output.request_id, []).append(output.token)
    return found


def expect_free(core: EngineCore) -> None:
    assert not core.scheduler.under_way
    assert core.cache.pool.num_free == core.cache.pool.num_blocks


def test_steps_share_the_requests(core: EngineCore, right: dict[str, list[int]]) -> None:
    """Two steps are computed at a time, of about half of the requests each, and the tokens are those of one rank."""
    sizes = set()
    outputs = []
    for output in served(core):
        outputs.append(output)
        sizes |= {len(pending.batch) for pending in core.scheduler.under_way._steps}
    assert core.executor.depth == 2
    assert max(sizes) <= 5
    assert tokens_of(outputs) == right
    counters = core.stats().counters
    assert counters.preemptions
    assert counters.prefix_hits
    expect_free(core)


def test_an_abort_while_a_step_is_computed(core: EngineCore, right: dict[str, list[int]]) -> None:
    """Nothing more is told of it, its id may be given anew at once, and the others have their tokens."""
    core.add(requests())
    outputs, aborted = [], set()
    for number in range(6):
        outputs += core.step()
        computed = [
            each for pending in core.scheduler.under_way._steps for each in pending.requests()
        ]
        if number in (1, 3, 5) and computed:
            core.abort(computed[0].request_id)
            aborted.add(computed[0].request_id)
            told = len(outputs)
    again = Request(
        next(iter(aborted)), [7, 8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    core.add([again])
    outputs += news(core)
    assert len(aborted) == 3
    assert len(again.output) == 3
    assert [
        each.token for each in outputs[told:] if each.request_id == again.request_id
    ] == again.output
    assert not {each.request_id for each in outputs[told:]} & aborted - {again.request_id}
    assert {name: tokens for name, tokens in tokens_of(outputs).items() if name not in aborted} == {
        name: tokens for name, tokens in right.items() if name not in aborted
    }
    expect_free(core)


def test_a_step_that_fails_beside_another(core: EngineCore, right: dict[str, list[int]]) -> None:
    """Those of the step end with the error of the first stage; those of the step behind it are computed anew."""
    core.add(requests())
    outputs = [*core.step(), *core.step()]
    core.add([Request("beyond the vocabulary", [10**6], SamplingParams(max_tokens=3), priority=-1)])
    outputs += news(core)
    errors = {each.request_id: each.error for each in outputs if each.error}
    assert "beyond the vocabulary" in errors
    assert all("IndexError" in str(error) for error in errors.values())
    kept = {name: tokens for name, tokens in tokens_of(outputs).items() if name not in errors}
    assert kept
    assert kept == {name: right[name] for name in kept}
    assert (
        core.stats().counters.failed_steps <= 2
    )  # a second one if it was preempted while the first was computed
    expect_free(core)
