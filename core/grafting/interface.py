"""The interface of a class to other code. An op has no such interface."""

from __future__ import annotations

from inspect import isdatadescriptor, isroutine
from typing import Any

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
"""Names that a class may define. No other module notices if an op does not have these."""


def check_interface(cls: type[nn.Module]) -> None:
    """Raise ``LeaveAlone`` if a class offers more than a forward, or overrides ``nn.Module``."""
    members: dict[str, Any] = {}
    for base in cls.__mro__:
        if base not in nn.Module.__mro__:
            members.update(vars(base))

    further = [name for name, value in members.items() if _is_offered(name, value)]
    if further:
        raise LeaveAlone(
            "its class defines more than its forward, which an op does not have: "
            f"{', '.join(sorted(further))}"
        )


def _is_offered(name: str, value: Any) -> bool:
    if name in _REPLACEABLE or not (isroutine(value) or isdatadescriptor(value)):
        return False
    # A private name is offered only if ``nn.Module`` calls the name.
    return name in vars(nn.Module) or not name.startswith("_")
