"""One row of the table by which ``graft`` recognises modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class LeaveAlone(Exception):  # noqa: N818  # a verdict that the report shows, not an error
    """Raised by ``Adapter.recognise`` for a module that it knows and that must stay; the message says why."""


@dataclass(frozen=True)
class Adapter:
    """The rule by which modules of one kind become an op.

    Attributes:
        name: what the report calls this row, such as ``torch.nn.LayerNorm``.
        op: the op class that is constructed; a plugin's replacement of it takes its place as always.
        recognise: the keyword arguments for ``op`` if the module is of this kind, else ``None``. The op must have the
            module's parameters and buffers under the same names: they are shared with it. A module whose children
            become ops is shown as a copy that has those ops for children. Raises ``LeaveAlone`` with a reason for a
            module that is of this kind and must stay; whatever else it raises leaves the module alone, too.
    """

    name: str
    op: type[nn.Module]
    recognise: Callable[[nn.Module], Mapping[str, Any] | None]
