"""Decisions that calls look up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Caches:
    """The decisions made under one scope of settings, dropped together when a plugin or a setting changes.

    Attributes:
        constructed: op class → the ``Binding`` for constructing it.
        existing: (target, class) → the ``Binding`` of existing ops of that class.
        classes: class that is no op → the ``ReplacementChoice`` for constructing it.
        functions: functional form → its kernel, and the stand-in for gradients, if it needs one.
        settings: the ``Settings`` that hold, ``None`` until they are read; never modified.
        check_values: the setting of that name, or ``None``.
        platform_agrees: whether settings ask for no other platform than the process has.
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
