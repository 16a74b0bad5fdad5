"""A forward that takes another way by what it asks of its input is no op, whatever the answer at its trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import graft
from opgraft.grafting.expressions import NotExpressible
from opgraft.grafting.questions import NoQuestions
from opgraft.grafting.rotations import rotation_of
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.pytorch_utils import Conv1D

BRANCHES: dict[str, Callable[[Tensor], bool]] = {
    "batch of one": lambda x: x.shape[0] == 1,
    "rows": lambda x: 16 in x.size()[:-1],
    "tokens": lambda x: x.size(-2) > 20_000,
    "none": lambda x: not x.shape[0],
    "parity": lambda x: x.shape[0] * 2 % 7 == 3,
    "text": lambda x: str(x.shape[0]) == "7",
    "elements": lambda x: x.numel() > 10_000,
    "length": lambda x: len(x) == 7,
    "half": lambda x: x.dtype == torch.float16,
    "double": lambda x: x.dtype == torch.float64,
    "five dimensions": lambda x: x.dim() == 5,
    "six dimensions": lambda x: len(x.shape) == 6,
    "contiguity": lambda x: not x.is_contiguous(),
    "strides": lambda x: x.stride(0) == 1,
    "gradient": lambda x: x.requires_grad,
    "accelerator": lambda x: x.is_cuda,
    "in secret": lambda x: caught(lambda: x.shape[0] == 7),
}


def caught(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception:
        return False


def gated(condition: Callable[[Tensor], bool]) -> nn.Module:
    class Gated(MambaRMSNormGated):
        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            changed = hidden_states.clamp(-1, 1) if condition(hidden_states) else hidden_states
            out: Tensor = super().forward(changed, gate)
            return out

    return Gated(16, 16)


def transposed(condition: Callable[[Tensor], bool]) -> nn.Module:
    class Transposed(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x.clamp(-1, 1) if condition(x) else x)
            return out

    return Transposed(32, 16)


def never(x: Tensor) -> bool:
    return False


@pytest.mark.parametrize("make", [gated, transposed])
def test_modules_without_questions_are_replaced(make: Callable[..., nn.Module]) -> None:
    """The modules of this file are ops, but for their conditions."""
    assert len(graft(nn.Sequential(make(never))).replaced) == 1


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("make", [gated, transposed])
def test_modules_that_branch_stay(make: Callable[..., nn.Module], branch: str) -> None:
    """Sizes, dtypes, dimensions, layout and gradients of the input decide nothing at graft."""
    part = make(BRANCHES[branch])
    model = nn.Sequential(part)
    assert not graft(model).replaced
    assert model[0] is part


@pytest.mark.parametrize("branch", sorted(BRANCHES.keys() - {"five dimensions", "six dimensions"}))
def test_rotations_that_branch_stay(branch: str) -> None:
    """A rotary function is asked on few heads, and may ask no more about them than a module."""
    condition, plain = BRANCHES[branch], modeling_llama.apply_rotary_pos_emb

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = plain(q * 2 if condition(q) else q, k, cos, sin)
        return rotated

    assert rotation_of(function) is None


def doubled_in_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q = q * 2 if q.dtype == torch.float16 else q
    return PLAIN(q, k, cos, sin)


def doubled_for_one(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return PLAIN(q * 2 if q.shape[0] == 1 else q, k, cos, sin)


PLAIN = modeling_llama.apply_rotary_pos_emb


@pytest.mark.parametrize("function", [doubled_in_half, doubled_for_one])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_llama_whose_rotation_branches(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Nobody replaces its function, so that it answers as before."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval().to(dtype)
    assert not any("rotary" in row.adapter for row in graft(model).replaced)


def test_sizes_are_passed_on() -> None:
    """What a forward computes of sizes to give it to torch is as it was; the last one it may look at."""
    x = torch.randn(2, 3, 8)
    with NoQuestions():
        rows, tokens, width = x.shape
        assert width == x.size(-1) == 8
        assert x.view(*x.shape[:-1], 2, -1).transpose(1, 2).reshape(rows * tokens, -1).dim() == 2
        folded = x.reshape(rows * tokens + 2 - 2, width // 2, 2).view((*x.size()[:-1], 8))
    assert torch.equal(folded, x)
    with pytest.raises(NotExpressible, match="a size of its input"), NoQuestions():
        assert x.shape == (2, 3, 8)
