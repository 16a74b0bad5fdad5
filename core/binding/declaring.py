"""Declaring replacements of classes, which holds for ops and for other classes alike."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable
from typing import Any

from opgraft.errors import RegistrationError
from opgraft.platform import Platform
from opgraft.plugins.discovery import discover
from opgraft.registry.declarations import Replacement
from opgraft.state import ACTIVATING, PluginStatus, host_state


class Replaceable:
    """A class of which another one may be constructed in its place."""

    @classmethod
    def register_oot(
        cls,
        _decorated_op_cls: type | str | None = None,
        name: str | type | None = None,
        *,
        priority: int = 0,
        when: Callable[[Platform], bool] | None = None,
    ) -> Any:
        """Declare a replacement for a class, as a decorator or by a call.

        All of these are valid: ``@CustomOp.register_oot("RMSNorm")``, ``@CustomOp.register_oot(name="RMSNorm")``,
        ``@CustomOp.register_oot(RMSNorm)``, ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()`` and
        ``CustomOp.register_oot(_decorated_op_cls=C, name="RMSNorm")``.

        Args:
            name: the target: an op name, a class name, ``module:Class`` or the class. A name that is not known yet is
                looked up again when all plugins have been loaded.
            priority: the highest wins among replacements of one target.
            when: called with the platform; the replacement applies only where it returns true.

        Returns:
            The replacement class, or a decorator that returns it.

        Raises:
            RegistrationError: it is no subclass of its target, or accepts fewer calls than the target; an argument is of
                another type than it must be.
            UnknownTargetError: plugins are loaded and nothing answers to ``name``.
        """
        first = _decorated_op_cls
        target: str | type | None = name if name is not None else None if "__op_base__" in vars(cls) else cls
        if isinstance(first, str) or (
            target is None and isinstance(first, type) and first in host_state().registry.targets()
        ):
            target, first = first, None

        def decorate(replacement: type) -> type:
            named = target if target is not None else getattr(replacement, "__name__", "")
            _declare(replacement, named, priority, when)
            return replacement

        return decorate if first is None else decorate(first)

    @classmethod
    def unregister_oot(cls, replacement: type) -> None:
        """Take back every registration of a replacement class; ops that exist keep it until ``rebind``."""
        state = host_state()
        with state.lock:
            registry = state.registry
            registry.replacements = [known for known in registry.replacements if known.cls is not replacement]
            state.drop_superseded()
            state.invalidate()


def _declare(cls: type, target: str | type, priority: int, when: Callable[[Platform], bool] | None) -> None:
    _check_arguments(cls, target, priority, when)
    state, discovery, transaction = host_state(), discover(), ACTIVATING.get()
    with state.lock:
        resolved = state.registry.find_target(target) if isinstance(target, str) else target
        provider = transaction.provider if transaction else discovery.provider_of(cls.__module__)
        new = Replacement(
            cls, _asked_for(target), resolved, provider, priority=priority, when=when, activation=transaction
        )
        # No later pass looks for the target, so that a wrong name must be reported here.
        if resolved is None and state.plugins_loaded and transaction is None:
            state.registry.resolve_pending(new)
        new.plugin = transaction.plugin if transaction else discovery.plugin_of(cls.__module__, provider)
        record = state.plugins.get(new.plugin or "")
        new.platforms = record.platforms if record else new.platforms
        known = state.registry.add_replacement(new)
        state.drop_superseded()
        if transaction is not None:
            transaction.undos.callback(state.activate(known))
        # What a plugin's module declares waits until the plugin is activated.
        elif not discovery.has_plugin(provider) or (record and record.status is PluginStatus.ACTIVATED):
            state.activate(known)


def _check_arguments(cls: object, target: object, priority: object, when: object) -> None:
    """Reject what would fail far from here, when an op is constructed.

    Raises:
        RegistrationError: one of them is of another type than it must be.
    """
    wrong = None
    if not isinstance(cls, type):
        wrong = f"the replacement is {reprlib.repr(cls)}, expected a class"
    elif not isinstance(target, (str, type)):
        wrong = f"the target is {reprlib.repr(target)}, expected a class or its name"
    elif not isinstance(priority, int) or isinstance(priority, bool):
        wrong = f"priority is {reprlib.repr(priority)}, expected an integer"
    elif when is not None and not (callable(when) and _takes_one(when)):
        wrong = f"when is {reprlib.repr(when)}, expected a function of the platform"
    if wrong:
        raise RegistrationError(f"register_oot cannot declare {getattr(cls, '__qualname__', 'it')}: {wrong}")


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function in C, of which nobody knows
        return True
    return True


def _asked_for(target: str | type) -> str:
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
