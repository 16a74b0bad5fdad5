"""The additions of adapters by the kernels of linear layers, beside float64, in sizes of real adapters."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from opgraft import functional
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")

ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = [64, 24, 24]
INPUTS = 72


def drawn(rank: int, counts: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call in which an adapter has as many rows as ``counts`` tells, behind two without one."""
    rows = 2 + sum(counts)
    adapters = len(counts)
    bounds = [2 + sum(counts[:number]) for number in range(adapters + 1)]
    return {
        "y": torch.randn(rows, sum(SIZES)).to(dtype),
        "x": torch.randn(rows, INPUTS).to(dtype),
        "a": (torch.randn(adapters, len(SIZES) * rank, INPUTS) / INPUTS**0.5).to(dtype),
        "b": (torch.randn(adapters, sum(SIZES), rank) / rank**0.5).to(dtype),
        "bounds": torch.tensor(bounds, dtype=torch.int32),
        "sizes": SIZES,
    }


def exact(y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: list[int]) -> Tensor:
    """Return the sums in float64, by the whole weight of each adapter."""
    result = y.double()
    rank = b.shape[2]
    for adapter, (start, end) in enumerate(pairwise(bounds.tolist())):
        downs = a[adapter].double().split(rank)
        ups = b[adapter].double().split(sizes)
        weight = torch.cat([up @ down for up, down in zip(ups, downs, strict=True)])
        result[start:end] += x[start:end].double() @ weight.t()
    return result


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("rank", [8, 16, 33, 64])
def test_values(path: str, rank: int, dtype: torch.dtype) -> None:
    """Few rows, many, and none; rows without an adapter keep their bits."""
    for counts in ([1, 1, 1, 1], [3, 0, 5], [1, 40]):
        given = drawn(rank, counts, dtype)
        y = given["y"].clone()
        functional.add_lora_(**{**given, "y": y})
        torch.testing.assert_close(y.double(), exact(**given), rtol=0, atol=4 * ERRORS[dtype])
        assert torch.equal(y[:2], given["y"][:2])


def test_rows_do_not_depend_on_neighbours(path: str) -> None:
    """A row has the same bits beside rows of its adapter and of others, as long as they are few."""
    given = drawn(16, [2, 1], torch.float32)
    alone = given["y"][4:].clone()
    one = torch.tensor([0, 0, 1], dtype=torch.int32)
    functional.add_lora_(alone, given["x"][4:], given["a"], given["b"], one, SIZES)
    functional.add_lora_(**given)
    assert torch.equal(given["y"][4:], alone)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bounds": torch.tensor([2, 4, 3, 5])}, "ascend"),
        ({"bounds": torch.tensor([2, 3, 4, 9])}, "ascend"),
        ({"bounds": torch.tensor([2, 3, 5])}, "bounds has shape"),
        ({"sizes": [64, 48]}, "for sizes"),
        ({"a": torch.zeros(3, 24, INPUTS + 1)}, "for sizes"),
        ({"b": torch.zeros(3, 112, 8).half()}, "dtype"),
        ({"y": torch.zeros(1, 112).expand(5, 112)}, "shares memory"),
    ],
)
def test_refusals(kernels: Any, changed: dict[str, Any], words: str) -> None:
    """The kernel refuses other arguments before it writes."""
    given = drawn(8, [1, 1, 1], torch.float32) | changed
    before = given["y"].clone()
    with pytest.raises(ValueError, match=words):
        kernels.add_lora_(*given.values(), 8)
    assert torch.equal(given["y"], before)
