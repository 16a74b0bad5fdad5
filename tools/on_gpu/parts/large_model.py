"""A random model of Llama's shape with a billion weights: one request and 64 at once, against transformers."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from opgraft import LLM, SamplingParams

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.rows import Rows, expect_equal

PROMPT, ANSWER = 128, 64
"""Tokens of each prompt and of each answer."""

BATCHES = (1, 64)

SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
"""For the rehearsal without a GPU."""

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "piecewise graphs": {
        "compilation_config.level": 1,
        "compilation_config.graph_mode": "piecewise",
        "compilation_config.capture_sizes": BATCHES,
    },
}


def run(rows: Rows, bundle: Path) -> None:
    folder = Path(os.environ["TMPDIR"]) / "model"
    shape = SHAPE if ON_GPU else SMALL
    prompts = _prompts(shape["vocab_size"])
    seconds: dict[int, float] = {}
    with rows.attempt("transformers") as row:
        model = _built(shape, folder)
        weights = sum(each.numel() for each in model.parameters())
        for batch in BATCHES:
            seconds[batch] = _seconds_of_transformers(model, prompts[:batch])
            row.figures[f"tokens_per_second_{batch}"] = round(batch * ANSWER / seconds[batch], 1)
        row.detail = f"{weights / 1e9:.2f} billion weights; {row.figures}"
        row.outcome = "measured"
    model = None
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    for name, settings in MODES.items():
        with rows.attempt(f"opgraft, {name}") as row:
            _measure(row.figures, folder, settings, prompts, seconds)
            row.outcome, row.detail = "measured", str(row.figures)
    if not ON_GPU:
        rows.no_device("the speed of a model with a billion weights")


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(10, vocabulary, (max(BATCHES), PROMPT), generator=generator)
    prompts: list[list[int]] = drawn.tolist()
    return prompts


def _built(shape: dict[str, Any], folder: Path) -> Any:
    """Make the model on the device, and save it for the engine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, dtype="bfloat16", eos_token_id=2, bos_token_id=1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def _seconds_of_transformers(model: Any, prompts: list[list[int]]) -> float:
    """Return the least seconds of two runs, after one to warm up."""
    ids = torch.tensor(prompts, device=DEVICE)
    mask = torch.ones_like(ids)
    times = []
    for _ in range(3 if ON_GPU else 1):
        started = perf_counter()
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
            pad_token_id=0,
        )
        expect_equal(tuple(made.shape), (len(prompts), PROMPT + ANSWER), "the shape")
        made.cpu()  # waits for the device
        times.append(perf_counter() - started)
    return min(times[1:] or times)


def _measure(
    figures: dict[str, Any],
    folder: Path,
    settings: dict[str, Any],
    prompts: list[list[int]],
    seconds: dict[int, float],
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    given = {"load.progress": False, "cache.memory_bytes": 1 << 32 if ON_GPU else 1 << 26}
    # Answers found in the cache of prefixes would measure the cache.
    given["cache.prefix_reuse"] = False
    started = perf_counter()
    with LLM(str(folder), dtype="bfloat16", **{**given, **settings}) as llm:
        figures["start_seconds"] = round(perf_counter() - started, 1)
        for batch in BATCHES:
            asked = [{"prompt_token_ids": ids} for ids in prompts[:batch]]
            times = []
            for _ in range(3 if ON_GPU else 1):
                started = perf_counter()
                outputs = llm.generate(asked, greedy, progress=False)
                times.append(perf_counter() - started)
            counts = {len(output.outputs[0].token_ids) for output in outputs}
            expect_equal(counts, {ANSWER}, "the tokens of the answers")
            best = min(times[1:] or times)
            figures[f"tokens_per_second_{batch}"] = round(batch * ANSWER / best, 1)
            if batch in seconds:
                figures[f"times_transformers_{batch}"] = round(seconds[batch] / best, 2)
