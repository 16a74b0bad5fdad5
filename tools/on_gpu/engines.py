"""The engine on the language model of the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opgraft import LLM, SamplingParams

from on_gpu.expected import LANGUAGE_MODEL, TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

TIE, TIE_OF_HALF = 1e-3, 0.25
"""Margins of logits below which rounding may decide, in float32 and in bfloat16."""


def engine(bundle: Path, dtype: str = "float32", **settings: Any) -> LLM:
    """Return an engine, whose cache is small unless ``settings`` say otherwise."""
    given = {"cache.memory_bytes": 1 << 28, "load.progress": False, "max_model_len": 1024}
    return LLM(str(bundle / LANGUAGE_MODEL), dtype=dtype, **{**given, **settings})


def capacity(llm: LLM) -> str:
    """Say how much the cache of an engine holds."""
    engine: Any = llm.engine  # one engine, not several replicas
    return str(engine.core.capacity())


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens after prompts that are answered together."""
    given = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = llm.generate(given, GREEDY, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
