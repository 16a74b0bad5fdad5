"""``Replaceable``: ``register_oot`` declares replacements of ops and of other classes.

A declaration goes into the registry at once, and takes effect while the plugin of the class is
active, on the platforms of the plugin.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from opgraft.errors import RegistrationError
from opgraft.plugins.discovery import discover
from opgraft.registry.conditions import Condition, When
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import location_of, qualified
from opgraft.registry.state import ACTIVATING, PluginStatus, Transaction, host_state


class Replaceable:
    """A class that plugins may replace: constructing it constructs the replacement."""

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

        All of these are valid: ``@CustomOp.register_oot("RMSNorm")``,
        ``@CustomOp.register_oot(name="RMSNorm")``, ``@CustomOp.register_oot(RMSNorm)``,
        ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()`` and
        ``CustomOp.register_oot(_decorated_op_cls=C, name="RMSNorm")``.

        Args:
            _decorated_op_cls: vLLM's name for the replacement class. In a decorator without
                ``name=``, the target.
            name: the target: an op name, a class name, ``module:Class`` or the class. A name
                without a class yet is looked up again after all plugins have been loaded.
            priority: the highest wins among replacements of one target.
            when: a ``When``, or a function of the platform. The replacement applies only if the
                condition holds. The condition is asked once, when the platform is known.

        Returns:
            The replacement class, or a decorator for the replacement class.

        Raises:
            RegistrationError: the replacement is no subclass of the target, or accepts fewer calls
                than the target.
            UnknownTargetError: in strict mode, if plugins are loaded and nothing has that ``name``.
                Otherwise a warning says so, and this registration is left out.
        """
        target, replacement = _target_and_replacement(cls, _decorated_op_cls, name)

        def register(cls: type) -> type:
            named = target if target is not None else getattr(cls, "__name__", "")
            _check_options(cls, named, priority, when)
            _declare(cls, named, priority, when)
            return cls

        if replacement is not None:
            return register(replacement)
        tell_applied = _until_applied(*_caller())

        def decorate(cls: type) -> type:
            tell_applied()
            return register(cls)

        return decorate

    @classmethod
    def unregister_oot(cls, replacement: type) -> None:
        """Take back every registration of a replacement class.

        Existing ops keep the class until ``rebind``.

        Raises:
            RegistrationError: a plugin or platform, while it is loaded, takes back the
                registration of another provider.
        """
        state = host_state()
        transaction = ACTIVATING.get()
        if transaction is not None:
            _check_owner(replacement, transaction)
        with state.lock:
            registry = state.registry
            registry.replacements = [
                known for known in registry.replacements if known.cls is not replacement
            ]
            state.drop_superseded()
            state.invalidate()


def _target_and_replacement(
    cls: type, first: type | str | None, name: str | type | None
) -> tuple[str | type | None, type | None]:
    """Return the target and the replacement class of a call of ``register_oot``.

    The target is ``None`` if the replacement has its name. The replacement is ``None`` in a
    decorator, which is given the class later.
    """
    target = name
    # On an op class, the op class is the target. On CustomOp itself, the name says the target.
    if target is None and "__op_base__" not in vars(cls):
        target = cls
    # @CustomOp.register_oot("RMSNorm")
    if isinstance(first, str):
        return first, None
    # @CustomOp.register_oot(RMSNorm)
    if target is None and first is not None and _is_target(first):
        return first, None
    return target, first


def _caller() -> tuple[str, str]:
    """Return the module and ``file:line`` of the call of ``register_oot``."""
    frame = sys._getframe(2)
    # PluggableLayer hands the call on to its base.
    if frame.f_code.co_name == "register_oot" and frame.f_back:
        frame = frame.f_back
    # Code that a program executes may have no name.
    module = str(frame.f_globals.get("__name__", ""))
    return module, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _until_applied(module: str, location: str) -> Callable[[], None]:
    """Note a decorator that has no class yet, and return the function that ends the note."""
    state = host_state()
    unapplied = state.registry.unapplied
    note = {location: module}

    def make() -> Callable[[], None]:
        unapplied.update(note)
        return take_back

    def take_back() -> None:
        unapplied.pop(location, None)

    def forget() -> None:
        note.clear()
        take_back()

    # The note goes with a plugin that is left out, and comes back with the plugin.
    state.declare(f"register_oot at {location}", discover().provider_of(module), make)
    return forget


def _is_target(cls: object) -> bool:
    return isinstance(cls, type) and cls in host_state().registry.targets()


def _check_owner(replacement: type, transaction: Transaction) -> None:
    """Refuse a plugin that takes back the registration of another provider."""
    for known in host_state().registry.replacements:
        if known.cls is not replacement:
            continue
        if known.provider != transaction.provider:
            raise RegistrationError(
                f"{transaction.owner} unregisters {qualified(replacement)} at {known.location}, "
                f"which {known.provider} has registered: register one of a higher priority, or "
                "leave the choice to providers"
            )
        # The first registration of the class decides.
        return


def _check_options(cls: object, target: object, priority: object, when: object) -> None:
    """Refuse options of a wrong type in a registration."""
    if not isinstance(cls, type):
        raise RegistrationError(
            f"register_oot got {reprlib.repr(cls)} as a replacement: use a class"
        )
    if not isinstance(target, (str, type)):
        raise RegistrationError(
            f"register_oot got {reprlib.repr(target)} as a target: use a class or its name"
        )
    against = _against_priority(priority) or _against_condition(when)
    # To find a class in its source takes a millisecond, so only the message does.
    if against:
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} is registered with {against}"
        )


def _against_priority(priority: object) -> str:
    if isinstance(priority, int) and not isinstance(priority, bool):
        return ""
    return f"priority={priority!r:.80}: use an integer"


def _against_condition(when: object) -> str:
    fault = ""
    if when is not None and not callable(when) and not isinstance(when, When):
        fault = ": use opgraft.When(...), or a function of the platform"
    elif inspect.iscoroutinefunction(when):
        fault = ", an async function, which nobody awaits: use a plain one"
    elif callable(when) and not _takes_one(when):
        fault = ", which does not take the platform: give it one parameter"
    return f"when={when!r:.80}{fault}" if fault else ""


def _takes_one(function: Callable[..., Any]) -> bool:
    """Return True if a function can be called with one argument, as far as its signature tells."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    # Some functions in C have no signature.
    except ValueError:
        return True
    return True


def _declare(
    cls: type,
    target: str | type,
    priority: int,
    when: Condition | None,
) -> None:
    """Add a replacement to the registry, and activate it if ``_takes_effect``."""
    state = host_state()
    transaction = ACTIVATING.get()
    with state.lock:
        new = _replacement(cls, target, priority, when, transaction)
        # No later pass looks for the target, so that a wrong name must be reported here.
        is_late = new.target is None and state.loading.done and transaction is None
        if is_late:
            is_strict = bool(state.settings().config.strict)
            if not state.resolve_or_leave_out(new, is_strict):
                return
        new.platforms = _platforms_of(new)
        known, former = state.registry.add_replacement(new)
        # A reloaded class takes the place of the former one.
        if former is not None:
            state.deactivate(former)
        # Then _activate_declarations_of_plugin in plugins/loading.py activates the replacement, or
        # _activate_declarations_of_platform in plugins/platform_class.py.
        if not _takes_effect(known, transaction):
            return
        undo = state.activate(known)
        # If the plugin fails later, the end of the transaction deactivates the replacement.
        if transaction is not None:
            transaction.undos.callback(undo)


def _replacement(
    cls: type,
    target: str | type,
    priority: int,
    when: Condition | None,
    transaction: Transaction | None,
) -> Replacement:
    """Describe a registration: the target, the provider, and the plugin that brings the class."""
    discovery = discover()
    resolved = host_state().registry.find_target(target) if isinstance(target, str) else target
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
    loading = transaction.plugin if transaction else None
    new.plugin = loading or own_plugin
    return new


def _platforms_of(replacement: Replacement) -> tuple[str, ...]:
    """Return the names of the platforms that a replacement applies on."""
    discovery = discover()
    record = host_state().plugins.get(replacement.plugin or "")
    if record is not None:
        return record.platforms
    if discovery.has_plugin(replacement.provider):
        return replacement.platforms
    # Without a plugin, replacements apply on the platforms of their distribution alone.
    return tuple(discovery.platforms_of(replacement.provider)) or replacement.platforms


def _takes_effect(replacement: Replacement, transaction: Transaction | None) -> bool:
    """Return True if a replacement is active from now on.

    Otherwise the replacement waits for its plugin, or for the platform of its distribution.
    """
    state = host_state()
    discovery = discover()
    provider = replacement.provider
    # A plugin that loads right now declares the replacement.
    is_plugin_loading = transaction is not None and transaction.plugin is not None
    if is_plugin_loading:
        return True
    # Loaded before or later: the replacement follows its plugin.
    if discovery.has_plugin(provider):
        record = state.plugins.get(replacement.plugin or "")
        return record is not None and record.status is PluginStatus.ACTIVATED
    # A platform that loads right now, or a script without plugins and platforms.
    is_platform_loading = transaction is not None
    if is_platform_loading or not discovery.platforms_of(provider):
        return True
    # A distribution with platforms alone: the replacement follows the selected platform.
    selection = state.selection
    return selection is not None and selection.platform.name in replacement.platforms


def _asked_for(target: str | type) -> str:
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
