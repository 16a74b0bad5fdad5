"""The rows of the tables by which ``graft`` recognises modules and calls of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class LeaveAlone(Exception):  # noqa: N818  # a verdict that the report shows, not an error
    """Raised by ``recognise`` for a known module or call that must stay; the message says why."""


@dataclass(frozen=True)
class Adapter:
    """The rule by which modules of one kind become an op.

    Attributes:
        name: of this row in the report, such as ``torch.nn.LayerNorm``.
        op: the op class to construct; a plugin's replacement of the class takes its place as always.
        recognise: returns the keyword arguments for ``op`` if the module is of this kind, else
            ``None``. The op must have the module's parameters and buffers under the same names, and
            shares them with the module. If children of a module become ops, ``recognise`` sees a copy
            of the module with these ops. ``LeaveAlone`` with a reason leaves a module of this kind
            alone, and so does any other exception.
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
        found: the object with this name in the file of the forward, such as a function; ``None`` if
            the file has no such name.
        model: the model that ``graft`` was given.
    """

    module: nn.Module
    name: str
    found: Any
    model: nn.Module


@dataclass(frozen=True)
class CallAdapter:
    """The rule by which the forward of a module calls an op in place of a function of its file.

    ``graft`` makes the op a child of the module. The forward of that one module then finds the result
    of ``substitute`` under the name of the function.

    Attributes:
        name: of this row in the report, such as ``transformers rotary function``.
        op: the op class to construct; a plugin's replacement of the class takes its place as always.
        recognise: returns the keyword arguments for ``op`` if the op can do the work of the call,
            else ``None``. Called for every name in the code of a forward. ``LeaveAlone`` with a reason
            leaves a known call alone, and so does any other exception.
        substitute: receives the op and the object from the file, and returns the object for the
            forward. A function of a module, so that a grafted model can be pickled. Calls that the op
            was not made for should go to the object from the file.
        child: name of the op among the children of the module; ``{name}`` stands for the name of the
            function.
        native_gains: the native definition of the op is faster than the function, too. Otherwise the
            call is left alone if no kernel serves the op.
        whole: the op stands for all that the module computes; the report shows the module.
    """

    name: str
    op: type[nn.Module]
    recognise: Callable[[FunctionCall], Mapping[str, Any] | None]
    substitute: Callable[[Any, Any], Any]
    child: str = "opgraft_{name}"
    native_gains: bool = False
    whole: bool = False
