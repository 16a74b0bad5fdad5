"""Benchmark of the Triton kernels on a CUDA or ROCm GPU: fraction of a copy's bandwidth, and ratio to others.

The others are the native definition through torch.compile, and Liger-Kernel where it is installed. A copy of as many
bytes is measured in the same run. Calls go over several sets of inputs in turn, so that none finds its own in the
cache; bytes are those that a call must move at least.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from opgraft.ops.on_triton import triton_kernels, triton_missing
from opgraft.ops.spec import tensors
from opgraft.testing.catalogue import SPECS
from torch import Tensor

TOKENS = (4096, 16384)
WIDTHS = (4096, 8192)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE = 256 * 2**20
"""Bytes that inputs are spread over: several times the cache of any GPU."""

HEAD_SIZE = 128
BLOCK_SIZE = 16


def _rotary(x: Tensor) -> tuple[Any, ...]:
    table = torch.randn(8192, HEAD_SIZE, device=x.device, dtype=x.dtype)
    positions = torch.randint(0, 8192, (x.shape[0],), device=x.device)
    return positions, x, x[:, : x.shape[1] // 4].contiguous(), HEAD_SIZE, table


def _decodes(x: Tensor) -> tuple[Any, ...]:
    """Return the next token of 16 sequences, whose keys and values are ``x``, of 8 heads for 32 of the query."""
    cache = x.view(-1, 2, 8, BLOCK_SIZE, HEAD_SIZE)
    table = torch.randperm(len(cache), device=x.device, dtype=torch.int32).view(16, -1)
    bounds = torch.arange(17, device=x.device, dtype=torch.int32)
    lengths = torch.full((16,), table.shape[1] * BLOCK_SIZE, device=x.device, dtype=torch.int32)
    return torch.randn(16, 32, HEAD_SIZE, device=x.device, dtype=x.dtype), cache, table, bounds, lengths, 0.1


def _weight(x: Tensor) -> Tensor:
    return torch.randn(x.shape[-1], device=x.device, dtype=x.dtype)


CALLS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "rms_norm": lambda x: (x, _weight(x)),
    "fused_add_rms_norm": lambda x: (x, torch.randn_like(x), _weight(x)),
    "gemma_rms_norm": lambda x: (x, _weight(x)),
    "layer_norm": lambda x: (x, x.shape[-1:], _weight(x), _weight(x)),
    "rms_norm_gated": lambda x: (x, _weight(x), torch.randn_like(x)),
    "silu": lambda x: (x,),
    "gelu": lambda x: (x,),
    "silu_and_mul": lambda x: (x,),
    "gelu_and_mul": lambda x: (x,),
    "swigluoai_and_mul": lambda x: (x,),
    "rotary_embedding": _rotary,
    "paged_attention": _decodes,
    "quant_fp8_dynamic tensor": lambda x: (x, (-1, -1)),
    "quant_fp8_dynamic token": lambda x: (x, (1, -1)),
    "quant_fp8_dynamic group": lambda x: (x, (1, 128)),
    "quant_fp8_static": lambda x: (x, torch.ones(1, device=x.device), (-1, -1)),
}
"""The forms that are measured, and their arguments by a tensor of tokens by width."""


def _liger(name: str) -> Callable[..., Any] | None:
    """Return Liger-Kernel's own of a form, where it is installed and has one."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def silu_and_mul(x: Tensor) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return LigerSiLUMulFunction.apply(gate, up)

    forms: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "gemma_rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False),
        "layer_norm": lambda x, shape, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "silu_and_mul": silu_and_mul,
    }
    return forms.get(name)


@dataclass(frozen=True)
class Cell:
    """One form on one shape; ratios are the other's time over ours, so that more than one means faster than it."""

    form: str
    tokens: int
    width: int
    dtype: str
    microseconds: float
    of_copy: float
    to_compiled: float
    to_liger: float | None


def seconds(call: Callable[..., Any], inputs: list[tuple[Any, ...]], calls: int = 32, rounds: int = 21) -> float:
    """Measure a call on the GPU, the median: a graph of calls over the inputs in turn, replayed; no launch waits."""
    for arguments in inputs:
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in islice(cycle(inputs), calls):
            call(*arguments)
    events = [(torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in events)) / calls / 1e3


def moved(name: str, arguments: tuple[Any, ...]) -> int:
    """Count the bytes that a call must move: each tensor read once, each result written once."""
    made = tensors(triton_kernels()[name](*arguments))
    used = [value for value in arguments if isinstance(value, Tensor)]
    if name == "rotary_embedding":
        used = used[:-1]  # of the table only some rows, which stay in the cache
    return sum(t.numel() * t.element_size() for t in (*used, *made))


def copied(size: int) -> float:
    """Measure a copy that moves as many bytes: half of them read, half written."""
    sets = max(2, CACHE // size)
    pairs = [tuple(torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in "ab") for _ in range(sets)]
    return seconds(lambda source, target: target.copy_(source), pairs)


def cells(forms: list[str]) -> Iterator[Cell]:
    for shape in product(forms, TOKENS, WIDTHS, DTYPES):
        torch.compiler.reset()
        yield _cell(*shape)


def _cell(label: str, tokens: int, width: int, dtype: torch.dtype) -> Cell:
    name = label.split()[0]
    columns = 2 * width if name.endswith("_and_mul") else width

    def arguments() -> tuple[Any, ...]:
        return CALLS[label](torch.randn(tokens, columns, device="cuda", dtype=dtype))

    size = moved(name, arguments())
    inputs = [arguments() for _ in range(max(2, CACHE // size))]
    ours = seconds(triton_kernels()[name], inputs)
    compiled = seconds(torch.compile(SPECS[name].functional.native, dynamic=False), inputs)
    liger = _liger(label)
    return Cell(
        form=label,
        tokens=tokens,
        width=width,
        dtype=str(dtype).removeprefix("torch."),
        microseconds=round(ours * 1e6, 1),
        of_copy=round(copied(size) / ours, 3),
        to_compiled=round(compiled / ours, 2),
        to_liger=None if liger is None else round(seconds(liger, inputs) / ours, 2),
    )


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def conditions() -> dict[str, str]:
    """Return what a reader needs to know before comparing these figures with others."""
    packages = {name: installed(name) for name in ("torch", "triton", "liger-kernel")}
    date = datetime.now(timezone.utc).date().isoformat()
    return {"device": torch.cuda.get_device_name(), "date": date, **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the Triton kernels reach on a GPU.")
    parser.add_argument("--json", type=Path, default=Path("build/bench-gpu.json"), help="where the figures go")
    parser.add_argument("forms", nargs="*", default=list(CALLS), help=f"of {', '.join(CALLS)}")
    options = parser.parse_args()
    missing = triton_missing() if torch.cuda.is_available() else "needs a GPU, and torch.cuda.is_available() is false"
    if missing:
        sys.exit(f"benchmarks/gpu.py {missing}")
    measured_under = conditions()
    print(", ".join(f"{name} {value}" for name, value in measured_under.items()))
    print(f"{'form':26} {'tokens':>6} {'width':>5} {'dtype':9} {'µs':>8} {'of copy':>8} {'compiled':>9} {'Liger':>6}")
    measured = []
    with torch.inference_mode():
        for cell in cells(options.forms):
            measured.append(cell)
            ratios = f"{cell.of_copy:8.2f} {cell.to_compiled:9.2f} {cell.to_liger or '-':>6}"
            print(f"{cell.form:26} {cell.tokens:6} {cell.width:5} {cell.dtype:9} {cell.microseconds:8} {ratios}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"schema": 1, **measured_under, "cells": [asdict(cell) for cell in measured]}
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"JSON: {options.json}")


if __name__ == "__main__":
    main()
