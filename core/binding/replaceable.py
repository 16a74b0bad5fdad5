"""Free functions that plugins may replace by name, which are ops like any other."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import bind
from opgraft.compat.tracing import constant_while_tracing
from opgraft.errors import RegistrationError, UnknownTargetError, close_matches
from opgraft.registry.conditions import Condition
from opgraft.registry.op_classes import location_of, qualified
from opgraft.state import host_state
from torch.compiler import is_dynamo_compiling

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ReplaceableFunction(Generic[Arguments, Result]):
    """The reference through which a replaceable function is called; it stays the same, whatever replaces the function.

    Attributes:
        op_class: the op that it is, by which settings, plugins and decisions know it.
    """

    traced: Callable[Arguments, Result]
    DEFINED_BY = ("op_class",)
    """The attributes that say what it computes. A plugin that assigns to one while it is loaded is reported."""

    def __init__(self, function: Callable[Arguments, Result], name: str) -> None:
        functools.update_wrapper(self, function)
        self.op_class = _op_of(CustomOp, "forward_native", function)
        self.op_class.reference = self
        CustomOp.register(name)(self.op_class)

        @constant_while_tracing
        def bind_while_traced() -> None:
            self.traced = self._function()

        self.bind_while_traced = bind_while_traced

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if is_dynamo_compiling():
            self.bind_while_traced()
            function = self.traced
        else:
            function = self._function()
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<replaceable function {qualified(self)}>"

    def __reduce__(self) -> str:
        """Pickle it as functions are, by module and name; it is its own copy."""
        name: str = vars(self)["__qualname__"]
        return name

    def _function(self) -> Callable[Arguments, Result]:
        """Return what it runs here and now, from the cache of decisions."""
        caches = host_state().current_caches()
        known: Any = caches.replaceable.get(self)
        if known is None:
            generation = host_state().generation
            forward = vars(bind(self.op_class).specialisation)["forward"]
            # With a test of arguments it is a method, of no instance here.
            known = (
                forward.__func__
                if isinstance(forward, staticmethod)
                else functools.partial(forward, None)
            )
            state = host_state()
            with state.lock:
                if state.generation == generation:
                    state.current_caches().replaceable[self] = known
        function: Callable[Arguments, Result] = known
        return function


def replaceable(
    function: Callable[Arguments, Result], name: str | None = None
) -> ReplaceableFunction[Arguments, Result]:
    """Make a typed function one that plugins may replace; a decorator. Whoever has imported it sees the replacement.

    It is an op under ``name``, by default the function's own, to ``custom_ops``, ``providers`` and ``ops explain``.

    Raises:
        RegistrationError: not a function, or one whose parameters or result have no annotation.
        ConflictError: another op holds the name.
    """
    if not isinstance(function, FunctionType):
        raise RegistrationError(f"opgraft.replaceable decorates a function, not {function!r:.80}")
    signature = inspect.signature(function)
    untyped = [
        each.name
        for each in signature.parameters.values()
        if each.annotation is inspect.Parameter.empty
    ]
    if untyped or signature.return_annotation is inspect.Signature.empty:
        what = f"its parameter {untyped[0]!r}" if untyped else "its result"
        raise RegistrationError(
            f"{qualified(function)} at {location_of(function)} is replaceable and {what} has no annotation: "
            "replacements are written against its signature"
        )
    return ReplaceableFunction(function, name or function.__name__)


def replaces(
    target: str | ReplaceableFunction[..., Any],
    *,
    priority: int = 0,
    when: Condition | None = None,
    supports: Callable[..., Any] | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Declare a function to run in the place of a replaceable one; a decorator, which returns the function.

    Args:
        target: the replaceable function, its op name, or ``module:function``, which is then imported.
        priority, when, supports: as ``CustomOp.register_oot`` takes them.

    Raises:
        RegistrationError: it does not take every call that the replaceable function takes.
        UnknownTargetError: nothing replaceable has that name.
    """
    reference = target if isinstance(target, ReplaceableFunction) else _find(target)

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        replacement = _op_of(reference.op_class, "forward_oot", function)
        reference.op_class.register_oot(
            replacement, priority=priority, when=when, supports=supports
        )
        return function

    return decorate


def _op_of(base: type, method: str, function: Any) -> Any:
    """Make the op class whose kernel a function is; places of the class are those of the function."""
    namespace = {
        name: getattr(function, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    namespace |= {method: staticmethod(function), "__wrapped__": function}
    return type(base)(function.__name__, (base,), namespace)


def _find(name: str) -> ReplaceableFunction[..., Any]:
    registry = host_state().registry
    found: Any = (
        getattr(registry.ops[name].cls, "reference", None) if name in registry.ops else None
    )
    module, colon, attribute = name.partition(":")
    if colon:
        found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, ReplaceableFunction):
        known = [each for each, record in registry.ops.items() if hasattr(record.cls, "reference")]
        raise UnknownTargetError(
            f"nothing replaceable is called {name!r:.80}: {close_matches(name, known)} Name it by op name or "
            "'module:function', and decorate it with @opgraft.replaceable"
        )
    return found
