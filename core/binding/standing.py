"""Ops that are instances of a replaced module's class too, for code that looks for the class."""

from __future__ import annotations

from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.registry.state import host_state
from torch import nn

_CACHE = "__opgraft_standing__"


def standing_for(specialisation: Any, module_class: type | None) -> Any:
    """Return the class of an op: a subclass of the specialisation and of the module's class.

    ``isinstance`` is true for both. Methods of the specialisation come first. Without a module's
    class, and for a class that cannot be a base here, the specialisation is returned.
    """
    if module_class is None:
        return specialisation
    # vars(), as getattr() would find the classes of a base class.
    known = vars(specialisation).get(_CACHE, {}).get(module_class)
    if known is not None:
        return known
    # Made without the lock, as a metaclass of others may run. The class of the first thread stays.
    made = _derived(specialisation, module_class)
    with host_state().lock:
        cache = vars(specialisation).get(_CACHE)
        if cache is None:
            cache = {}
            setattr(specialisation, _CACHE, cache)
        return cache.setdefault(module_class, made)


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
    except Exception as error:
        told = (
            f"isinstance does not find {specialisation.__qualname__} by the class "
            f"{module_class.__module__}.{module_class.__qualname__}: {described(error)}"
        )
        logger.debug("%s", printable(told))
        return specialisation
