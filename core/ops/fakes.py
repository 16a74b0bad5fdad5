"""Fake rules of several families. A fake rule gives torch the shape and dtype of a result."""

from __future__ import annotations

from torch import Tensor


def like(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Make one contiguous tensor like ``x``."""
    return x.new_empty(x.shape)


def nothing(*arguments: object, **settings: object) -> None:
    """Return nothing, like an in-place form."""
