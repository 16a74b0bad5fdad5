"""A run of a model for ``opgraft plugins trial``, in a module that imports torch."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from opgraft.binding.profiling import CalledOp, timed_ops
from opgraft.cli.answer import asked, expect_answers
from opgraft.config import CacheConfig, OpgraftConfig, ParallelConfig, set_config
from opgraft.engine.runner.op_times import clock_of
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from opgraft.models.build import dtype_of
from opgraft.models.config import read_config
from opgraft.models.files import open_weights
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import PluginStatus, host_state
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import Logprob, RequestOutput

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "A list of the planets of the solar system, from the sun outwards, with one line about each:",
)
_CONFIG = OpgraftConfig(
    parallel=ParallelConfig(executor="in_process"),
    # Each round computes the prompts anew.
    cache=CacheConfig(prefix_reuse=False),
)
_ROUNDS, _MOST_ROUNDS = 5, 40
_TIMED_ROUNDS = 3
_ENOUGH = 3.0
"""Seconds for all rounds; at least five rounds run."""

_LIKELIEST = 5
"""Tokens with a log-probability at each place of an answer, besides the chosen one."""


def run_alone(plugins: str, model: str, tokens: str) -> Mapping[str, Any]:
    """Return the fields of a ``TrialRun``.

    Args:
        plugins: the names of the plugins with commas between, active or not.
        model: a checkpoint or its name.
        tokens: the number in each answer.

    Raises:
        RequestError: the model is an encoder, or a prompt cannot be answered.
    """
    began = time.monotonic()
    with set_config(_CONFIG, origin="opgraft plugins trial"):
        llm = LLM(model)
        try:
            if llm.embeds:
                raise RequestError(
                    f"{model} is an encoder, and 'opgraft plugins trial' compares answers: give a "
                    "decoder"
                )
            return {"dtype": _dtype(model), **_measured(llm, plugins, int(tokens), began)}
        finally:
            llm.shutdown()


def _dtype(model: str) -> str:
    config = read_config(open_weights(model))
    dtype = dtype_of(engine_config(model, None, {}).resolved(), config)
    return str(dtype).removeprefix("torch.")


def _measured(llm: LLM, plugins: str, tokens: int, began: float) -> Mapping[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    # The log-probabilities of other rounds would only cost time.
    first = _answered(llm, replace(params, logprobs=_LIKELIEST))
    start = time.monotonic() - began
    # The second round has all memory that the first one left.
    _answered(llm, params)
    before, _ = _memory()
    rounds = list(_rounds(llm, params))
    after, peak = _memory()
    # Not the mean: one round beside another program would change it.
    median = statistics.median(seconds for seconds, _ in rounds)
    return {
        **_stage(plugins.split(",")),
        "start": start,
        "kernels": _kernels(llm),
        "tokens": _tokens(first),
        "logprobs": _logprobs(first),
        "repeats": all(answers == _tokens(first) for _, answers in rounds),
        "step": median / tokens,
        "ops": _seconds_of_ops(llm, params, tokens),
        "peak": peak,
        "growth": (after - before) / len(rounds),
    }


def _stage(plugins: Sequence[str]) -> Mapping[str, str]:
    """Return the stage of the first plugin that failed, else of the last one, with the reason."""
    stage = {"status": "absent", "reason": ""}
    for name in plugins:
        record = host_state().plugins.get(name)
        if record is None:
            continue
        stage = {"status": record.status.value, "reason": record.reason}
        if record.status is PluginStatus.FAILED:
            break
    return stage


def _rounds(llm: LLM, params: SamplingParams) -> Iterator[tuple[float, list[list[int]]]]:
    """Yield the seconds and the tokens of each round."""
    total = 0.0
    for number in range(_MOST_ROUNDS):
        if number >= _ROUNDS and total > _ENOUGH:
            return
        since = time.perf_counter()
        outputs = _answered(llm, params)
        seconds = time.perf_counter() - since
        total += seconds
        yield seconds, _tokens(outputs)


def _answered(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    outputs = asked(llm, PROMPTS, params)
    expect_answers(llm, outputs)
    return outputs


def _tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [[*output.outputs[0].token_ids] for output in outputs]


def _logprobs(outputs: Iterable[RequestOutput]) -> list[list[dict[str, float]]]:
    """Return the log-probabilities at each place of each answer, by token as in JSON."""
    found = []
    for output in outputs:
        places = output.outputs[0].logprobs or ()
        found.append([_by_token(place) for place in places])
    return found


def _by_token(place: Mapping[int, Logprob]) -> dict[str, float]:
    return {str(token): known.logprob for token, known in place.items()}


def _kernels(llm: LLM) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in llm.explain().rows:
        if row.runs:
            counts[f"{row.op or row.op_class}: {row.kernel} of {row.provider}"] += 1
    return dict(counts)


def _memory() -> tuple[int, int]:
    """Return the bytes of this process in the host's memory, now and at most.

    Zeros outside of Linux. The memory of a device does not count.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    kibibytes = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kibibytes[name] = int(value.split()[0])
    return kibibytes["VmRSS"] * 1024, kibibytes["VmHWM"] * 1024


def _seconds_of_ops(llm: LLM, params: SamplingParams, steps: int) -> dict[str, float]:
    """Return the least seconds of each op in a step of some rounds, without the ops within it."""
    least: dict[str, float] = {}
    # Another program may take the processor in a round.
    for _ in range(_TIMED_ROUNDS):
        for op, seconds in _timed_round(llm, params, steps).items():
            least[op] = min(seconds, least.get(op, seconds))
    return least


def _timed_round(llm: LLM, params: SamplingParams, steps: int) -> Mapping[str, float]:
    timer = _Timer()
    _on_engine(llm, timer.start)
    try:
        _answered(llm, params)
    finally:
        _on_engine(llm, timer.stop)
    seconds: defaultdict[str, float] = defaultdict(float)
    for called, whole in timer.seconds.items():
        seconds[called.op] += whole / steps
    return seconds


def _on_engine(llm: LLM, function: Callable[[object], None]) -> None:
    """Call a function in the engine's thread, which calls the ops."""
    [called] = llm.replicas.on_engines(function)
    called.result()


class _Timer:
    """Times the ops of the thread that calls ``start``.

    Attributes:
        seconds: by op so far.
    """

    def __init__(self) -> None:
        self.seconds: Mapping[CalledOp, float] = {}
        self._block = ExitStack()

    def start(self, engine: object) -> None:
        device = torch.device(current_platform().device_type)
        self.seconds = self._block.enter_context(timed_ops(clock_of(device)))

    def stop(self, engine: object) -> None:
        self._block.close()
