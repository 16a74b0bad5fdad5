"""Whoever writes to a weight, and by whatever way, the next call of a linear layer computes with what it holds now."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.kernels import weight_cache
from opgraft.ops import Linear
from ops.packing import Calls, check, needs_onednn, record_calls
from torch import nn

pytestmark = needs_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return record_calls(monkeypatch)


def trained_by(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[nn.Linear], object]:
    """A training step, after which parameters require a gradient again only if they did."""

    def step(op: nn.Linear) -> None:
        before = op.weight.requires_grad
        op.requires_grad_(True)
        optimizer = make(list(op.parameters()))
        with torch.enable_grad():
            op(torch.randn(3, op.in_features)).square().sum().backward()
        optimizer.step()
        op.requires_grad_(before)

    return step


def merged_as_peft_does(op: nn.Linear) -> None:
    """``merge`` of PEFT's LoRA layers, which writes through ``.data``."""
    lora_a, lora_b = torch.randn(2, op.in_features), torch.randn(op.out_features, 2)
    op.weight.data += (lora_b @ lora_a) * 0.5


def merged_safely_and_unmerged_as_peft_does(op: nn.Linear) -> None:
    """``merge(safe_merge=True)``, which assigns ``.data``, then ``unmerge``, which subtracts in place."""
    delta = torch.randn(op.out_features, 2) @ torch.randn(2, op.in_features)
    merged = op.weight.data.clone()
    merged += delta
    op.weight.data = merged
    op(torch.randn(3, op.in_features))
    op.weight.data -= delta * 2


def swapped(op: nn.Linear) -> None:
    other = nn.Parameter(torch.randn_like(op.weight), requires_grad=op.weight.requires_grad)
    torch.utils.swap_tensors(op.weight, other)


def written_by_numpy(op: nn.Linear) -> None:
    op.weight.detach().numpy()[:] *= 3


def written_by_dlpack(op: nn.Linear) -> None:
    torch.from_dlpack(op.weight.detach()).mul_(3)


def double(weight: torch.Tensor) -> None:
    weight.detach().mul_(2)


def written_by_a_process(op: nn.Linear) -> None:
    op.share_memory()
    op(torch.randn(3, op.in_features))
    child = multiprocessing.get_context("fork").Process(target=double, args=(op.weight,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


SEEN_ALWAYS: dict[str, Callable[[nn.Linear], object]] = {
    "AdamW": trained_by(lambda p: torch.optim.AdamW(p, lr=0.5)),
    "AdamW(fused=True)": trained_by(lambda p: torch.optim.AdamW(p, lr=0.5, fused=True)),
    "SGD(fused=True)": trained_by(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "Adagrad(fused=True)": trained_by(lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True)),
    "torch.utils.swap_tensors": swapped,
    "another process": written_by_a_process,
}
UNSEEN: dict[str, Callable[[nn.Linear], object]] = {
    ".data.copy_": lambda op: op.weight.data.copy_(torch.randn(op.weight.shape)),
    ".data of a view": lambda op: op.weight.view(-1).data.mul_(3),
    "numpy": written_by_numpy,
    "dlpack": written_by_dlpack,
    "PEFT's merge": merged_as_peft_does,
    "PEFT's safe merge and unmerge": merged_safely_and_unmerged_as_peft_does,
}


@pytest.mark.parametrize("write", [*SEEN_ALWAYS, *UNSEEN])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("again", [1, 2])
def test_written(calls: Calls, write: str, requires_grad: bool, again: int) -> None:
    """A layer whose weight nobody declared frozen reads it at each call, whether or not it requires a gradient."""
    op, x = Linear(13, 7).requires_grad_(requires_grad), torch.randn(3, 13)
    with torch.no_grad():
        check(op(x), x, op)
        for _ in range(again):
            before = op.weight.detach().clone()
            (SEEN_ALWAYS | UNSEEN)[write](op)
            assert not torch.equal(op.weight, before)
            check(op(x), x, op)
    assert "pack" not in calls
    assert "linear" in calls
