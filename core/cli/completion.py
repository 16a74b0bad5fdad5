"""Completion of the names of this installation. Nothing here raises or prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from opgraft.base.log import silent
from opgraft.config import FLAG_WORDS, known_fields
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, discover
from opgraft.testing import shapes

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _quietly(names: Callable[[], Iterable[str]]) -> Completion:
    """Make a completion from a function for names. After an error there are no names.

    A shell has no place for an error.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
        try:
            with silent():
                return sorted({name for name in names() if name.startswith(incomplete)})
        # Damaged metadata and broken installations raise errors of any class.
        except Exception:
            return []

    return complete


def _of_group(*groups: str) -> list[str]:
    return [offer.name for offer in discover().offers if offer.group in groups]


def _ops() -> list[str]:
    # Imports torch. No other completion needs torch.
    from opgraft.testing import inventory

    return list(inventory.known_names())


platform_names = _quietly(lambda: _of_group(PLATFORM_GROUP))
plugin_names = _quietly(lambda: _of_group(PLUGIN_GROUP))
offer_names = _quietly(lambda: _of_group(PLATFORM_GROUP, PLUGIN_GROUP))
op_names = _quietly(_ops)
shape_names = _quietly(lambda: [*shapes.shipped(), shapes.ALL])
flag_words = _quietly(lambda: FLAG_WORDS)


def _choices(names: tuple[str, ...]) -> Completion:
    return _quietly(lambda: names)


_OF_NAMES = {
    "platform": platform_names,
    "plugins": plugin_names,
    "plugins_disable": plugin_names,
}


def completion_of(name: str) -> Completion | None:
    """Return the completion of the values of a setting, or ``None``."""
    field = known_fields()[name]
    if field.bounds.choices:
        return _choices(field.bounds.choices)
    if field.kind.metavar == "FLAG":
        return flag_words
    return _OF_NAMES.get(name)
