"""``Caches``: the decisions that constructions and calls look up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Caches:
    """The decisions under one scope of settings. A change of a plugin or setting drops all.

    Attributes:
        constructed: op class → the ``Binding`` for constructing the class.
        existing: (target, class) → the ``Binding`` of existing ops of the class.
        classes: other replaceable class → the ``ReplacementChoice`` for constructing the class.
        functions: functional form → the kernel, and the native definition for gradients if the
            kernel has no backward.
        settings: the current ``Settings``, ``None`` before the first read; never modified.
        check_values: the setting of that name, or ``None``.
        platform_agrees: settings ask for no other platform than the selected one.
    """

    constructed: dict[type, Any] = field(default_factory=dict)
    existing: dict[tuple[type, type], Any] = field(default_factory=dict)
    classes: dict[type, Any] = field(default_factory=dict)
    functions: dict[Any, tuple[Callable[..., Any], Callable[..., Any] | None]] = field(
        default_factory=dict
    )
    settings: Any = None
    check_values: bool | None = None
    platform_agrees: bool = False
