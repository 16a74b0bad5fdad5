"""Derive a class's ``forward_<key>`` from the functional forms that it declares as ``functional_<key>``.

An op's ``forward_native`` says how the op calls its functional forms. Decorated by ``calls_functional``, it takes a
keyword argument ``functional``, of which ``functional.rms_norm`` is that form. Its default holds the native
definitions. A kernel is the same method with another default, so that it costs no call in between, and compilers see
one plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

from opgraft.binding.marks import inference_only as mark_inference_only
from opgraft.binding.marks import needs as mark_needs
from opgraft.errors import MissingKernelError, RegistrationError
from opgraft.platform import DISPATCH_KEYS
from opgraft.registry.op_classes import location_of

Result = TypeVar("Result")

NATIVE = SimpleNamespace()
"""Every functional form's native definition, by its name."""

_PARAMETER = "functional"
_DECLARED = "functional_"
_DERIVED = "__opgraft_derived__"


class FunctionalKernels(Mapping[str, Callable[..., Any]]):
    """Kernels as functions, by the name of the functional form whose signature they have.

    Args:
        functions: the kernels, or the name of a module whose ``__all__`` names them, imported when one is asked for.
        needs: as ``opgraft.needs`` takes it, for all of them.
        inference_only: whether they have no backward, as ``opgraft.inference_only`` says of a method.
        compiled: of some forms a function of the same signature, for ``opgraft.compile`` to trace in the place of the
            kernel, which would else be one op in Python. It calls torch ops, and decides by what a compiler knows:
            dtypes, devices, and sizes other than that of the batch.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | str,
        *,
        needs: Callable[[], str | None] | None = None,
        inference_only: bool = False,
        compiled: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._functions = functions
        self.needs = needs
        self.inference_only = inference_only
        self.compiled = compiled

    def _loaded(self) -> Mapping[str, Callable[..., Any]]:
        if isinstance(self._functions, str):
            try:
                module = import_module(self._functions)
            except ImportError as error:
                why = (self.needs() if self.needs else None) or f"could not be imported: {error}"
                raise MissingKernelError(
                    f"the kernels in {self._functions} cannot run here: {why}"
                ) from error
            self._functions = {name: getattr(module, name) for name in module.__all__}
        return self._functions

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())


class _Overlay(SimpleNamespace):
    """Kernels by name, and native definitions where there is none; read when it is first asked."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__["__kernels__"] = kernels

    def __getattr__(self, name: str) -> Any:
        # Reached for what is missing only: once resolved, a lookup costs what it does in a plain namespace.
        self.resolve()
        if name not in self.__dict__:
            raise AttributeError(f"no functional form is called {name!r}")
        return self.__dict__[name]

    def resolve(self) -> None:
        self.__dict__.update({**vars(NATIVE), **self.__dict__["__kernels__"]})


def calls_functional(native: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a ``forward_native`` that takes ``functional``, which is no part of how the op is called.

    Neither its signature nor its type shows the argument, so that a replacement need not take it.
    """
    signature = inspect.signature(native)
    shown = [parameter for name, parameter in signature.parameters.items() if name != _PARAMETER]
    vars(native)["__signature__"] = signature.replace(parameters=shown)
    return native


def derive_kernels(cls: type) -> None:
    """Give a class a ``forward_<key>`` for each ``functional_<key>`` that it declares, unless it defines one itself.

    Raises:
        RegistrationError: its ``forward_native`` does not take ``functional``, so that nothing can be derived from it.
    """
    for key in DISPATCH_KEYS:
        if f"{_DECLARED}{key}" in vars(cls) and f"forward_{key}" not in vars(cls):
            setattr(cls, f"forward_{key}", _derived(cls, f"{_DECLARED}{key}"))


def is_derived(method: object) -> bool:
    """Return whether a method was derived from the functional forms that its class declares."""
    return hasattr(method, _DERIVED)


def prepare(method: object) -> None:
    """Look the kernels of a derived method up, so that no call of it has to."""
    overlay = getattr(method, _DERIVED, None)
    if overlay is not None:
        overlay.resolve()


def _derived(cls: type, name: str) -> Any:
    kernels: Mapping[str, Callable[..., Any]] = vars(cls)[name]
    raw = inspect.getattr_static(cls, "forward_native", None)
    native = raw.__func__ if isinstance(raw, staticmethod) else raw
    if not takes_functional(native):
        raise RegistrationError(
            f"{cls.__qualname__} at {location_of(cls)} declares {name}, but its forward_native does not take "
            f"{_PARAMETER}=..., by which it would call those kernels: define forward_{name.removeprefix(_DECLARED)} too"
        )
    overlay = _Overlay(kernels)
    derived: Any = with_functional(native, overlay)
    # The copy is no static method any more: it is given self, by which marks know the op.
    if isinstance(raw, staticmethod):
        derived = _as_method(derived)
    if getattr(kernels, "inference_only", False):
        derived = mark_inference_only(derived)
    check = getattr(kernels, "needs", None)
    if check is not None:
        derived = mark_needs(check)(derived)
    setattr(derived, _DERIVED, overlay)
    return derived


def takes_functional(native: object) -> bool:
    """Tell whether a ``forward_native`` takes ``functional``, by which it calls forms."""
    return _PARAMETER in (getattr(native, "__kwdefaults__", None) or {})


def with_functional(native: Any, functional: object) -> FunctionType:
    """Return a copy of ``native`` that calls the forms which ``functional`` has as attributes."""
    copy = FunctionType(
        native.__code__,
        native.__globals__,
        native.__name__,
        native.__defaults__,
        native.__closure__,
    )
    copy.__kwdefaults__ = {**native.__kwdefaults__, _PARAMETER: functional}
    copy.__dict__.update(native.__dict__)
    copy.__qualname__, copy.__module__, copy.__doc__ = (
        native.__qualname__,
        native.__module__,
        native.__doc__,
    )
    copy.__annotations__ = native.__annotations__
    return copy


def _as_method(function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(method)["__signature__"] = signature.replace(
        parameters=[own, *signature.parameters.values()]
    )
    return method
