"""Fake rules that functional forms of several families have: what torch knows of a result without computing it."""

from __future__ import annotations

from torch import Tensor


def like(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Make one contiguous tensor like ``x``."""
    return x.new_empty(x.shape)


def nothing(*arguments: object, **settings: object) -> None:
    """Return nothing, as in-place variants do."""
