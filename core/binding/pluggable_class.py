"""``PluggableClass``, the base of classes that are no modules and that plugins may replace as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from opgraft.binding.declaring import Replaceable
from opgraft.binding.names import check_names, kin_of, op_name_of
from opgraft.config import CURRENT_SCOPE
from opgraft.errors import RegistrationError
from opgraft.plugins.agreement import expect_choice_agrees
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import check_loaded_with, decide_with_plugins
from opgraft.plugins.outcomes import absence_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import ReplacementChoice, choose_replacement
from opgraft.registry.state import host_state

Class = TypeVar("Class", bound=type)


class PluggableClass(Replaceable):
    """A class that an engine constructs, such as a communicator or a weight method, and that plugins may replace.

    Constructing one that an active plugin replaces returns an instance of the replacement, chosen as for an op: by
    platform, priority and ``providers``, under the name that it is registered by. No setting switches it.
    """

    __op_base__ = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(choose_class(cls).cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and unpickle as the same class, whatever replaces it by then."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (object.__new__, (type(self),), *reduced[2:])

    def remark(self, owner: object) -> str:
        """Say what a table of classes is to say of this object; empty where its class says all.

        Args:
            owner: the module of a model that has it as an attribute; ``None`` for a part of the engine.
        """
        return ""

    @classmethod
    def register(cls, name: str) -> Callable[[Class], Class]:
        """Make a class known under ``name``, by which settings and plugins call it; a class decorator.

        Raises:
            RegistrationError: not a ``PluggableClass``, or no name is given.
            ConflictError: another class or an op holds the name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise RegistrationError(
                f"a class is registered by a name such as 'communicator', @PluggableClass.register('name'): {name!r}"
            )

        def decorate(pluggable: Class) -> Class:
            if not (isinstance(pluggable, type) and issubclass(pluggable, PluggableClass)):
                raise RegistrationError(
                    f"{pluggable!r} is registered as {name!r} but is no subclass of opgraft.PluggableClass"
                )
            state, provider = host_state(), discover().provider_of(pluggable.__module__)
            add = partial(state.registry.add_class, name, pluggable, provider)
            state.declare(f"class {name}", provider, add)
            return pluggable

        return decorate


def choose_class(cls: type) -> ReplacementChoice:
    """Choose the class to construct for a ``PluggableClass`` here and now.

    Raises:
        OpgraftError: the platform, a plugin asked for by name, a conflict or a setting prevents a choice.
    """
    return decide_with_plugins(lambda caches: caches.classes, cls, partial(_decide, cls))


def _decide(cls: type) -> ReplacementChoice:
    state = host_state()
    platform = selected_platform().platform
    with state.lock:
        settings, active = state.settings(), list(state.active)
        name = op_name_of(cls, state)
    check_names(settings, state.registry)
    check_loaded_with(settings, state)
    own = discover().provider_of(cls.__module__)
    choice = choose_replacement(
        cls, name, own, active, platform, settings, kin_of(cls, active), absence_of
    )
    record = state.registry.classes.get(name or "")
    # A scope is the word of this process alone.
    if record is not None and record.cls is cls and CURRENT_SCOPE.get() is None:
        expect_choice_agrees(f"class of {name}", choice.chosen)
    return choice
