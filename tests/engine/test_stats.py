"""The numbers of the engine are those of what really ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.engine.request import Request
from opgraft.engine.runner.op_times import REST
from opgraft.engine.schedule.kv_cache import LayerKind
from opgraft.engine.stats import PARTS, Counters, EngineStats
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import RequestOutput
from support.engines import add
from support.random_decoders import written
from support.simulated_runner import make_scheduler

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "block_size": 4, "cache.num_blocks": 40, "load.progress": False,
    "max_num_seqs": 4, "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats") / "llama"
    written("Llama", folder)
    return folder


class Watcher:
    """Notes every report, and counts for itself what the model computes."""

    def __init__(self) -> None:
        self.reports: list[EngineStats] = []
        self.tokens: list[int] = []

    def __call__(self, stats: EngineStats, outputs: list[RequestOutput]) -> None:
        self.reports.append(stats)

    def count(self, llm: LLM) -> None:
        model = llm.engine.core.executor.worker.runner.model
        model.register_forward_pre_hook(lambda module, inputs: self.tokens.append(len(inputs[0])))

    def total(self, name: str) -> int:
        return sum(getattr(report.counters, name) for report in self.reports)


def opened(checkpoint: Path, **settings: Any) -> tuple[LLM, Watcher]:
    watcher = Watcher()
    llm = LLM(str(checkpoint), on_step=watcher, **{**SETTINGS, **settings})
    watcher.count(llm)
    return llm, watcher


def test_tokens_and_requests_are_those_that_ran(checkpoint: Path) -> None:
    """Each report has the tokens that the model was given in that step; totals are those of prompts and answers."""
    llm, watcher = opened(checkpoint)
    lengths = (3, 20, 7, 1, 30, 5)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = llm.generate([[5 + i] * length for i, length in enumerate(lengths)], params)
    computed = [
        report.counters.prompt_tokens + report.counters.decode_tokens for report in watcher.reports
    ]
    assert computed == watcher.tokens
    totals = llm.stats().counters
    assert totals.steps == len(watcher.tokens) == watcher.total("steps")
    assert (
        totals.sampled_tokens
        == sum(len(output.outputs[0].token_ids) for output in outputs)
        == 6 * 9
    )
    assert totals.preemptions == totals.failed_steps == 0
    assert totals.prompt_tokens == sum(lengths)
    assert totals.decode_tokens == 6 * 8  # the last token of an answer is not computed any more
    assert totals.finished == {"stop": 0, "length": 6, "abort": 0, "error": 0}
    assert max(report.running for report in watcher.reports) == 4
    assert watcher.reports[0].waiting == 6 - watcher.reports[0].running
    end = watcher.reports[-1]
    assert (end.running, end.waiting, end.blocks_used, end.num_blocks) == (0, 0, 0, 40)
    assert llm.stats().since(llm.stats()).counters == Counters()


def test_cache_use_and_prefix_hits(checkpoint: Path) -> None:
    """Blocks are those of the tables; a prompt that begins like an earlier one hits its full blocks."""
    llm, watcher = opened(checkpoint)
    one = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([7] * 14, one)
    assert watcher.reports[0].blocks_used == 4
    assert watcher.reports[0].cache_usage == 0.1
    before = llm.stats()
    llm.generate([7] * 12 + [8, 9], one)
    change = llm.stats().since(before).counters
    assert (change.prefix_queries, change.prefix_hits) == (14, 12)
    assert change.prompt_tokens == 2


def test_preemptions_are_counted_with_what_they_cost(checkpoint: Path) -> None:
    """In a cache too small for all, some are preempted, and their tokens computed anew are counted with prompts."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm, watcher = opened(checkpoint, **{"cache.num_blocks": 20, "cache.prefix_reuse": False})
    preempted = []
    stop = llm.engine.core.scheduler._preempt
    llm.engine.core.scheduler._preempt = lambda request: (
        preempted.append(request.num_tokens),
        stop(request),
    )  # type: ignore[method-assign]
    llm.generate([[5 + i] * 8 for i in range(4)], params)
    totals = llm.stats().counters
    assert totals.preemptions == len(preempted) > 0
    assert totals.prompt_tokens == 4 * 8 + sum(preempted)
    assert totals.prompt_tokens + totals.decode_tokens == sum(watcher.tokens)


def test_stop_strings_aborts_and_one_report_each(checkpoint: Path) -> None:
    """An abort between steps is reported at once, with no step, so that nothing seems to run that does not."""
    llm, watcher = opened(checkpoint)
    engine = llm.engine
    add(engine, "a", [5, 6], SamplingParams(max_tokens=9))
    engine.step()
    engine.abort("a")
    assert [report.running for report in watcher.reports] == [1, 0]
    assert watcher.reports[-1].counters.steps == 0
    assert watcher.reports[-1].counters.finished["abort"] == 1


class Clock:
    """A clock that goes on where a function is slowed, and nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            self.now += 1
            return function(*arguments, **options)

        return slow


def test_seconds_are_those_of_the_parts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that is spent in a part is counted there, and nowhere else."""
    clock = Clock()
    for module in ("stats", "runner.model_runner"):
        monkeypatch.setattr(f"opgraft.engine.{module}.perf_counter", clock)
    llm, _ = opened(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([5, 6], params)
    runner = llm.engine.core.executor.worker.runner
    places = {
        "schedule": (llm.engine.core.scheduler, "schedule"), "inputs": (runner.batch, "inputs"),
        "model": (runner.model, "forward"), "sample": (runner, "sampler"), "text": (llm.engine, "_take"),
    }  # fmt: skip
    assert set(places) == set(PARTS)
    for part, (owner, name) in places.items():
        original = getattr(owner, name)
        setattr(owner, name, clock.slowed(original))
        before, started = llm.stats(), clock.now
        llm.generate([5, 6], params)
        setattr(owner, name, original)
        seconds = llm.stats().since(before).counters.seconds
        assert clock.now - started >= 12
        assert seconds == {**dict.fromkeys(PARTS, 0.0), part: clock.now - started}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_watcher_that_fails_is_not_called_again(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """An error in on_step, or an exit, is logged, and the answers come all the same."""
    calls = []

    def watch(*arguments: object) -> None:
        calls.append(arguments)
        raise error("watcher trouble")

    llm = LLM(str(checkpoint), on_step=watch, **SETTINGS)
    (output,) = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    assert len(calls) == 1
    assert "watcher trouble" in caplog.text


def test_snapshots_from_another_thread(checkpoint: Path) -> None:
    """Counters can be read while prompts run, and never go back."""
    llm, _ = opened(checkpoint)
    seen: list[int] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.append(llm.stats().counters.sampled_tokens)
            time.sleep(0.001)  # a thread that never waits takes most of the engine's time

    thread = threading.Thread(target=read)
    thread.start()
    llm.generate(
        [[5 + i] * 5 for i in range(8)],
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    )
    ended.set()
    thread.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def test_undone_steps_do_not_count_as_preemptions() -> None:
    """A step that was not computed has its sequences wait again, in their order and without their blocks."""
    scheduler = make_scheduler([LayerKind()])
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3], SamplingParams(max_tokens=4)))
    scheduler.schedule()
    assert [request.request_id for request in scheduler.undo()] == ["a", "b"]
    assert scheduler.counters.preemptions == 0
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks
    again = scheduler.schedule()
    assert again.removed == ("a", "b")
    assert [each.request_id for each in again.added] == ["a", "b"]


def test_times_of_ops(checkpoint: Path) -> None:
    """Each second step times its ops, which are those of ``explain`` and take the time of the model together."""
    llm, watcher = opened(checkpoint, **{"server.time_ops_every": 2})
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    timed = [bool(report.counters.op_seconds) for report in watcher.reports]
    assert timed == [False, True, False, True, False, True]
    totals = llm.stats().counters
    ops = dict(totals.op_seconds)
    assert ops.pop(REST) >= 0
    running = {(row.op, row.kernel, str(row.provider)) for row in llm.explain().rows if row.runs}
    assert {"rms_norm", "silu_and_mul"} <= {op for op, _, _ in ops}
    assert {each for each in ops if each[0] in ("rms_norm", "silu_and_mul")} <= running
    assert all(seconds > 0 for seconds in ops.values())
    of_timed = sum(
        report.counters.seconds["model"] for report in watcher.reports if report.counters.op_seconds
    )
    assert sum(totals.op_seconds.values()) == pytest.approx(of_timed, rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"server.time_ops_every": 0}])
def test_times_of_ops_can_be_left_out(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Outside of servers no step times its ops, nor does one with 0."""
    expect_no_times(checkpoint, **settings)


def test_compiled_code_is_not_timed(checkpoint: Path) -> None:
    """A step of compiled code calls no op that could be timed."""
    compiled = {"mode": 1, "backend": "eager"}
    expect_no_times(checkpoint, **{"server.time_ops_every": 1, "compilation_config": compiled})


def expect_no_times(checkpoint: Path, **settings: Any) -> None:
    llm, _ = opened(checkpoint, **settings)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert llm.stats().counters.op_seconds == {}
