"""The classes *in the tree*: those that belong to no declared replacement.

Their ``forward_oot`` runs on out-of-tree platforms only, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable

from opgraft.plugins.discovery import is_built_in
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import own_classes

_METHOD = "forward_oot"


def idle_oot_classes(
    cls: type, platform: str, replacements: Iterable[Replacement]
) -> frozenset[type]:
    """Return the classes in the tree with a ``forward_oot`` for an op on a built-in platform.

    A replacement, a class derived from one, and a mixin that a replacement brings are out of the
    tree. An out-of-tree platform runs ``forward_oot`` of every class, so the result is empty.
    """
    own = own_classes(cls)
    idle = {base for base in own if _METHOD in vars(base)}
    if not idle or not is_built_in(platform):
        return frozenset()
    for replacement in replacements:
        if replacement.cls in own:
            idle -= _brought_by(replacement, own)
    return frozenset(idle)


def _brought_by(replacement: Replacement, own: list[type]) -> set[type]:
    """Return the classes of an MRO down to a replacement, and the mixins of the replacement."""
    if replacement.target is None:
        return set()
    below = own.index(replacement.cls) + 1
    mixins = set(replacement.cls.__mro__) - set(replacement.target.__mro__)
    return {*own[:below], *mixins}
