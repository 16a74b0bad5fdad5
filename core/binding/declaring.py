"""Declaring replacements of classes, which holds for ops and for other classes alike."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable
from typing import Any

from opgraft.errors import RegistrationError
from opgraft.plugins.discovery import discover
from opgraft.registry.conditions import Condition, When
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import location_of, qualified
from opgraft.registry.state import ACTIVATING, PluginStatus, Transaction, host_state


class Replaceable:
    """A class of which another one may be constructed in its place."""

    @classmethod
    def register_oot(
        cls,
        _decorated_op_cls: type | str | None = None,
        name: str | type | None = None,
        *,
        priority: int = 0,
        when: Condition | None = None,
    ) -> Any:
        """Declare a replacement for a class, as a decorator or by a call.

        All of these are valid: ``@CustomOp.register_oot("RMSNorm")``, ``@CustomOp.register_oot(name="RMSNorm")``,
        ``@CustomOp.register_oot(RMSNorm)``, ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()`` and
        ``CustomOp.register_oot(_decorated_op_cls=C, name="RMSNorm")``.

        Args:
            name: the target: an op name, a class name, ``module:Class`` or the class. A name that is not known yet is
                looked up again when all plugins have been loaded.
            priority: the highest wins among replacements of one target.
            when: a ``When``, or a function of the platform; the replacement applies only where it holds. It is asked
                once, when the platform is known.

        Returns:
            The replacement class, or a decorator that returns it.

        Raises:
            RegistrationError: it is no subclass of its target, or accepts fewer calls than the target.
            UnknownTargetError: in strict mode, if plugins are loaded and nothing has that ``name``. Otherwise a warning
                says so and this registration is left out.
        """
        first = _decorated_op_cls
        target: str | type | None = (
            name if name is not None else None if "__op_base__" in vars(cls) else cls
        )
        if isinstance(first, str) or (
            target is None and isinstance(first, type) and first in host_state().registry.targets()
        ):
            target, first = first, None

        def decorate(replacement: type) -> type:
            named = target if target is not None else getattr(replacement, "__name__", "")
            _check_options(replacement, named, priority, when)
            _declare(replacement, named, priority, when)
            return replacement

        return decorate if first is None else decorate(first)

    @classmethod
    def unregister_oot(cls, replacement: type) -> None:
        """Take back every registration of a replacement class; ops that exist keep it until ``rebind``.

        Raises:
            RegistrationError: a plugin or a platform, while it is loaded, takes back what another one has registered.
        """
        state, transaction = host_state(), ACTIVATING.get()
        whose = next(
            (known for known in state.registry.replacements if known.cls is replacement), None
        )
        if transaction is not None and whose is not None and whose.provider != transaction.provider:
            raise RegistrationError(
                f"{transaction.owner} unregisters {qualified(replacement)} at {whose.location}, which "
                f"{whose.provider} has registered: register one of a higher priority, or leave the choice to providers"
            )
        with state.lock:
            registry = state.registry
            registry.replacements = [
                known for known in registry.replacements if known.cls is not replacement
            ]
            state.drop_superseded()
            state.invalidate()


def _check_options(cls: object, target: object, priority: object, when: object) -> None:
    """Reject options of a registration that are of another type than they must be."""
    if not isinstance(cls, type):
        raise RegistrationError(
            f"register_oot got {reprlib.repr(cls)} as a replacement: use a class"
        )
    if not isinstance(target, (str, type)):
        raise RegistrationError(
            f"register_oot got {reprlib.repr(target)} as a target: use a class or its name"
        )
    against = ""
    if not isinstance(priority, int) or isinstance(priority, bool):
        against = f"priority={priority!r:.80}: use an integer"
    elif when is not None and not callable(when) and not isinstance(when, When):
        against = f"when={when!r:.80}: use opgraft.When(...), or a function of the platform"
    elif inspect.iscoroutinefunction(when):
        against = f"when={when!r:.80}, an async function, which nobody awaits: use a plain one"
    elif callable(when) and not _takes_one(when):
        against = f"when={when!r:.80}, which does not take the platform: give it one parameter"
    if against:  # only then is the class looked up in its source, which takes a millisecond
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} is registered with {against}"
        )


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function in C, of which nobody knows
        return True
    return True


def _declare(
    cls: type,
    target: str | type,
    priority: int,
    when: Condition | None,
) -> None:
    state, discovery, transaction = host_state(), discover(), ACTIVATING.get()
    with state.lock:
        resolved = state.registry.find_target(target) if isinstance(target, str) else target
        provider = transaction.provider if transaction else discovery.provider_of(cls.__module__)
        new = Replacement(
            cls,
            _asked_for(target),
            resolved,
            provider,
            priority=priority,
            when=when,
            activation=transaction,
        )
        own_plugin = discovery.plugin_of(cls.__module__, provider)
        new.plugin = (transaction.plugin if transaction else None) or own_plugin
        # No later pass looks for the target, so that a wrong name must be reported here.
        late = resolved is None and state.loading.done and transaction is None
        strict = bool(state.settings().config.strict) if late else False
        if late and not state.resolve_or_leave_out(new, strict):
            return
        record = state.plugins.get(new.plugin or "")
        if record is not None:
            new.platforms = record.platforms
        elif not discovery.has_plugin(provider):
            # Without a plugin, replacements apply on the platforms of their distribution alone.
            new.platforms = tuple(discovery.platforms_of(provider)) or new.platforms
        known, former = state.registry.add_replacement(new)
        if former is not None:
            state.deactivate(former)
        if not _takes_effect(known, transaction):
            return
        undo = state.activate(known)
        if transaction is not None:
            transaction.undos.callback(undo)


def _takes_effect(replacement: Replacement, transaction: Transaction | None) -> bool:
    """Tell whether a replacement is active from now on, or waits for the plugin or the platform of its distribution."""
    state, discovery, provider = host_state(), discover(), replacement.provider
    if transaction is not None and transaction.plugin is not None:
        return True
    if discovery.has_plugin(provider):
        record = state.plugins.get(replacement.plugin or "")
        return record is not None and record.status is PluginStatus.ACTIVATED
    if transaction is not None or not discovery.platforms_of(provider):
        return True
    return state.selection is not None and state.selection.platform.name in replacement.platforms


def _asked_for(target: str | type) -> str:
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
