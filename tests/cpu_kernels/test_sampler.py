"""The greatest number of each row: what torch finds, and the engine's sampler that asks for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from opgraft.binding.pluggable_class import choose_class
from opgraft.engine.sampling import Sampler, SamplingBatch
from opgraft.engine.sampling_params import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 15, 63, 64, 65, 1000, 40_000])
def test_the_first_place_of_the_greatest_number(
    kernels: Any, path: str, width: int, dtype: torch.dtype
) -> None:
    """On each path, for rows of any length and distance, with equal numbers, infinite ones and NaN among them."""
    rows = torch.randn(7, width + 3).to(dtype)[:, 1 : width + 1]
    if width > 10:
        rows[1, 9] = rows[1, 10] = float("nan")
        rows[2] = float("-inf")
        rows[3, 10] = float("inf")
        rows[4, 8] = rows[4, width - 1] = 100
    values, places = kernels.greatest(rows)
    expected = rows.float().max(-1)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)


def test_what_is_refused(kernels: Any) -> None:
    """Rows without numbers, other shapes and other dtypes say so."""
    for wrong in (torch.zeros(3, 0), torch.zeros(3)):
        with pytest.raises(ValueError, match="greatest: x has shape"):
            kernels.greatest(wrong)
    with pytest.raises(TypeError, match="greatest: x has dtype"):
        kernels.greatest(torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_sampler_of_the_engine(
    kernels: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the plugin's, takes the likeliest tokens by the kernel where it can, and fails rows that are no numbers."""
    chosen = choose_class(Sampler).cls
    assert chosen.__module__ == "opgraft_cpu_kernels.sampler"
    module: Any = sys.modules[chosen.__module__]
    called: list[torch.dtype] = []
    real = module._greatest
    monkeypatch.setattr(
        module, "_greatest", lambda rows: (called.append(rows.dtype), real(rows))[1]
    )
    batch = SamplingBatch()
    for key in range(3):
        batch.add(key, SamplingParams(temperature=0), [1])
    logits = torch.randn(3, 500, dtype=dtype)
    logits[1, 7] = float("nan")
    sampled = Sampler()(logits, batch)
    assert sampled.tokens.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())]
    assert "NaN" in sampled.errors[1]
    assert called == [dtype] * (dtype != torch.float64)
