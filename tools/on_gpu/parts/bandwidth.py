"""Measure each kernel: its share of a copy's bandwidth, beside ``torch.compile`` of the definition and Liger-Kernel.

Kernels of several ops are measured beside the kernels of each op, also with few tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from on_gpu.device import ON_GPU
from on_gpu.rows import Rows

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TOKENS, WIDTH = 4096, 4096
LOOPS = ("selective_scan", "mamba_chunk_scan", "paged_attention", "fused_experts")
"""Forms whose definitions go through tokens, sequences or experts one by one: a compiler unrolls them for minutes."""


def run(rows: Rows, bundle: Path) -> None:
    if not ON_GPU:
        rows.no_device("bandwidth of the kernels")
        return
    sys.path.append(str(BENCHMARKS))
    import gpu  # benchmarks/gpu.py, which needs Triton

    rows.measured("conditions", str(gpu.conditions()))
    with torch.inference_mode():
        for label, tokens, peers in _order(list(gpu.CALLS), gpu.FEW_TOKENS):
            of_tokens = "" if tokens == TOKENS else f" of {tokens} tokens"
            with rows.attempt(f"{label}{of_tokens}{', beside others' if peers else ''}") as row:
                torch.compiler.reset()
                cell = gpu.measured(label, tokens, WIDTH, torch.bfloat16, peers=peers)
                row.outcome = "measured"
                row.figures.update(_figures(cell))
                row.detail = f"{cell.microseconds} µs, {cell.of_copy:.0%} of a copy's bandwidth"
                if cell.to_separate is not None:
                    row.detail += f", {cell.to_separate} times as fast as the kernels of each op"
                if peers:
                    row.detail += (
                        f", {cell.to_compiled} times as fast as compiled, Liger {cell.to_liger}"
                    )


def _order(labels: list[str], few: Sequence[int]) -> Iterator[tuple[str, int, bool]]:
    """Yield every form alone first, as compilers take longest; then those that compilers can take beside others.

    Forms of several ops come with few tokens too.
    """
    for label in labels:
        for tokens in (*few, TOKENS) if _of_several_ops(label) else (TOKENS,):
            yield label, tokens, False
    for label in labels:
        if not (label.startswith(LOOPS) or "mla" in label or _of_several_ops(label)):
            yield label, TOKENS, True


def _of_several_ops(label: str) -> bool:
    return "_quant_" in label


def _figures(cell: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(cell).items() if value is not None}
