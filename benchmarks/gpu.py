"""Benchmark of the Triton kernels on a CUDA or ROCm GPU: fraction of a copy's bandwidth, and ratio to others.

The others are the native definition through torch.compile, Liger-Kernel where it is installed, and for a form of
several ops the kernels of each op. A copy of as many bytes is measured in the same run. Calls go over several sets of
inputs in turn, so that none finds its own in the cache; bytes are those that a call must move at least.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
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
FEW_TOKENS = (1, 32, 512)
"""Also for kernels of several ops, which are for the few rows of a step."""
WIDTHS = (4096, 8192)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE = 256 * 2**20
"""Bytes that inputs are spread over: several times the cache of any GPU."""

HEAD_SIZE = 128
BLOCK_SIZE = 16
EPS = 1e-6
WHOLE, TOKEN = (-1, -1), (1, -1)
"""Groups of the quantization: one scale, and one for each token."""


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
    return (
        torch.randn(16, 32, HEAD_SIZE, device=x.device, dtype=x.dtype),
        cache,
        table,
        bounds,
        lengths,
        0.1,
    )


def _bounds(x: Tensor, sequences: int = 4) -> Tensor:
    """Return where that many sequences of equal length begin and end."""
    return torch.linspace(0, x.shape[0], sequences + 1, device=x.device).to(torch.int32)


def _numbers(x: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, device=x.device, dtype=x.dtype)


def _experts(x: Tensor) -> tuple[Any, ...]:
    """Return 64 of the tokens for 64 experts of 1,024 elements, eight of each token."""
    scores = torch.rand(64, 64, device=x.device)
    weights = (_numbers(x, 64, 2048, x.shape[1]) / 64, _numbers(x, 64, x.shape[1], 1024) / 32)
    return x[:64], *weights, *scores.softmax(-1).topk(8)


def _latents(x: Tensor) -> tuple[Any, ...]:
    """Return the next token of 16 sequences of 128 heads, whose latents are in ``x``: as wide as the kernel takes."""
    rank = 1024 // x.element_size()
    blocks = x.numel() // (BLOCK_SIZE * (rank + 64)) // 16 * 16
    cache = x.flatten()[: blocks * BLOCK_SIZE * (rank + 64)].view(blocks, BLOCK_SIZE, rank + 64)
    table = torch.randperm(blocks, device=x.device, dtype=torch.int32).view(16, -1)
    bounds = torch.arange(17, device=x.device, dtype=torch.int32)
    lengths = torch.full((16,), table.shape[1] * BLOCK_SIZE, device=x.device, dtype=torch.int32)
    return _numbers(x, 16, 128, rank + 64), cache, table, bounds, lengths, rank, 0.1


def _written_latents(x: Tensor) -> tuple[Any, ...]:
    cache = torch.empty(
        x.shape[0] // BLOCK_SIZE, BLOCK_SIZE, x.shape[1] + 64, device=x.device, dtype=x.dtype
    )
    return x, _numbers(x, x.shape[0], 64), cache, torch.randperm(x.shape[0], device=x.device)


def _scanned(x: Tensor) -> tuple[Any, ...]:
    """Return a prompt of Mamba, with a state of 16 for each channel."""
    width, (b, c) = x.shape[1], (_numbers(x, x.shape[0], 16) for _ in "bc")
    a = -torch.rand(width, 16, device=x.device)
    initial = torch.zeros(4, width, 16, device=x.device)
    return x, x, a, b, c, _bounds(x), initial, _weight(x), x, _weight(x), True


def _scanned_heads(x: Tensor) -> tuple[Any, ...]:
    """Return a prompt of Mamba-2, of heads of 64 with a state of 128, in eight groups."""
    heads = x.view(x.shape[0], -1, 64)
    count, (b, c) = heads.shape[1], (_numbers(x, x.shape[0], 8, 128) for _ in "bc")
    a, weight = -torch.rand(count, device=x.device), _numbers(x, count)
    initial = torch.zeros(4, count, 64, 128, device=x.device)
    return (
        heads,
        _numbers(x, x.shape[0], count),
        a,
        b,
        c,
        _bounds(x),
        initial,
        256,
        weight,
        heads,
        weight,
        True,
    )


def _step_of_heads(x: Tensor) -> tuple[Any, ...]:
    """Return the next token of 64 sequences of Mamba-2, whose numbers per head are expanded."""
    heads = x[:64].view(64, -1, 64)
    count, (b, c) = heads.shape[1], (_numbers(x, 64, 8, 128) for _ in "bc")
    state, out = (
        torch.zeros(64, count, 64, 128, device=x.device, dtype=x.dtype),
        torch.empty_like(heads),
    )
    a, dt = (
        -torch.rand(count, 1, 1, device=x.device),
        _numbers(x, 64, count, 1).expand(64, count, 64),
    )
    weight = _numbers(x, count, 1).expand(count, 64)
    slots = torch.randperm(64, device=x.device)
    return state, heads, dt, a.expand(count, 64, 128), b, c, slots, out, weight, heads, weight, True


def _convolved(x: Tensor) -> tuple[Any, ...]:
    initial = torch.zeros(4, x.shape[1], 3, device=x.device, dtype=x.dtype)
    return x, _numbers(x, x.shape[1], 4), _bounds(x), initial, _weight(x), "silu"


def _convolved_step(x: Tensor) -> tuple[Any, ...]:
    state = torch.zeros(*x.shape, 3, device=x.device, dtype=x.dtype)
    slots = torch.randperm(x.shape[0], device=x.device)
    return x, state, _numbers(x, x.shape[1], 4), slots, torch.empty_like(x), _weight(x), "silu"


def _attention(x: Tensor) -> tuple[Any, ...]:
    """Return the last 16 tokens of each sequence of 512 with all its keys, of 8 heads for the width of the query."""
    heads = x.shape[1] // HEAD_SIZE
    query = x.view(-1, min(16, x.shape[0]), heads, HEAD_SIZE).transpose(1, 2)
    key, value = (_numbers(x, query.shape[0], 8, 512, HEAD_SIZE) for _ in "kv")
    return query, key, value, _one(x), None, False, None, True


def _one(x: Tensor) -> Tensor:
    return torch.ones(1, device=x.device)


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
    "fused_experts": _experts,
    "mla_paged_attention": _latents,
    "concat_and_cache_mla": _written_latents,
    "selective_scan": _scanned,
    "mamba_chunk_scan": _scanned_heads,
    "selective_state_update": _step_of_heads,
    "causal_conv1d": _convolved,
    "causal_conv1d_update": _convolved_step,
    "quant_fp8_dynamic tensor": lambda x: (x, WHOLE),
    "quant_fp8_dynamic token": lambda x: (x, TOKEN),
    "quant_fp8_dynamic group": lambda x: (x, (1, 128)),
    "quant_fp8_static": lambda x: (x, _one(x), WHOLE),
    "rms_norm_quant_fp8_static": lambda x: (x, _one(x), WHOLE, _weight(x), EPS),
    "rms_norm_quant_fp8_dynamic token": lambda x: (x, TOKEN, _weight(x), EPS),
    "fused_add_rms_norm_quant_fp8_static": lambda x: (
        x,
        torch.randn_like(x),
        _one(x),
        WHOLE,
        _weight(x),
        EPS,
    ),
    "fused_add_rms_norm_quant_fp8_dynamic token": lambda x: (
        x,
        torch.randn_like(x),
        TOKEN,
        _weight(x),
        EPS,
    ),
    "silu_and_mul_quant_fp8_static": lambda x: (x, _one(x), WHOLE),
    "silu_and_mul_quant_fp8_dynamic token": lambda x: (x, TOKEN),
    "scaled_dot_product_attention_quant_fp8_static": _attention,
}
"""The forms that are measured, and their arguments by a tensor of tokens by width."""

STATES = {"selective_state_update": 0, "causal_conv1d_update": 1}
"""Of forms that read and write states, which argument has them."""


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


def _separate(name: str) -> Callable[..., Any] | None:
    """Return the kernels of each op, one after the other, of a form of several ops."""
    kernels = triton_kernels()
    static, dynamic = kernels["quant_fp8_static"], kernels["quant_fp8_dynamic"]
    norm, sum_and_norm = kernels["rms_norm"], kernels["fused_add_rms_norm"]
    gated = kernels["silu_and_mul"]

    def attended(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, *_: object) -> Any:
        # Triton has no kernel for dense attention alone.
        attention = torch.nn.functional.scaled_dot_product_attention
        return static(attention(query, key, value, enable_gqa=True), scale, WHOLE)

    forms: dict[str, Callable[..., Any]] = {
        "rms_norm_quant_fp8_static": lambda x, scale, group, w, eps: static(
            norm(x, w, eps), scale, group
        ),
        "rms_norm_quant_fp8_dynamic": lambda x, group, w, eps: dynamic(norm(x, w, eps), group),
        "fused_add_rms_norm_quant_fp8_static": lambda x, residual, scale, group, w, eps: static(
            sum_and_norm(x, residual, w, eps)[0], scale, group
        ),
        "fused_add_rms_norm_quant_fp8_dynamic": lambda x, residual, group, w, eps: dynamic(
            sum_and_norm(x, residual, w, eps)[0], group
        ),
        "silu_and_mul_quant_fp8_static": lambda x, scale, group: static(gated(x), scale, group),
        "silu_and_mul_quant_fp8_dynamic": lambda x, group: dynamic(gated(x), group),
        "scaled_dot_product_attention_quant_fp8_static": attended,
    }
    return forms.get(name)


@dataclass(frozen=True)
class Cell:
    """One form on one shape.

    Attributes:
        of_copy: share of the bandwidth of a copy.
        to_compiled: the time of ``torch.compile`` of the definition over ours; ``None`` if it was not measured.
        to_liger: the time of Liger-Kernel over ours; ``None`` if it was not measured, or has no such kernel.
        to_separate: the time of the kernels of each op over ours; ``None`` for a form of one op.
    """

    form: str
    tokens: int
    width: int
    dtype: str
    microseconds: float
    of_copy: float
    to_compiled: float | None
    to_liger: float | None
    to_separate: float | None


def seconds(
    call: Callable[..., Any], inputs: list[tuple[Any, ...]], calls: int = 32, rounds: int = 21
) -> float:
    """Measure a call on the GPU, the median: a graph of calls over the inputs in turn, replayed; no launch waits."""
    for arguments in inputs:
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in islice(cycle(inputs), calls):
            call(*arguments)
    events = [
        (torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True))
        for _ in range(rounds)
    ]
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
    if name in STATES:
        made.append(arguments[STATES[name]])
    return sum(map(_bytes, (*used, *made)))


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor, of dimensions that it is expanded to those of one entry."""
    return x.element_size() * math.prod(
        size for size, stride in zip(x.shape, x.stride(), strict=True) if stride
    )


def copied(size: int) -> float:
    """Measure a copy that moves as many bytes: half of them read, half written."""
    sets = max(2, CACHE // size)
    pairs = [
        tuple(torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in "ab")
        for _ in range(sets)
    ]
    return seconds(lambda source, target: target.copy_(source), pairs)


def cells(forms: list[str]) -> Iterator[Cell]:
    for form in forms:
        tokens = TOKENS if _separate(form.split()[0]) is None else FEW_TOKENS + TOKENS
        for shape in product(tokens, WIDTHS, DTYPES):
            torch.compiler.reset()
            yield measured(form, *shape)


def measured(
    label: str, tokens: int, width: int, dtype: torch.dtype, *, peers: bool = True
) -> Cell:
    """Measure a form on one shape, and with ``peers`` what others make of it."""
    name = label.split()[0]
    columns = 2 * width if "_and_mul" in name else width

    def arguments() -> tuple[Any, ...]:
        return CALLS[label](torch.randn(tokens, columns, device="cuda", dtype=dtype))

    size = moved(name, arguments())
    inputs = [arguments() for _ in range(max(2, CACHE // size))]
    ours = seconds(triton_kernels()[name], inputs)
    compiled, liger = None, None
    if peers:
        compiled = torch.compile(SPECS[name].functional.native, dynamic=False)
        liger = _liger(label)
    return Cell(
        form=label,
        tokens=tokens,
        width=width,
        dtype=str(dtype).removeprefix("torch."),
        microseconds=round(ours * 1e6, 1),
        of_copy=round(copied(size) / ours, 3),
        to_compiled=_ratio(compiled, inputs, ours),
        to_liger=_ratio(liger, inputs, ours),
        to_separate=_ratio(_separate(name), inputs, ours),
    )


def _ratio(
    other: Callable[..., Any] | None, inputs: list[tuple[Any, ...]], ours: float
) -> float | None:
    """Return the time of another implementation over ours."""
    return None if other is None else round(seconds(other, inputs) / ours, 2)


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
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench-gpu.json"), help="where the figures go"
    )
    parser.add_argument("forms", nargs="*", default=list(CALLS), help=f"of {', '.join(CALLS)}")
    options = parser.parse_args()
    missing = (
        triton_missing()
        if torch.cuda.is_available()
        else "needs a GPU, and torch.cuda.is_available() is false"
    )
    if missing:
        sys.exit(f"benchmarks/gpu.py {missing}")
    measured_under = conditions()
    print(", ".join(f"{name} {value}" for name, value in measured_under.items()))
    print(
        f"{'form':45} {'tokens':>6} {'width':>5} {'dtype':9} {'µs':>8} {'of copy':>8} {'compiled':>9} {'Liger':>6} "
        f"{'separate':>8}"
    )
    found = []
    with torch.inference_mode():
        for cell in cells(options.forms):
            found.append(cell)
            others = f"{cell.to_compiled or '-':>9} {cell.to_liger or '-':>6} {cell.to_separate or '-':>8}"
            print(
                f"{cell.form:45} {cell.tokens:6} {cell.width:5} {cell.dtype:9} {cell.microseconds:8} "
                f"{cell.of_copy:8.2f} {others}"
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"schema": 1, **measured_under, "cells": [asdict(cell) for cell in found]}
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"JSON: {options.json}")


if __name__ == "__main__":
    main()
