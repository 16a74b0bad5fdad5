"""Static graphs and levels of compilation: the tokens stay the same, and the time for a token."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from opgraft import SamplingParams

from on_gpu.device import ON_GPU
from on_gpu.engines import TIE, answers, engine
from on_gpu.expected import TOKENS, Expected
from on_gpu.rows import Rows
from on_gpu.tokens import compared

_PIECEWISE = {
    "compilation_config.graph_mode": "piecewise",
    "compilation_config.capture_sizes": (1, 8),
}
MODES: dict[str, dict[str, Any]] = {
    "-O0": {"compilation_config.level": 0},
    "-O1": {"compilation_config.level": 1},
    "-O1, piecewise graphs": {"compilation_config.level": 1, **_PIECEWISE},
    "-O2": {"compilation_config.level": 2},
    "-O2, piecewise graphs": {"compilation_config.level": 2, **_PIECEWISE},
    "-O3": {"compilation_config.level": 3},
}
"""Settings of the engine. Attention is never recorded, so that an engine has no graphs of whole steps."""

WITHOUT_A_DEVICE = ("-O0", "-O1", "-O1, piecewise graphs")
"""Modes that generate no code, which takes the CPU minutes."""


def run(rows: Rows, bundle: Path) -> None:
    expected = Expected.read(bundle)
    for name, settings in MODES.items():
        if not ON_GPU and name not in WITHOUT_A_DEVICE:
            rows.no_device(name)
            continue
        with rows.attempt(name) as row:
            started = perf_counter()
            with engine(bundle, **settings) as llm:
                answers(llm, expected.prompts)
                row.figures["start_seconds"] = round(perf_counter() - started, 2)
                row.detail = compared(
                    answers(llm, expected.prompts), expected.tokens, expected.margins, TIE
                )
                for batch in (1, len(expected.prompts)):
                    row.figures[f"microseconds_{batch}"] = _microseconds(llm, expected, batch)
            row.detail += f"; {row.figures}"


def _microseconds(llm: Any, expected: Expected, batch: int) -> float:
    """Measure a step of decoding so many requests: what all but the first token take."""
    prompts = expected.prompts[:batch]
    first = _seconds(llm, prompts, 1)
    return round((_seconds(llm, prompts, TOKENS) - first) / (TOKENS - 1) * 1e6)


def _seconds(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    """Return the least seconds of three runs."""
    given = [{"prompt_token_ids": ids} for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    times = []
    for _ in range(3):
        started = perf_counter()
        llm.generate(given, params, progress=False)
        times.append(perf_counter() - started)
    return min(times)
