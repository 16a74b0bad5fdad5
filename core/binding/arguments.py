"""The check of arguments of functions on whole models, such as ``rebind`` and ``explain``."""

from __future__ import annotations

from torch import nn


def expect_module(function: str, model: object) -> None:
    """Check the argument of ``function``.

    Raises:
        TypeError: the argument is not an instance of ``torch.nn.Module``, such as a class.
    """
    if isinstance(model, nn.Module):
        return
    # The type, not the repr: a whole state_dict would fill the screen.
    given = f"a value of type {type(model).__name__}"
    if isinstance(model, type):
        given = f"the class {model.__name__}"
    raise TypeError(f"{function} was given {given}, expected a torch.nn.Module")
