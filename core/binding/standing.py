"""The class of an op that other code looks for by the class of the module that it replaces."""

from __future__ import annotations

from typing import Any

from torch import nn

_CACHE = "__opgraft_standing__"


def standing_for(specialisation: Any, module_class: type | None) -> Any:
    """Return the class of an op: a subclass of the specialisation and of the module's class.

    ``isinstance`` is true for both. Methods of the specialisation come first. Without a module's
    class, and for a class that cannot be a base here, the specialisation is returned.
    """
    if module_class is None:
        return specialisation
    cache = vars(specialisation).get(_CACHE)
    if cache is None:
        cache = {}
        setattr(specialisation, _CACHE, cache)
    if module_class not in cache:
        cache[module_class] = _derived(specialisation, module_class)
    return cache[module_class]


def _derived(specialisation: Any, module_class: type) -> Any:
    namespace = {
        "__module__": specialisation.__module__,
        "__qualname__": specialisation.__qualname__,
        "__doc__": specialisation.__doc__,
        # Tables and messages name the op.
        "__repr__": nn.Module.__repr__,
    }
    bases = (specialisation, module_class)
    try:
        return type(specialisation)(specialisation.__name__, bases, namespace)
    # A metaclass or __init_subclass__ of others may raise anything.
    except Exception:
        return specialisation
