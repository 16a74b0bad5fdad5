"""Gains of linear layers and experts with quantized weights on this machine, over the plain ones in bfloat16.

One kind of weight loses nothing: 12 bits, whose results have the same bits.

Weights are larger than the last cache, so that one row is bound by memory. What the memory gives is measured in the
same run: the speed at which torch adds up as many bytes as the plain weight has. The table says how long a layer takes
over the plain one, and which part of that speed it reads its own bytes at. Experts are measured over plain ones, for
tokens that choose some of them at random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import opgraft
import torch
from opgraft import functional
from opgraft.ops.linear.lossless.storage import to_12_bits
from opgraft.ops.linear.quantized.quantizers import quantize_int4, quantize_int8
from timing import Row, machine, print_table, ratio

SHAPES = ((4096, 14336), (14336, 4096))
"""Output and input features: 117 MB in bfloat16, 59 MB with 8 bits."""

ROWS = (1, 2, 4, 8, 64, 512)
ROUNDS = 21
NUMBER = {1: 4, 2: 4, 4: 2, 8: 2}
LIMITS = {"int8": 1 / 1.8, "int4, groups of 128": 1 / 2.5, "12 bits": 1 / 1.1}
"""For one row."""

EXPERTS, CHOSEN, INTERMEDIATE, HIDDEN = 64, 8, 1024, 2048
TOKENS = (1, 8, 64)
FORMATS = ("int8", "int4, groups of 128", "fp8, groups of 128", "MXFP4")

Call = Callable[[torch.Tensor], object]


def layers(outputs: int, inputs: int) -> tuple[Call, dict[str, tuple[Call, int]], torch.Tensor]:
    """Return the plain layer, those with quantized weights, with the bytes of each, and as many bytes to add up."""
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    plain = torch.nn.Parameter(weight, requires_grad=False)
    made: dict[str, tuple[Call, int]] = {}
    for name, tensors in {
        "int8": quantize_int8(weight),
        "int4, groups of 128": quantize_int4(weight, 128),
        "int4, groups of 32": quantize_int4(weight, 32),
    }.items():
        made[name] = (partial(_run, functional.quantized_linear, tensors), _bytes(tensors))
    tensors = quantize_int8(weight)
    made["int8, dynamic"] = (
        partial(_run, functional.int8_dynamic_linear, tensors),
        _bytes(tensors),
    )
    stored = to_12_bits(weight)
    made["12 bits"] = (partial(_run, functional.lossless_linear, stored), _bytes(stored))
    return lambda x: functional.linear(x, plain), made, torch.zeros(weight.nbytes // 4)


def _run(
    form: Callable[..., object], tensors: tuple[torch.Tensor | None, ...], x: torch.Tensor
) -> object:
    return form(x, *tensors)


def _bytes(tensors: tuple[torch.Tensor | None, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def measure(outputs: int, inputs: int, rows: tuple[int, ...]) -> list[Row]:
    plain, made, memory = layers(outputs, inputs)
    found = []
    for count in rows:
        x = torch.randn(count, inputs, dtype=torch.bfloat16)
        timed = partial(ratio, number=NUMBER.get(count, 1), rounds=ROUNDS if count <= 8 else 5)
        shape = f"{count}x{inputs}x{outputs}"
        if count == 1:
            found.append(
                timed(f"sum of its bytes, {shape} / bfloat16", None, memory.sum, partial(plain, x))
            )
        for name, (layer, size) in made.items():
            limit = LIMITS.get(name) if count == 1 else None
            row = timed(f"{name}, {shape} / bfloat16", limit, partial(layer, x), partial(plain, x))
            found.append(row)
            if count == 1:
                speed = found[0].measured * size / memory.nbytes / row.measured
                found.append(
                    Row(f"{name}, {shape}: part of the memory's speed", round(speed, 3), None, "")
                )
            print(f"{found[-1].name}: {row.measured:.3g} of the time", flush=True)
    return found


def measure_experts() -> list[Row]:
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    found = []
    for name in FORMATS:
        gate_up, down = codes_and_scales(name, w13.shape), codes_and_scales(name, w2.shape)
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
            weights, ids = torch.rand(tokens, EXPERTS).softmax(-1).topk(CHOSEN)
            subject = partial(functional.quantized_experts, x, *gate_up, *down, weights, ids)
            baseline = partial(functional.fused_experts, x, w13, w2, weights, ids)
            label = f"{CHOSEN} of {EXPERTS} experts, {name}, {tokens} tokens / bfloat16"
            found.append(
                ratio(label, None, subject, baseline, number=NUMBER.get(tokens, 1), rounds=7)
            )
            print(f"{found[-1].name}: {found[-1].measured:.3g} of the time", flush=True)
    return found


def codes_and_scales(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what weights of that shape are in a format."""
    experts, outputs, inputs = shape
    if name == "MXFP4":
        exponents = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
        return _bytes_of(experts, outputs, inputs // 2), exponents.view(torch.float8_e8m0fnu)
    groups = 1 if name == "int8" else inputs // 128
    scales = torch.rand(experts, outputs, groups) / (64 * inputs**0.5)
    if name.startswith("int4"):
        return _bytes_of(experts, outputs, inputs // 2), scales
    codes = _bytes_of(experts, outputs, inputs).view(torch.int8)
    return (codes.to(torch.float8_e4m3fn) if name.startswith("fp8") else codes), scales


def _bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=ROWS,
        help="how many rows of inputs linear layers get",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("build/bench-quantized.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    opgraft.load_plugins()
    with torch.no_grad():
        rows = [
            row for shape in SHAPES for row in measure(*shape, tuple(arguments.rows))
        ] + measure_experts()
    described: dict[str, Any] = {**machine(), "threads": arguments.threads}
    data = {"schema": 1, "machine": described, "rows": [asdict(row) for row in rows]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print_table(rows)
    raise SystemExit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    main()
