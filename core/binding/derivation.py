"""Derive ``forward_<key>`` of a class from the functions in ``functional_<key>``.

The ``forward_native`` of an op is a short method around functional forms::

    @calls_functional
    def forward_native(self, x, *, functional=NATIVE):
        return functional.rms_norm(x, self.weight, self.epsilon)

By default ``functional`` holds the native definitions. ``functional_cuda = FunctionalKernels({
"rms_norm": kernel})`` derives ``forward_cuda``: a copy of the method with another default for
``functional``. A call needs no wrapper, and compilers see one plain function.
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
"""The native definition of every functional form, as attributes by name."""

_PARAMETER = "functional"
_DECLARED = "functional_"
_DERIVED = "__opgraft_derived__"


class FunctionalKernels(Mapping[str, Callable[..., Any]]):
    """Kernels as functions, by the name of the functional form with the same signature.

    Args:
        functions: the kernels by form; or the name of a module with the kernels in ``__all__``, or
            the names of several, imported when the first kernel is used.
        needs: a check for all kernels, as for ``opgraft.needs``.
        inference_only: the kernels have no backward, as with ``opgraft.inference_only``.
        compiled: by form, another function of the same signature for ``opgraft.compile`` to trace.
            Without one, the kernel is one Python op in the graph. The function calls torch ops, and
            decides by dtypes, devices and sizes alone, but never by the size of the batch.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | str | tuple[str, ...],
        *,
        needs: Callable[[], str | None] | None = None,
        inference_only: bool = False,
        compiled: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._functions = functions
        self.needs = needs
        self.inference_only = inference_only
        self.compiled = compiled

    @property
    def imported(self) -> Mapping[str, Callable[..., Any]] | None:
        """The kernels by form; ``None`` until the modules of ``functions`` are imported."""
        return self._functions if isinstance(self._functions, Mapping) else None

    def _loaded(self) -> Mapping[str, Callable[..., Any]]:
        if isinstance(self._functions, Mapping):
            return self._functions
        given = self._functions
        names = (given,) if isinstance(given, str) else given
        try:
            modules = [import_module(name) for name in names]
        except ImportError as error:
            missing = self.needs() if self.needs else None
            why = missing or f"could not be imported: {error}"
            raise MissingKernelError(
                f"the kernels in {', '.join(names)} cannot run here: {why}"
            ) from error
        # Kept: importing is slow, and the names of a module do not change.
        self._functions = {
            name: getattr(module, name) for module in modules for name in module.__all__
        }
        return self._functions

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())


class _Overlay(SimpleNamespace):
    """Kernels by form, and native definitions of all other forms.

    The kernels are looked up at the first use of an attribute.
    """

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__["__kernels__"] = kernels

    def __getattr__(self, name: str) -> Any:
        # Python comes here for missing attributes only: later lookups are plain and fast.
        self.resolve()
        if name not in self.__dict__:
            raise AttributeError(f"no functional form is called {name!r}")
        return self.__dict__[name]

    def resolve(self) -> None:
        self.__dict__.update({**vars(NATIVE), **self.__dict__["__kernels__"]})


def calls_functional(native: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a ``forward_native`` with the keyword argument ``functional``.

    Callers of the op never pass the argument, so the signature hides it: a replacement need not
    take the argument.
    """
    # Registration compares signatures of a replacement and of its target.
    signature = inspect.signature(native)
    shown = [parameter for name, parameter in signature.parameters.items() if name != _PARAMETER]
    vars(native)["__signature__"] = signature.replace(parameters=shown)
    return native


def derive_kernels(cls: type) -> None:
    """Give a class a ``forward_<key>`` for each ``functional_<key>`` in its body.

    A ``forward_<key>`` in the same body stays as it is.

    Raises:
        RegistrationError: ``functional_<key>`` is no mapping, or ``forward_native`` does not take
            ``functional``.
    """
    for key in DISPATCH_KEYS:
        declared = f"{_DECLARED}{key}"
        method = f"forward_{key}"
        if declared not in vars(cls):
            continue
        _expect_mapping(cls, declared)
        if method not in vars(cls):
            setattr(cls, method, _derived(cls, declared))


def _expect_mapping(cls: type, name: str) -> None:
    table = vars(cls)[name]
    if not isinstance(table, Mapping):
        raise RegistrationError(
            f"{cls.__qualname__}.{name} at {location_of(cls)} is of type {type(table).__name__}, "
            "and no form can be looked up in it: write "
            "opgraft.FunctionalKernels({name of the form: its function})"
        )


def is_derived(method: object) -> bool:
    """Return True if ``derive_kernels`` has made the method."""
    return hasattr(method, _DERIVED)


def resolve_functions(method: object) -> None:
    """Look up the functions of a derived method, so that calls find them resolved."""
    overlay = getattr(method, _DERIVED, None)
    if overlay is not None:
        overlay.resolve()


def _derived(cls: type, name: str) -> Any:
    """Make the method for the functions of a class attribute, such as ``functional_cuda``."""
    kernels: Mapping[str, Callable[..., Any]] = vars(cls)[name]
    definition = inspect.getattr_static(cls, "forward_native", None)
    is_static = isinstance(definition, staticmethod)
    native = definition.__func__ if is_static else definition
    if not takes_functional(native):
        raise RegistrationError(
            f"{cls.__qualname__} at {location_of(cls)} declares {name}, but its forward_native "
            f"does not take {_PARAMETER}=..., by which it would call those kernels: define "
            f"forward_{name.removeprefix(_DECLARED)} too"
        )
    overlay = _Overlay(kernels)
    derived: Any = with_functional(native, overlay)
    # Marks need the op, and a static method is not given self.
    if is_static:
        derived = _as_method(derived)
    # The log names a kernel by these.
    derived.__name__ = f"forward_{name.removeprefix(_DECLARED)}"
    derived.__qualname__ = f"{cls.__qualname__}.{derived.__name__}"
    if getattr(kernels, "inference_only", False):
        derived = mark_inference_only(derived)
    check = getattr(kernels, "needs", None)
    if check is not None:
        derived = mark_needs(check)(derived)
    setattr(derived, _DERIVED, overlay)
    return derived


def takes_functional(native: object) -> bool:
    """Return True if a ``forward_native`` calls forms by the argument ``functional``."""
    return _PARAMETER in (getattr(native, "__kwdefaults__", None) or {})


def with_functional(native: Any, functional: object) -> FunctionType:
    """Return a copy of ``native`` with another default for the argument ``functional``.

    Args:
        native: a ``forward_native`` under ``calls_functional``.
        functional: an object with a function per form, as attributes by name.
    """
    # The code object stays the same, so tracebacks and compilers find the source.
    copy = FunctionType(
        native.__code__,
        native.__globals__,
        native.__name__,
        native.__defaults__,
        native.__closure__,
    )
    copy.__kwdefaults__ = {**native.__kwdefaults__, _PARAMETER: functional}
    copy.__dict__.update(native.__dict__)
    copy.__qualname__ = native.__qualname__
    copy.__module__ = native.__module__
    copy.__doc__ = native.__doc__
    copy.__annotations__ = native.__annotations__
    return copy


def _as_method(function: Any) -> Any:
    """Return a method with ``self`` in front of the parameters of a function."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # Without a signature, the method would seem to take any arguments.
    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *signature.parameters.values()]
    vars(method)["__signature__"] = signature.replace(parameters=parameters)
    return method
