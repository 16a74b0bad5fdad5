"""Functions of state spaces that differ from the op only where an argument is left out, or given by its place."""

from __future__ import annotations

import os
from typing import Any

import pytest
from opgraft import graft
from torch import Tensor, nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers", minversion="5.20")
from transformers.models.bamba import modeling_bamba  # after the variable is set
from transformers.models.mamba import modeling_mamba


def plain_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None,  # noqa: N803
    dt_bias: Any = None, dt_softplus: bool = False, z: Any = None,
) -> Tensor:  # fmt: skip
    """A step of channels that says something else where it has no gate."""
    args = (state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    out: Tensor = modeling_mamba.mamba_selective_state_update.__wrapped__(*args)
    return out if z is not None else F.silu(out)


def limited_chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None,  # noqa: N803
    dt_bias: Any = None, initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, 0.1), return_final_states: bool = False,
) -> Any:  # fmt: skip
    """A scan that has limits where it is given none."""
    args = (
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size,
        D,
        dt_bias,
        initial_states,
        dt_softplus,
        dt_limit,
    )
    return modeling_bamba.mamba2_chunk_scan.__wrapped__(*args, return_final_states)


def exchanged_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None,  # noqa: N803
    dt_softplus: bool = False, dt_bias: Any = None, z: Any = None,
) -> Tensor:  # fmt: skip
    """A step with its arguments in another order."""
    args = (state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    out: Tensor = modeling_mamba.mamba_selective_state_update.__wrapped__(*args)
    return out


class Plain(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return plain_state_update(*args)


class Limited(nn.Module):
    def forward(self, *args: Any) -> Any:
        return limited_chunk_scan(*args)


class Exchanged(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return exchanged_state_update(*args)


@pytest.mark.parametrize(
    ("mixer", "op"),
    [
        (Plain, "selective_state_update"),
        (Exchanged, "selective_state_update"),
        (Limited, "mamba_chunk_scan"),
    ],
)
def test_what_differs_in_some_call_stays(mixer: type[nn.Module], op: str) -> None:
    """The reason says what it is not."""
    report = graft(nn.ModuleDict({"mixer": mixer()}))
    assert not report.replaced
    assert any(f"computes something else than {op}" in row.reason for row in report.left_alone)
