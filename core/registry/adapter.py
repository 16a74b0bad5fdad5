"""Rows of the tables of ``graft``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class LeaveAlone(Exception):  # noqa: N818  # a verdict that the report shows, not an error
    """Raised by ``recognise`` with the reason for a known module or call to stay."""


@dataclass(frozen=True)
class Adapter:
    """The rule for modules of one kind that become an op.

    Attributes:
        name: in the report, such as ``torch.nn.LayerNorm``.
        op: the op class, or a plugin's replacement.
        recognise: returns arguments for ``op``, or ``None`` for other modules. The op shares
            parameters and buffers of the same names. Children that became ops are ops here. Any
            exception leaves the module alone.
    """

    name: str
    op: type[nn.Module]
    recognise: Callable[[nn.Module], Mapping[str, Any] | None]


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A name in the code of a module's forward.

    Attributes:
        module: the module.
        name: the name.
        found: the object of that name in the file, or ``None``.
        model: the model of ``graft``.
    """

    module: nn.Module
    name: str
    found: Any
    model: nn.Module


@dataclass(frozen=True)
class CallAdapter:
    """The rule for forwards that call an op, a child of the module, instead of a function.

    Attributes:
        name: in the report.
        op: the op class, or a plugin's replacement, without parameters and buffers.
        recognise: returns arguments for ``op``, or ``None`` for other names. ``LeaveAlone`` leaves
            the call alone. After any other exception the next row is tried.
        substitute: a function of a module; returns the object for the forward, from the op and the
            object of the file.
        child: name of the op; ``{name}``, the only field, is the name of the function.
        native_gains: no kernel needs to serve the op.
        whole: the op stands for the whole module.
    """

    name: str
    op: type[nn.Module]
    recognise: Callable[[FunctionCall], Mapping[str, Any] | None]
    substitute: Callable[[Any, Any], Any]
    child: str = "opgraft_{name}"
    native_gains: bool = False
    whole: bool = False
