"""``PluggableClass``, the base of replaceable classes outside of models, such as a sampler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from opgraft.binding.declaring import Replaceable
from opgraft.binding.names import check_names, op_name_of, other_replacements_of_op
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
    """A replaceable class of an engine, such as a communicator or a weight method.

    If an active plugin replaces the class, construction returns an instance of the replacement. The
    choice is made as for ops: by platform, priority and ``providers``, under the registered name.
    No setting disables a replacement.
    """

    __op_base__ = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A replacement is a subclass, so Python calls the constructor of the replacement next.
        return object.__new__(choose_class(cls).cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and unpickle as the same class: no replacement is chosen again."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (object.__new__, (type(self),), *reduced[2:])

    def remark(self, owner: object) -> str:
        """Return a remark on this object for tables of classes; empty if the class says all.

        Args:
            owner: the module of a model with the object as an attribute; ``None`` for a part of the
                engine.
        """
        return ""

    @classmethod
    def register(cls, name: str) -> Callable[[Class], Class]:
        """Return a class decorator that registers a class under ``name``.

        Settings and plugins call the class by the name: ``providers={"sampler": "acme"}``.

        Raises:
            RegistrationError: not a ``PluggableClass``, or no name is given.
            ConflictError: another class or an op holds the name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise RegistrationError(
                "a class is registered by a name such as 'communicator', "
                f"@PluggableClass.register('name'): {name!r}"
            )

        def decorate(pluggable: Class) -> Class:
            if not (isinstance(pluggable, type) and issubclass(pluggable, PluggableClass)):
                raise RegistrationError(
                    f"{pluggable!r} is registered as {name!r} but is no subclass of "
                    "opgraft.PluggableClass"
                )
            state = host_state()
            provider = discover().provider_of(pluggable.__module__)
            add = partial(state.registry.add_class, name, pluggable, provider)
            state.declare(f"class {name}", provider, add)
            return pluggable

        return decorate


def choose_class(cls: type) -> ReplacementChoice:
    """Choose the class to construct for a ``PluggableClass`` here and now.

    Raises:
        OpgraftError: the platform, a plugin asked for by name, a conflict or a setting prevents a
            choice.
    """
    return decide_with_plugins(lambda caches: caches.classes, cls, partial(_decide_class, cls))


def _decide_class(cls: type) -> ReplacementChoice:
    state = host_state()
    platform = selected_platform().platform
    with state.lock:
        settings = state.settings()
        active = list(state.active)
        name = op_name_of(cls, state)
    check_names(settings, state.registry)
    check_loaded_with(settings, state)
    choice = choose_replacement(
        cls,
        op_name=name,
        own=discover().provider_of(cls.__module__),
        active=active,
        platform=platform,
        settings=settings,
        other_replacements=other_replacements_of_op(cls, active),
        absence_of=absence_of,
    )
    # The parent process does not know the scopes of this one.
    if CURRENT_SCOPE.get() is not None:
        return choice
    record = state.registry.classes.get(name or "")
    if record is not None and record.cls is cls:
        expect_choice_agrees(f"class of {name}", choice.chosen)
    return choice
