"""The comparison of a recorded step with the model."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from opgraft.engine.runner.recorded_steps import results_agree


@pytest.mark.parametrize(
    ("replayed", "expected", "agree"),
    [
        ([1.0, 100.0], [1.05, 100.0], True),
        ([1.0, 100.0], [2.0, 100.0], False),
        ([nan, 100.0], [nan, 100.05], True),
        ([nan, 1.0], [nan, 100.0], False),
        ([nan, 1.0], [1.0, nan], False),
        ([nan, 100.0], [1.0, 100.0], False),
        ([inf, 100.0], [inf, 100.0], True),
        ([inf, 1.0], [inf, 100.0], False),
        ([inf, 1.0], [-inf, 1.0], False),
        ([inf, 1.0], [nan, 1.0], False),
        ([nan, nan], [nan, nan], True),
    ],
)
def test_a_replay_is_compared_number_by_number(
    replayed: list[float], expected: list[float], agree: bool
) -> None:
    """NaN and infinities must be the same, and the largest finite number gives the tolerance."""
    assert results_agree(torch.tensor(replayed), torch.tensor(expected)) is agree


def test_roundings_of_short_numbers() -> None:
    """A result of few digits may differ by more than one of float32."""
    expected = torch.tensor([1.0, 100.0])
    replayed = torch.tensor([5.0, 100.0])
    assert not results_agree(replayed, expected)
    assert results_agree(replayed.bfloat16(), expected.bfloat16())
