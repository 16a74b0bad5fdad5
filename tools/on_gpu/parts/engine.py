"""The engine's greedy tokens: alone, in a batch, from a shared cache and after preemption."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.engines import TIE, TIE_OF_HALF, answers, capacity, engine
from on_gpu.expected import TOKENS, Expected, generated, language_model
from on_gpu.rows import Rows, expect_equal
from on_gpu.tokens import compared

FULL_CACHE: dict[str, Any] = {
    "cache.num_blocks": 24,
    "cache.memory_bytes": None,
    "block_size": 16,
    "max_model_len": 256,
}
"""Settings of a cache that does not hold all prompts with their answers."""

WHOLE_CACHE: dict[str, Any] = {"cache.memory_bytes": None}
"""Settings of a cache that takes its share of the memory."""


def run(rows: Rows, bundle: Path) -> None:
    expected = Expected.read(bundle)
    prompts, of_cpu = expected.prompts, (expected.tokens, expected.margins)
    with rows.attempt("an engine is made") as row:
        started = perf_counter()
        llm = engine(bundle)
        row.detail = f"{perf_counter() - started:.1f} s; {capacity(llm)}"
    with rows.attempt("alone, against the CPU in float32") as row:
        alone = [answers(llm, [each])[0] for each in prompts]
        row.detail = compared(alone, *of_cpu, TIE)
    with rows.attempt("in one batch, against the CPU in float32") as row:
        row.detail = compared(answers(llm, prompts), *of_cpu, TIE)
    with rows.attempt("again, from the cache of prefixes") as row:
        before = llm.stats().counters.prefix_hits
        row.detail = compared(answers(llm, prompts), *of_cpu, TIE)
        hits = llm.stats().counters.prefix_hits - before
        row.detail += f"; {hits} tokens were found in the cache"
        expect_equal(hits > 0, True, "whether tokens were found in the cache")
    with rows.attempt("which kernels") as row:
        kernels = {f"{each.op} {each.kernel}" for each in llm.explain().rows if each.runs}
        row.detail = ", ".join(sorted(kernels))
    llm.shutdown()
    with rows.attempt("with preemption, against the CPU in float32") as row:
        with engine(bundle, **FULL_CACHE) as small:
            row.detail = compared(answers(small, prompts), *of_cpu, TIE)
            preemptions = small.stats().counters.preemptions
        row.detail += f"; {preemptions} preemptions"
        expect_equal(preemptions > 0, True, "whether a request was preempted")
    with rows.attempt("in bfloat16, against transformers on the same device") as row:
        model, _ = language_model(bundle, torch.bfloat16, DEVICE)
        theirs = [generated(model, each, TOKENS) for each in prompts]
        with engine(bundle, "bfloat16") as half:
            tokens, margins = [each[0] for each in theirs], [each[1] for each in theirs]
            row.detail = compared(answers(half, prompts), tokens, margins, TIE_OF_HALF)
    if not ON_GPU:
        rows.no_device("the cache that takes its share of the memory of a GPU")
        return
    with (
        rows.attempt("the cache takes its share of the memory") as row,
        engine(bundle, **WHOLE_CACHE) as large,
    ):
        free, total = torch.cuda.mem_get_info()
        row.detail = f"{capacity(large)}; {free:,} of {total:,} bytes are free; "
        row.detail += compared(answers(large, prompts), *of_cpu, TIE)
