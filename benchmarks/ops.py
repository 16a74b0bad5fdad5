"""Gains of the ops' kernels on this machine: against torch eager, torch.compile and the speed of a copy.

Every op's functional form, bound to the best kernel that is installed, over its native definition in plain PyTorch: run
eagerly, and compiled for the very shapes. The linear layer is measured over torch's. Fractions of the roofline are
those of the speed of a copy of as many bytes, measured in the same run. Where the machine does not allow the limit of
experts, the row says what is possible: from the speeds of reading and of products that bound the engines, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import expert_balancing
import latent_attention
import opgraft
import state_space
import torch
from opgraft import functional
from opgraft.binding.functional import binding_of
from opgraft.machine.memory import move_to_huge_pages
from opgraft.ops.spec import Draw, OpSpec
from opgraft.testing.catalogue import SPECS
from opgraft.testing.replaying import ReplayedCall, replayable
from opgraft.testing.shapes import ShapeRecord, find_record
from timing import Row, machine, print_table, ratio

sys.path.append(str(Path(__file__).parent / "peers"))
from machine_limits import speeds  # a script's folder is not a package

NORMS = ("rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "layer_norm")
ACTIVATIONS = ("silu_and_mul", "gelu_and_mul", "gelu", "gelu_tanh", "silu", "quick_gelu")
OTHERS = ("rms_norm_gated", "rotary_embedding", "quant_fp8_dynamic")
GROUPS = {"norm": NORMS, "activation": ACTIVATIONS, "other": OTHERS}
TOKENS = (1, 16, 512, 2048)
WIDTHS = (4096, 8192)
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 7
SECONDS = 0.02
"""The time that one side of a round takes, about."""

EAGER_LIMITS = {("norm", 1): 1 / 3, ("norm", 512): 1 / 3, ("norm", 2048): 1 / 3}
EAGER_LIMITS |= {("activation", 512): 1 / 2, ("activation", 2048): 1 / 2}
COMPILED_LIMITS = {
    (group, tokens): limit
    for group in ("norm", "activation")
    for tokens, limit in ((1, 1 / 5), (512, 1 / 1.5), (2048, 1 / 1.15))
}
COPY_LIMIT = 1 / 0.7

HEAD_SIZE = 128
LINEAR_ROWS = (1, 16, 64, 512, 2048)
LINEAR_SHAPES = ((384, 384), (384, 1536), (1024, 1024), (4096, 4096), (8192, 8192))
LINEAR_LIMIT = 1.05
EXPERTS, CHOSEN, INTERMEDIATE, HIDDEN = 64, 8, 2048, 2048
EXPERT_LIMITS = {1: 0.35, 8: None, 64: 0.5, 512: 0.5}
"""By tokens: over the loop over experts of transformers."""
SPEED_BYTES = 1 << 28
"""Read to measure the speed of reading."""


@dataclass(frozen=True)
class Cell:
    """One op on one shape.

    Attributes:
        seconds: of a call of the kernel.
        roofline: the fraction of the speed of a copy that the kernel reaches.
    """

    op: str
    kernel: str
    tokens: int
    width: int
    dtype: str
    seconds: float
    roofline: float


def arguments_of(spec: OpSpec, tokens: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return realistic arguments; ``width`` of gated activations is that of the result, of rotary of query and key."""
    draw = Draw((spec.functional.name, tokens, width), dtype)
    if spec.functional.name == "rotary_embedding":
        angles = draw(tokens, HEAD_SIZE // 2).double()
        table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
        query, key = draw(tokens, width), draw(tokens, width)
        positions = torch.arange(tokens)
        return {
            "positions": positions,
            "query": query,
            "key": key,
            "head_size": HEAD_SIZE,
            "cos_sin_cache": table,
        }
    arguments = spec.inputs(draw, (tokens,), width)
    return {**arguments, "group_shape": (1, -1)} if "group_shape" in arguments else arguments


def measure(
    group: str, name: str, tokens: int, width: int, dtype: torch.dtype
) -> tuple[Cell, list[Row]]:
    spec = SPECS[name]
    arguments = arguments_of(spec, tokens, width, dtype)
    ordered = tuple(arguments.values())
    kernel, native = partial(spec.functional, *ordered), partial(spec.functional.native, *ordered)
    torch.compiler.reset()
    # For the very shapes: its best case.
    compiled = partial(torch.compile(spec.functional.native, dynamic=False), *ordered)
    label = f"{name} {tokens}x{width} {str(dtype).removeprefix('torch.')}"
    compare = partial(compared, kernel)
    rows = [
        compare(f"{label} / eager", EAGER_LIMITS.get((group, tokens)), native),
        compare(f"{label} / compiled", COMPILED_LIMITS.get((group, tokens)), compiled),
    ]
    seconds, copy_seconds = paired(kernel, copy_of(spec.traffic(arguments)))
    binding = binding_of(spec.functional).kernel.winner
    dtype_name = str(dtype).removeprefix("torch.")
    cell = Cell(name, str(binding), tokens, width, dtype_name, seconds, copy_seconds / seconds)
    return cell, rows


def copy_of(traffic: int) -> Callable[[], object]:
    """Return a copy that moves ``traffic`` bytes, reading and writing together, into memory that exists."""
    source = torch.ones(max(traffic // 2, 64), dtype=torch.uint8)
    target = torch.empty_like(source)
    return partial(target.copy_, source)


def repetitions(call: Callable[[], object]) -> int:
    call()
    start = time.perf_counter()
    call()
    return max(1, int(SECONDS / max(time.perf_counter() - start, 1e-7)))


def compared(
    kernel: Callable[[], object],
    name: str,
    limit: float | None,
    baseline: Callable[[], object],
    rounds: int = ROUNDS,
) -> Row:
    return ratio(name, limit, kernel, baseline, number=repetitions(baseline), rounds=rounds)


def paired(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Measure seconds per call of either, the medians of interleaved rounds."""
    numbers = repetitions(first), repetitions(second)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, number, found in zip((first, second), numbers, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(number):
                call()
            found.append((time.perf_counter() - start) / number)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def into_existing_memory() -> Iterator[Row]:
    """Measure the norm written to memory that exists, over a copy of its input: no fresh memory, so no page faults."""
    for dtype in DTYPES:
        for width in WIDTHS:
            for tokens in (512, 2048):
                x, weight = torch.randn(tokens, width).to(dtype), torch.ones(width).to(dtype)
                out = torch.empty_like(x)
                call = partial(torch.ops.opgraft_cpu_kernels.rms_norm_out, x, out, weight)
                name = f"rms_norm_out {tokens}x{width} {str(dtype).removeprefix('torch.')} / copy"
                yield compared(call, name, COPY_LIMIT, partial(torch.empty_like(x).copy_, x))


def linears() -> Iterator[Row]:
    """Measure the linear form over torch's, for weights that are parameters."""
    for dtype in DTYPES:
        for inputs, outputs in LINEAR_SHAPES:
            # As a model's; what is made in inference mode cannot be packed.
            with torch.inference_mode(False):
                weight = torch.nn.Parameter(
                    torch.randn(outputs, inputs, dtype=dtype), requires_grad=False
                )
            bias = torch.randn(outputs, dtype=dtype)
            for rows in LINEAR_ROWS:
                x = torch.randn(rows, inputs, dtype=dtype)
                name = (
                    f"linear {rows}x{inputs}x{outputs} {str(dtype).removeprefix('torch.')} / torch"
                )
                torch_linear = partial(torch.nn.functional.linear, x, weight, bias)
                ours, limit = (
                    partial(functional.linear, x, weight, bias),
                    linear_limit(rows, inputs, dtype),
                )
                yield compared(ours, name, limit, torch_linear)


def experts() -> Iterator[Row]:
    """Measure experts over the loop over them in transformers, on weights in huge pages, as loaded models have them.

    The least that is possible is what the chosen ones' weights take to be read, or their products to be computed.
    """
    from transformers import MixtralConfig  # only this needs it
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
    }
    config = MixtralConfig(**sizes)
    config._experts_implementation = "eager"
    for dtype in DTYPES:
        limits = speeds(SPEED_BYTES, dtype)
        theirs = MixtralExperts(config).requires_grad_(False).to(dtype)
        for weight in theirs.parameters():
            weight.normal_(0, 0.02)
        moving = move_to_huge_pages(
            range(w.data_ptr(), w.data_ptr() + w.nbytes) for w in theirs.parameters()
        )
        if moving is not None:
            moving.join()
        for tokens, limit in EXPERT_LIMITS.items():
            x = torch.randn(tokens, HIDDEN, dtype=dtype)
            weights, ids = torch.rand(tokens, EXPERTS).softmax(-1).topk(CHOSEN)
            ours = partial(
                functional.fused_experts, x, theirs.gate_up_proj, theirs.down_proj, weights, ids
            )
            label = f"experts {tokens} of {EXPERTS} {str(dtype).removeprefix('torch.')}"
            loop = partial(theirs, x, ids, weights.to(dtype))
            taken, looped = paired(ours, loop)
            speed, elements = limits(), 3 * HIDDEN * INTERMEDIATE
            reading = (
                torch.unique(ids).numel()
                * elements
                * dtype.itemsize
                / speed["bytes_per"]["seconds"]
            )
            products = ids.numel() * elements / speed["products_per"]["seconds"]
            least, what = max((reading, "reading"), (products, "products"))
            detail = f"{taken * 1e3:.3g} over {looped * 1e3:.3g} ms; {least / taken:.0%} of the speed of {what}"
            yield Row(
                f"{label} / transformers",
                round(taken / looped, 4),
                limit,
                detail,
                round(least / looped, 4),
            )


def linear_limit(rows: int, width: int, dtype: torch.dtype) -> float:
    """Set a gain as the limit on the CPUs that the figures are for, no loss on all others."""
    if not machine()["cpu"].startswith("AMD"):
        return LINEAR_LIMIT
    if dtype == torch.float32 and rows >= 64:
        return 1 / 2
    return 1 / 3 if dtype == torch.bfloat16 and (rows, width) == (1, 4096) else LINEAR_LIMIT


def plot(cells: list[Cell], file: Path) -> None:
    """Plot bars: the fraction of the roofline that each op reaches at 2,048 tokens, by width and dtype."""
    from matplotlib import pyplot  # only this needs it

    shown = [cell for cell in cells if cell.tokens == max(TOKENS)]
    labels = [f"{cell.op} {cell.width} {cell.dtype}" for cell in shown]
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(shown) + 1.5))
    axes.barh(labels, [cell.roofline for cell in shown])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"fraction of a copy's speed, {max(TOKENS)} tokens, fresh output\n{machine()['cpu']}"
    )
    figure.tight_layout()
    figure.savefig(file)


def run(names: set[str]) -> tuple[list[Cell], list[Row]]:
    cells, rows = [], []
    grid = [
        (g, n, t, w, d)
        for g, ns in GROUPS.items()
        for n in ns
        for w in WIDTHS
        for d in DTYPES
        for t in TOKENS
    ]
    for group, name, tokens, width, dtype in grid:
        if not names or name in names:
            cell, found = measure(group, name, tokens, width, dtype)
            cells.append(cell)
            rows += found
            print(*(f"{row.name}: {row.measured:.3g}" for row in found), sep="\n", flush=True)
    return cells, rows


def replays(record: ShapeRecord, names: set[str]) -> Iterator[Row]:
    """Measure the calls of real models over the native definitions."""
    for name, spec in SPECS.items():
        if names and name not in names:
            continue
        for replayed, obstacle in replayable(record, spec, TOKENS[-2]):
            if obstacle:
                print(f"not replayed: {replayed.call} of {replayed.model}: {obstacle}")
                continue
            for tokens in TOKENS[:-1] if replayed.is_per_token else TOKENS[:1]:
                for dtype in DTYPES:
                    yield replay(spec, replayed, tokens, dtype)


def replay(spec: OpSpec, replayed: ReplayedCall, tokens: int, dtype: torch.dtype) -> Row:
    arguments = replayed.at(tokens).arguments("", dtype, (tokens,), 1)
    kernel = partial(spec.functional, **arguments)
    native = partial(spec.functional.native, **arguments)
    name = f"{replayed.words(tokens)} {str(dtype).removeprefix('torch.')} / eager"
    return compared(kernel, name, None, native)


OTHER_ROWS = (
    ("linear", linears),
    ("latent_attention", latent_attention.rows),
    ("experts", experts),
    ("experts", expert_balancing.rows),
    ("state_space", state_space.rows),
)


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """Print each row when it is measured, as all of them take long."""
    for row in rows:
        print(f"{row.name}: {row.measured:.3g}", flush=True)
        yield row


def measured(names: set[str]) -> tuple[list[Cell], list[Row]]:
    cells, rows = run(names)
    if not names:
        rows += told(into_existing_memory())
    for name, further in OTHER_ROWS:
        if not names or name in names:
            rows += told(further())
    return cells, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "ops",
        nargs="*",
        help=f"of {', '.join((*NORMS, *ACTIVATIONS, *OTHERS))}, linear, latent_attention, experts, state_space; or all",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/bench-ops"),
        help="folder of table, JSON and plot",
    )
    parser.add_argument(
        "--shapes",
        metavar="RECORD",
        help="measure the calls of real models: a file of opgraft trace-shapes, or a shipped record by name",
    )
    arguments = parser.parse_args()
    names = set(arguments.ops)
    opgraft.load_plugins()
    with torch.inference_mode():
        cells: list[Cell] = []
        if arguments.shapes:
            rows = list(told(replays(find_record(arguments.shapes), names)))
        else:
            cells, rows = measured(names)
    arguments.output.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": 1,
        "machine": machine(),
        "cells": [asdict(c) for c in cells],
        "rows": [asdict(r) for r in rows],
    }
    (arguments.output / "ops.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print_table(rows)
    for cell in cells:
        size = f"{cell.tokens}x{cell.width} {cell.dtype}"
        print(f"{cell.op:20} {size:20} {cell.roofline:5.2f} of a copy's speed  {cell.kernel}")
    if cells:
        plot(cells, arguments.output / "roofline.svg")
    raise SystemExit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    main()
