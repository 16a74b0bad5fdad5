"""Workers in several processes are one engine, whose answers are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.test_worker_process import IN_ITS_PROCESS, executor, folder, process_of
from opgraft import LLM, SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def two(folder: Path, warm_workers: None) -> Iterator[LLM]:
    """An engine of two ranks, in processes that it chose by itself."""
    settings = {
        name: value for name, value in IN_ITS_PROCESS.items() if name != "parallel.executor"
    }
    llm = LLM(str(folder), **settings, tensor_parallel_size=2)
    yield llm
    llm.shutdown()
    assert [process_of(executor(llm), rank).returncode for rank in range(2)] == [0, 0]


def test_answers_are_those_of_one_process(folder: Path, two: LLM) -> None:
    """Greedy and sampled answers, several of one prompt, log-probabilities and grammars are the same."""
    params = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=3, n=3, max_tokens=9, bad_words=["the"]),
        SamplingParams(
            temperature=0,
            max_tokens=30,
            structured_output={"json": {"type": "integer", "minimum": 0, "maximum": 99}},
        ),
    ]
    asked = ["the cat", "a dog", "number"]
    with LLM(str(folder), **IN_ITS_PROCESS | {"parallel.executor": "in_process"}) as one:
        expected = one.generate(asked, params)
    found = two.generate(asked, params)
    for ours, theirs in zip(found, expected, strict=True):
        for answer, right in zip(ours.outputs, theirs.outputs, strict=True):
            assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
    ours, theirs = (outputs[0] for outputs in (found, expected))
    assert ours.outputs[0].cumulative_logprob == pytest.approx(
        theirs.outputs[0].cumulative_logprob, abs=1e-3
    )
    places = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
    assert all(one.keys() == other.keys() for one, other in places)
    assert found[2].outputs[0].text.strip().isdigit()


def test_every_rank_answers_where_all_are_asked(two: LLM) -> None:
    """Results of all come in the order of ranks; those of a call are the output rank's."""
    assert executor(two).call_all("max_context") == [64, 64]
    assert executor(two).call("max_context") == 64


def test_one_rank_samples(two: LLM) -> None:
    """Logits are gathered on the first rank, which alone has a token; the other has the next step of the engine."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    new = NewSequence("one", (5, 6, 7), 3, 64, params, ((0,),), 0)
    steps = [
        Step((), (new,), (), (ScheduledPart("one", 0, 3, ((),), True),)),
        Step((), (), (), (ScheduledPart("one", 3, 1, ((),), True, 9),)),
        Step(("one",), (), (), ()),
    ]
    answers = [executor(two).call_all("execute", step) for step in steps]
    assert [[len(result.tokens) for result in results] for results in answers] == [
        [1, 0],
        [1, 0],
        [0, 0],
    ]
    assert len(answers[0][0].prompt_logprobs["one"]) == 2
