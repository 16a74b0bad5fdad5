"""Checks of what functions on whole models are given."""

from __future__ import annotations

from torch import nn


def expect_module(function: str, model: object) -> None:
    """Raise ``TypeError`` unless a function was given a module: an instance, not its class."""
    if not isinstance(model, nn.Module):
        # Not its repr, which may be that of a whole state_dict.
        given = (
            f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a value of type {type(model).__name__}"
        )
        raise TypeError(f"{function} was given {given}, expected a torch.nn.Module")
