"""The cost of a step beside its model: choosing it, and all that is done for it in an engine whose model is tiny.

The tiny model has a vocabulary of 512. What sampling takes on top for a large one is the work of its logits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from opgraft import LLM, SamplingParams
from opgraft.config import OpgraftConfig, SchedulerConfig
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import KVCacheManager, LayerKind
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.stats import EngineStats
from opgraft.models import find_checkpoint
from timing import Row, report

STEPS = 600
PROMPT = 128
STEP_LIMITS = {32: 0.4, 256: 2.0}
"""Requests that decode → the highest fine milliseconds of a step without its model."""

LOOKUPS = {str(number): Request(str(number), [number], SamplingParams()) for number in range(1000)}


def microseconds(running: int, kinds: list[LayerKind]) -> tuple[float, float]:
    """Return the median and the mean of schedule and update, with ``running`` requests that all decode."""
    config = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=1 << 20, chunked_prefill=True, policy="fcfs"
    )
    blocks = running * len(kinds) * ((PROMPT + STEPS) // 32 + 3)
    settings = OpgraftConfig(scheduler=config)
    scheduler = Scheduler(settings, KVCacheManager(kinds, blocks, 32), 8192)
    params = SamplingParams(max_tokens=STEPS + 10, ignore_eos=True, temperature=0)
    for number in range(running):
        scheduler.add(Request(str(number), [number] * PROMPT, params, eos={2}))
    tokens = {str(number): 5 for number in range(running)}
    taken = []
    for _ in range(STEPS):
        start = time.thread_time()
        step = scheduler.schedule()
        scheduler.update(step, tokens)  # type: ignore[arg-type]  # there is one where none is computed
        taken.append((time.thread_time() - start) * 1e6)
    return statistics.median(taken[1:]), statistics.mean(taken[1:])


def python_loop() -> list[tuple[str, int]]:
    """Do a thousand times what a step does most in Python: look up, read, write, call, make a tuple and keep it."""
    kept: list[tuple[str, int]] = []
    for name in LOOKUPS:
        request = LOOKUPS[name]
        request.num_computed += 1
        kept.append((name, max(request.num_computed, request.num_tokens)))
    return kept


def loop_milliseconds() -> float:
    """Return the median milliseconds of ``python_loop``, by which figures of several machines can be compared."""
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        python_loop()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def write_tiny_model(folder: Path) -> None:
    """Write a decoder of one small layer, with the tokenizer of SmolLM2."""
    quiet: Any = transformers.utils.logging  # which has no types, as the tokenizer
    quiet.disable_progress_bar()
    packaged = find_checkpoint("smollm2")
    tokenizer: Any = transformers.AutoTokenizer
    tokenizer.from_pretrained(str(packaged.parent), gguf_file=packaged.name).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1024,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def parts_of_a_step(folder: Path, running: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a step in which ``running`` requests decode."""
    changes: list[EngineStats] = []
    settings: dict[str, Any] = {
        "cache.memory_bytes": 1 << 26,
        "load.progress": False,
        "scheduler.max_num_seqs": 256,
    }
    llm = LLM(
        str(folder), dtype="float32", on_step=lambda change, _: changes.append(change), **settings
    )
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.generate([[5 + number] * 16 for number in range(running)], params, progress=False)
    decodes = [each.counters for each in changes if each.counters.decode_tokens == running]
    llm.shutdown()
    return {
        part: statistics.median(each.seconds[part] for each in decodes) * 1e3
        for part in decodes[0].seconds
    }


def step_rows() -> Iterator[Row]:
    """Yield the milliseconds of a step without its model, with how many of ``python_loop`` take as long."""
    loop = loop_milliseconds()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        for running, limit in STEP_LIMITS.items():
            parts = parts_of_a_step(Path(folder), running)
            beside = {part: value for part, value in parts.items() if part != "model"}
            taken = sum(beside.values())
            of_parts = ", ".join(f"{part} {value:.2g}" for part, value in beside.items())
            detail = f"ms: {of_parts}; {taken / loop:.2g} times a loop of Python of {loop:.2g} ms"
            yield Row(f"step without its model, {running} requests", taken, limit, detail)


def measure() -> list[Row]:
    """Return a row for each number of requests and set of kinds, then the steps without their model."""
    rows = []
    for kinds in ([LayerKind()], [LayerKind(), LayerKind(128)]):
        names = ", ".join(
            "full" if k.sliding_window is None else f"window {k.sliding_window}" for k in kinds
        )
        for running in (1, 32, 256):
            median, mean = microseconds(running, kinds)
            rows.append(
                Row(
                    f"schedule and update, {running} requests, {names}",
                    median,
                    None,
                    f"µs, mean {mean:.1f}",
                )
            )
    return [*rows, *step_rows()]


if __name__ == "__main__":
    report("What a step of the engine costs beside its model.", measure)
