"""The interface that a class may offer to other code for an op to take the place of its instance."""

from __future__ import annotations

from inspect import isdatadescriptor, isroutine

from opgraft.registry.adapter import LeaveAlone
from torch import nn

_REPLACEABLE = (
    "__init__",
    "forward",
    "extra_repr",
    "reset_parameters",
    "__repr__",
    "__annotate_func__",
)
"""The names that a class may define without another module noticing when an op takes the place of its instance."""


def check_interface(cls: type[nn.Module]) -> None:
    """Raise ``LeaveAlone`` if a class offers more than its forward, or changes what ``nn.Module`` does."""
    members = {
        name: value
        for base in cls.__mro__
        if base not in nn.Module.__mro__
        for name, value in vars(base).items()
    }
    further = sorted(
        name
        for name, value in members.items()
        if (isroutine(value) or isdatadescriptor(value))
        and (name in vars(nn.Module) or not name.startswith("_"))
        and name not in _REPLACEABLE
    )
    if further:
        raise LeaveAlone(
            f"its class defines more than its forward, which an op does not have: {', '.join(further)}"
        )
