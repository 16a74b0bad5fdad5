"""The speeds that bound every engine on a machine: of reading weights from memory, and of products.

It answers as an engine does, with bytes and products per second in place of tokens. Reading is what the fastest of four
functions of torch reaches over as many bytes as the checkpoint has, in huge pages where there are any: the sum, the
greatest number, the product with itself, and the product with a vector. Products are what oneDNN reaches in a large
matrix product.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from protocol import Generate, cpu_seconds, serve
from torch.utils import mkldnn

SIZE = 1024
"""Rows and columns of the matrices."""


def start(checkpoint: str, dtype: str) -> Generate:
    size = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    measure = speeds(size, getattr(torch, dtype))
    return lambda _prompts, _max_tokens: {"tokens": [], **measure()}


def speeds(size: int, dtype: torch.dtype) -> Callable[[], dict[str, dict[str, float]]]:
    """Return what measures bytes and products per second, by clock: over so many bytes, in a dtype."""
    row = 4 * SIZE
    memory = mmap.mmap(-1, size // row * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    weights = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    matrix, vector = weights.view(-1, SIZE), torch.ones(SIZE)
    ways: list[Callable[[], object]] = [
        weights.sum,
        weights.max,
        lambda: weights.dot(weights),
        lambda: matrix.mv(vector),
    ]
    to_mkldnn: Any = mkldnn.to_mkldnn  # which has no types
    linear = to_mkldnn(torch.nn.Linear(SIZE, SIZE).eval(), dtype)
    rows = torch.randn(SIZE, SIZE, dtype=dtype).to_mkldnn()

    @torch.inference_mode()
    def measure() -> dict[str, dict[str, float]]:
        readings, products = [taken(each, 5) for each in ways], taken(lambda: linear(rows), 20)
        return {
            "bytes_per": {
                clock: weights.nbytes / min(reading[clock] for reading in readings)
                for clock in products
            },
            "products_per": {clock: SIZE**3 / value for clock, value in products.items()},
        }

    return measure


def taken(call: Callable[[], object], number: int) -> dict[str, float]:
    """Return seconds per call, by clock."""
    call()
    wall, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(number):
        call()
    return {
        "seconds": (time.perf_counter() - wall) / number,
        "cpu_seconds": (cpu_seconds() - cpu) / number,
    }


if __name__ == "__main__":
    serve(start, "torch")
