"""The CPU kernels over the fused ops of Intel's extension for PyTorch, in the environment that has the extension.

The extension's rotary embedding writes to its arguments, so ours in place is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from intel_extension_for_pytorch.llm import functional as ipex
from opgraft import functional
from opgraft.binding.functional import binding_of
from timing import Row, ratio, report

TOKENS = (1, 16, 512, 2048)
WIDTH, HEAD_SIZE, POSITIONS = 4096, 128, 4096
DTYPES = (torch.float32, torch.bfloat16)
LIMIT = 1.0
ROUNDS = 15


def rows(tokens: int, dtype: torch.dtype) -> Iterator[Row]:
    x, gated, weight = torch.randn(tokens, WIDTH), torch.randn(tokens, 2 * WIDTH), torch.rand(WIDTH)
    x, gated, weight = x.to(dtype), gated.to(dtype), weight.to(dtype)
    gate, up = gated.chunk(2, -1)
    heads = x.reshape(tokens, -1, HEAD_SIZE).clone()
    others = heads.clone()
    positions = torch.arange(tokens)
    # A rotation, so that numbers stay as large as they are.
    angles = torch.rand(POSITIONS, HEAD_SIZE // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    cos, sin = (t.contiguous() for t in table[positions].chunk(2, -1))
    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rms_norm": (
            partial(functional.rms_norm, x, weight, 1e-6),
            partial(ipex.rms_norm, x, weight, 1e-6),
        ),
        "silu_and_mul": (partial(functional.silu_and_mul, gated), partial(ipex.silu_mul, gate, up)),
        "rotary_embedding_": (
            partial(functional.rotary_embedding_, positions, heads, others, HEAD_SIZE, table, True),
            partial(ipex.rotary_embedding, heads, others, sin, cos, HEAD_SIZE, True),
        ),
    }
    number = max(5, 2000 // tokens)
    for name, (ours, theirs) in sides.items():
        label = f"{name} {tokens}x{WIDTH} {str(dtype).removeprefix('torch.')} / IPEX"
        yield ratio(label, LIMIT, ours, theirs, number=number, rounds=ROUNDS)


def measure() -> list[Row]:
    if "opgraft_cpu_kernels" not in binding_of(functional.rms_norm).replacement.cls.__module__:
        raise RuntimeError("the CPU kernels are not in force: run 'make bench-ipex'")
    with torch.inference_mode():
        return [row for tokens in TOKENS for dtype in DTYPES for row in rows(tokens, dtype)]


if __name__ == "__main__":
    report("The CPU kernels against Intel's extension for PyTorch.", measure)
