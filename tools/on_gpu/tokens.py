"""Comparing greedy tokens with those that are expected: they may part where two tokens are about equally likely."""

from __future__ import annotations

from collections.abc import Sequence


def compared(
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    margins: Sequence[Sequence[float]],
    tie: float,
) -> str:
    """Return how many answers are the expected ones.

    Args:
        found: tokens of each answer.
        expected: tokens of each answer.
        margins: by how much the logit of each expected token exceeds the second greatest.
        tie: the margin below which another token is no error; the answer is not compared from there on.

    Raises:
        AssertionError: an answer parts from the expected one where the margin is greater, or has another length.
    """
    parted = []
    for place, (ours, theirs, gaps) in enumerate(zip(found, expected, margins, strict=True)):
        if len(ours) != len(theirs):
            raise AssertionError(f"answer {place} has {len(ours)} tokens, expected {len(theirs)}")
        pairs = enumerate(zip(ours, theirs, strict=True))
        at = next((index for index, (our, their) in pairs if our != their), None)
        if at is None:
            continue
        told = f"answer {place} parts at token {at}, where the margin is {gaps[at]:.1e}"
        if gaps[at] >= tie:
            raise AssertionError(f"{told}, and {tie} is the most")
        parted.append(told)
    equal = f"{len(found) - len(parted)} of {len(found)} answers are equal"
    return "; ".join([equal, *parted])
