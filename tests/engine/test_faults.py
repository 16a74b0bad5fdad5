"""An error in the middle of a step ends the requests of that step, and leaves nothing behind for the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig, LoadConfig, ModelConfig, OpgraftConfig, SchedulerConfig
from opgraft.engine.core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import EngineError, RequestError
from support.random_decoders import written

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "mistral"
    written("Mistral", folder, sliding_window=9, head_dim=16)
    return folder


def engine(folder: Path, *, num_blocks: int = 100, **scheduler: Any) -> EngineCore:
    return EngineCore(
        OpgraftConfig(
            model=ModelConfig(name=str(folder), dtype="float32", max_model_len=64),
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, **scheduler}),
            load=LoadConfig(progress=False),
        )
    )


def requests(number: int, **params: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    greedy = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params})
    return [
        Request(
            f"r{i}", torch.randint(3, 99, (2 + 3 * i % 11,), generator=generator).tolist(), greedy
        )
        for i in range(number)
    ]


def news(core: EngineCore) -> Iterator[EngineOutput]:
    while core.has_work:
        yield from core.step()


def served(core: EngineCore, given: list[Request]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Serve requests; return the tokens of those that end well, and the errors of the others."""
    core.add(given)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in given}
    errors = {}
    for output in news(core):
        if output.error is not None:
            assert output.finish_reason == "error"
            errors[output.request_id] = output.error
            del tokens[output.request_id]
        elif output.token is not None:
            tokens[output.request_id].append(output.token)
    return tokens, errors


def expect_nothing_left(core: EngineCore) -> None:
    """No block is used, and once the next step has said who is gone, the runner knows nobody."""
    assert core.cache.pool.num_free == core.cache.pool.num_blocks
    runner = core.executor.worker.runner
    runner.execute(core.scheduler.schedule())
    assert len(runner.batch) == len(runner.sampling._all) == len(runner._prompt_logprobs) == 0
    assert sorted(runner.batch._rows) == [0, 1, 2, 3]


class Fault:
    """Raises in the calls of a function that ``chosen`` picks by their number, before or after it has run."""

    def __init__(
        self, owner: Any, name: str, chosen: Callable[[int], bool], error: type[BaseException]
    ) -> None:
        self.original, self.calls, self.chosen, self.error = getattr(owner, name), 0, chosen, error
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.chosen(self.calls):
            raise self.error("kernel trouble")
        return self.original(*arguments, **named)


def places(core: EngineCore) -> dict[str, tuple[Any, str]]:
    """Functions that a step goes through, from the scheduler to the end of the sampler."""
    runner = core.executor.worker.runner
    return {
        "choosing": (core.scheduler, "schedule"),
        "blocks": (core.cache, "extend"),
        "taking in": (core.scheduler, "update"),
        "contents of blocks": (core.cache, "computed"),
        "executor": (core.executor, "call"),
        "sampling settings": (runner.sampling, "add"),
        "tables": (runner.batch, "_extend"),
        "inputs": (runner.batch, "inputs"),
        "layer": (runner.model.model.layers[1], "forward"),
        "logits": (runner.model, "compute_logits"),
        "sampler": (runner, "sampler"),
        "one of several tokens": (runner.sampling, "_row"),
    }


PLACES = (
    "executor",
    "sampling settings",
    "tables",
    "inputs",
    "layer",
    "logits",
    "sampler",
    "one of several tokens",
)

AROUND = ("choosing", "blocks", "taking in", "contents of blocks")
"""Places before and after what the runner does."""

OFTEN = ("sampling settings", "tables", "one of several tokens")
"""Places that a step goes through not once, but as often as it has new sequences or tokens."""


@pytest.fixture(scope="module")
def right(checkpoint: Path) -> dict[str, list[int]]:
    """The tokens of twelve requests without a fault."""
    return served(engine(checkpoint), requests(12))[0]


@pytest.mark.parametrize("place", PLACES)
def test_the_requests_of_the_step_fail_and_the_others_go_on(
    checkpoint: Path, place: str, right: dict[str, list[int]]
) -> None:
    """Wherever it is raised: those of the step fail with all their ids, the others get the tokens they would get."""
    core = engine(checkpoint)
    owner, name = places(core)[place]
    each_step = place not in OFTEN
    Fault(
        owner, name, lambda call: call in (13 if each_step else 3, 30), RuntimeError
    )  # the 13th step removes some
    tokens, errors = served(core, requests(12))
    assert errors
    assert tokens
    assert {name: right[name] for name in tokens} == tokens
    for request_id, message in errors.items():
        assert "RuntimeError: kernel trouble" in message
        assert repr(request_id) in message
        together = [other for other in errors if errors[other] == message]
        assert all(repr(other) in message for other in together)
    assert 1 <= core.stats().counters.failed_steps <= 2
    assert core.stats().counters.finished["error"] == len(errors)
    expect_nothing_left(core)


def test_requests_that_run_but_are_not_in_the_step_go_on(checkpoint: Path) -> None:
    """A better one's long prompt takes a whole step, which fails; those that wait for the next have their tokens."""
    right, _ = served(engine(checkpoint), requests(3))
    core = engine(checkpoint, max_num_batched_tokens=4, policy="priority")
    core.add(requests(3))
    found = []
    while len(core.scheduler.running) < 3:
        found += core.step()
    core.add([Request("better", [5] * 20, GREEDY, priority=-1)])
    while core.scheduler.running[0].request_id != "better":
        found += core.step()
    Fault(core.executor.worker.runner.model, "forward", lambda call: call == 1, RuntimeError)
    found += news(core)
    assert [output.request_id for output in found if output.error] == ["better"]
    assert right == {
        name: [output.token for output in found if output.request_id == name] for name in right
    }
    expect_nothing_left(core)


def siblings() -> list[Request]:
    return [part for one in requests(20, n=2, temperature=1.0, seed=3) for part in one.split()]


@pytest.fixture(scope="module")
def of_siblings(checkpoint: Path) -> dict[str, list[int]]:
    """The tokens without a fault."""
    return served(engine(checkpoint), siblings())[0]


@pytest.mark.parametrize("place", PLACES)
def test_random_faults_with_preemptions_and_siblings(
    checkpoint: Path, place: str, right: dict[str, list[int]], of_siblings: dict[str, list[int]]
) -> None:
    """A small cache, chunks, several completions, aborts, and faults all along: tokens stay right."""
    core = engine(checkpoint, num_blocks=36, max_num_batched_tokens=9)
    draw = random.Random(len(place))  # noqa: S311
    owner, name = places(core)[place]
    rate = 0.02 if place in OFTEN else 0.1
    fault = Fault(owner, name, lambda _: draw.random() < rate, RuntimeError)
    given = siblings()
    core.add(given)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in given}
    while core.has_work:
        for output in core.step():
            if output.token is None:
                del tokens[output.request_id]
            else:
                tokens[output.request_id].append(output.token)
        if draw.random() < 0.05 and core.has_work:
            aborted = draw.choice([*core.scheduler.running, *core.scheduler.waiting]).request_id
            core.abort(aborted)
            del tokens[aborted]
    assert core.stats().counters.failed_steps > 0
    assert tokens
    assert {name: of_siblings[name] for name in tokens} == tokens
    fault.chosen = lambda _: False
    expect_nothing_left(core)
    again, errors = served(core, requests(12))
    assert not errors
    assert again == right


@pytest.mark.parametrize("place", [*AROUND, *PLACES])
def test_after_an_interrupt_the_step_is_computed_anew(
    checkpoint: Path, place: str, right: dict[str, list[int]]
) -> None:
    """An interrupt goes through, and the requests have the tokens that they would have had without it."""
    core = engine(checkpoint)
    owner, name = places(core)[place]
    Fault(owner, name, lambda call: call in (3, 11), KeyboardInterrupt)
    core.add(requests(6))
    tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(6)}
    interrupts = 0
    while core.has_work:
        try:
            for output in core.step():
                assert output.token is not None
                tokens[output.request_id].append(output.token)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts >= 1
    assert tokens == {name: right[name] for name in tokens}
    assert core.stats().counters.preemptions == 0
    expect_nothing_left(core)


class Loose:
    """A grammar that allows every token, and whose state refuses the one after ``last`` tokens."""

    finished = False

    def __init__(self, last: int, had: int = 0) -> None:
        self.last, self.had = last, had

    def start(self, output: Sequence[int] = ()) -> Loose:
        state = Loose(self.last)
        for token in output:
            state.accept(token)
        return state

    def fill(self, mask: torch.Tensor) -> None:
        mask.fill_(-1)

    def accept(self, token: int) -> None:
        if self.had == self.last:
            raise RequestError("the grammar is at its end")
        self.had += 1


@pytest.mark.parametrize("last", [0, 3])
def test_a_grammar_that_refuses_a_token_fails_its_request(checkpoint: Path, last: int) -> None:
    """The sampled token that a grammar does not take ends that request; its neighbours have all their tokens."""
    right, _ = served(engine(checkpoint), requests(3))
    core = engine(checkpoint)
    given = requests(3)
    asked = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, structured_output={"regex": "a"}
    )
    given[1] = Request("r1", given[1].prompt, asked, grammar=Loose(last))
    tokens, errors = served(core, given)
    assert errors == {"r1": "the grammar is at its end"}
    assert tokens == {name: right[name] for name in ("r0", "r2")}
    assert core.stats().counters.failed_steps == 0
    expect_nothing_left(core)


def test_a_grammar_that_refuses_to_go_on_after_a_preemption(checkpoint: Path) -> None:
    """A request that starts anew and whose grammar does not take its output fails alone, without others or none."""
    right, _ = served(engine(checkpoint), requests(3))
    for number in (1, 3):
        core = engine(checkpoint)
        grammar = Loose(99)
        asked = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, structured_output={"regex": "a"}
        )
        given = requests(number)
        given[0] = Request("r0", given[0].prompt, asked, grammar=grammar)
        core.add(given)
        found = [*core.step(), *core.step()]
        grammar.last = 1
        core.scheduler._preempt(given[0])
        found += news(core)
        assert [(each.request_id, each.error) for each in found if each.error] == [
            ("r0", "the grammar is at its end")
        ]
        for name in ("r1", "r2")[: number - 1]:
            assert [each.token for each in found if each.request_id == name] == right[name]
        expect_nothing_left(core)


def test_stop_ends_all_requests_and_the_engine(checkpoint: Path) -> None:
    """Under on_step_error=stop those that wait end too, and the engine says why it takes nothing any more."""
    core = engine(checkpoint, on_step_error="stop")
    Fault(core.executor.worker.runner.model, "forward", lambda call: call == 5, RuntimeError)
    core.check_health()
    tokens, errors = served(core, requests(9))
    assert not tokens
    assert len(errors) == 9
    assert set(errors.values()) == {
        "the step of requests 'r0', 'r1', 'r2', 'r3' failed: RuntimeError: kernel trouble; the engine stops"
    }
    reason = r"the engine has stopped, because a step failed \(RuntimeError: kernel trouble\).*fail_requests"
    for refused in (core.step, core.check_health, lambda: core.add(requests(1))):
        with pytest.raises(EngineError, match=reason) as caught:
            refused()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert core.cache.pool.num_free == core.cache.pool.num_blocks
    with pytest.raises(RequestError, match="none of that id"):
        core.abort("r0")


def test_a_message_of_many_requests_names_the_first(checkpoint: Path) -> None:
    """Of a large batch a message names twenty requests and counts the others."""
    core = engine(checkpoint, max_num_seqs=30)
    Fault(core.executor.worker.runner.model, "forward", lambda call: call == 1, RuntimeError)
    _, errors = served(core, requests(30))
    assert "'r19' and 10 more failed" in errors["r29"]


def test_a_foreign_message_is_one_harmless_line(checkpoint: Path) -> None:
    """Control characters of an error do not reach who prints it."""
    core = engine(checkpoint)

    def fail(*_: object) -> None:
        raise ValueError("a\nb\x1b[2J")

    core.executor.worker.runner.model.forward = fail
    _, errors = served(core, requests(1))
    assert errors["r0"].endswith(r"failed: ValueError: a b\x1b[2J")
