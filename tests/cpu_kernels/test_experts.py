"""Experts of so many tokens that they are computed in several groups."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.nn import functional as F

TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 700, 5, 24, 1024
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_uneven_loads(dtype: torch.dtype, threads: int, path: str) -> None:
    """An expert with most tokens, one with none, and choices of none give what each token's experts make of it."""
    x = torch.randn(TOKENS, HIDDEN).to(dtype)
    w13 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).to(dtype)
    weights = torch.rand(TOKENS, 3)
    ids = torch.stack(
        [torch.full((TOKENS,), 1), torch.randint(2, EXPERTS, (TOKENS,)), torch.full((TOKENS,), -1)],
        1,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            got = torch.ops.opgraft_cpu_kernels.fused_experts(x, w13, w2, weights, ids)
    finally:
        torch.set_num_threads(before)
    expected: Any = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        gate, up = (x.double() @ w13[expert].double().T).chunk(2, -1)
        share = torch.where(ids == expert, weights, 0).sum(1, keepdim=True).double()
        expected += share * ((F.silu(gate) * up) @ w2[expert].double().T)
    assert (got.double() - expected).norm() / expected.norm() < TOLERANCES[dtype]
