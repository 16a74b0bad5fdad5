"""An interrupt anywhere between two tokens: nobody loses or gets one twice, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from opgraft import OpgraftConfig, SamplingParams
from opgraft.engine.core import EngineCore
from opgraft.engine.lora.held import HeldAdapters
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import LayerKind
from opgraft.engine.step import Step, StepResult
from support.interrupting import InterruptAt
from support.simulated_runner import EOS, Runner, expected_output, make_scheduler

WATCHED = (
    "engine/core.py",
    "scheduler.py",
    "pending_step.py",
    "kv_cache.py",
    "blocks.py",
    "request.py",
)
"""Files in which interrupts come."""


class SimulatedExecutor:
    """Runs steps without a model; like a real runner it forgets whom it does not know."""

    can_restart = False

    def __init__(self, runner: Runner, depth: int) -> None:
        self.runner, self.depth = runner, depth
        self.submitted: list[Step] = []

    def expect_servable(self, request: Request) -> None:
        pass

    def check_health(self) -> None:
        pass

    def submit(self, step: Step) -> None:
        self.submitted.append(step)

    def drop(self) -> None:
        while self.submitted:
            self.result()

    def result(self) -> StepResult:
        step = self.submitted.pop(0)
        for name in step.removed:
            self.runner.sequences.pop(name, None)
        tokens = self.runner.execute(Step((), step.added, step.copies, step.sequences))
        return StepResult(tokens, further=self.runner.further)


def simulated_core(policy: str = "fcfs", depth: int = 1, drafts: int = 0) -> EngineCore:
    """An engine over a cache that is too small for all, with a window, and nothing of a model."""
    core = EngineCore.__new__(EngineCore)
    kinds = [LayerKind(), LayerKind(6)]
    core.scheduler = make_scheduler(
        kinds,
        num_blocks=24,
        max_model_len=32,
        max_num_seqs=4,
        budget=10,
        policy=policy,
        drafts=drafts,
    )
    core.scheduler._reserve = lambda: 0  # type: ignore[method-assign]
    core.cache, core.counters = core.scheduler.cache, core.scheduler.counters
    core._stopped, core._shut_down = None, False
    core.scheduler.depth = depth
    core.executor = SimulatedExecutor(Runner(kinds, core.cache.block_size, {}), depth)  # type: ignore[assignment]
    core.adapters = HeldAdapters(OpgraftConfig(), lambda *given: [], list)
    return core


def requests() -> list[Request]:
    draw = random.Random(3)  # noqa: S311
    made: list[Request] = []
    for number in range(5):
        params = SamplingParams(n=2 if number == 1 else 1, max_tokens=9, ignore_eos=number % 2 == 0)
        prompt = [draw.choice((1, 2)) for _ in range(draw.randint(3, 14))]
        made += Request(f"r{number}", prompt, params, eos={EOS}, priority=-number).split()
    return made


def served(core: EngineCore, given: list[Request], told: dict[str, list[int]]) -> Iterator[None]:
    """Serve requests, noting every token that is told; stops after each step."""
    while core.has_work:
        for output in core.step():
            assert output.error is None
            told[output.request_id].append(output.token)  # type: ignore[arg-type]
        yield


def expect_all_told(core: EngineCore, given: list[Request], told: dict[str, list[int]]) -> None:
    assert told == {each.request_id: expected_output(each, 32) for each in given}
    assert core.step() == []
    scheduler = core.scheduler
    assert not any(
        (
            scheduler.running,
            scheduler.waiting,
            scheduler._requests,
            scheduler.under_way.removed,
            scheduler._parked,
        )
    )
    assert core.cache.pool.num_free == core.cache.pool.num_blocks
    assert not core.cache._tables
    assert not core.executor.runner.sequences  # type: ignore[attr-defined]
    assert sum(scheduler.counters.finished.values()) == len(given)


@pytest.mark.parametrize(("depth", "drafts"), [(1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_before", [0, 2, 6])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(
    policy: str, steps_before: int, depth: int, drafts: int
) -> None:
    """Wherever in choosing a step or taking its tokens in: all answers are whole, and each token is told once."""
    number, interrupted = 1, True
    while interrupted:
        core = simulated_core(policy, depth, drafts)
        given = requests()
        told: dict[str, list[int]] = {each.request_id: [] for each in given}
        core.add(given)
        going = served(core, given, told)
        for _ in range(steps_before):
            next(going)
        interrupted = False
        try:
            with InterruptAt(number, WATCHED):
                core_news = core.step()
        except KeyboardInterrupt:
            interrupted = True
        else:
            for output in core_news:
                told[output.request_id].append(output.token)  # type: ignore[arg-type]
        for _ in served(core, given, told):
            pass
        expect_all_told(core, given, told)
        number += 1 + number // 40
    assert number > 100


def test_an_interrupt_at_any_line_of_adding_adds_all_or_none() -> None:
    """Who is interrupted while requests are added may add them again."""
    number, interrupted = 1, True
    while interrupted:
        core = simulated_core()
        given = requests()
        told: dict[str, list[int]] = {each.request_id: [] for each in given}
        interrupted = False
        try:
            with InterruptAt(number, WATCHED):
                core.add(given)
        except KeyboardInterrupt:
            interrupted = True
            assert not core.has_work
            core.add(given)
        for _ in served(core, given, told):
            pass
        expect_all_told(core, given, told)
        number += 1
    assert number > 50


@pytest.mark.parametrize("chosen", [0, 3, 5])
def test_an_interrupt_at_any_line_of_an_abort_aborts_or_does_not(chosen: int) -> None:
    """A request whose abort is interrupted has ended or goes on; the others have their tokens, and no block is lost."""
    number, interrupted = 1, True
    while interrupted:
        core = simulated_core()
        given = requests()
        told: dict[str, list[int]] = {each.request_id: [] for each in given}
        core.add(given)
        going = served(core, given, told)
        next(going)
        next(going)
        interrupted = False
        try:
            with InterruptAt(number, WATCHED):
                core.abort(given[chosen].request_id)
        except KeyboardInterrupt:
            interrupted = True
        gone = given[chosen].status == "finished"
        for _ in going:
            pass
        if gone:
            del told[given.pop(chosen).request_id]
        core.counters.finished["abort"] = 0  # which may count the one whose abort was interrupted
        expect_all_told(core, given, told)
        number += 1
    assert number > 4
