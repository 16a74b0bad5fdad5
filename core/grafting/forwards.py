"""The forward of one instance, with other objects under some names of the file.

A forward finds functions in the namespace of its file. An exchange in that namespace would change
every model of the process. Instead the instance gets a class of its own, derived from the former
class. The ``forward`` of the new class has the same code and a namespace of its own. In that
namespace some names lead to ops, which are children of the instance. All other names keep the
objects that the file had when the model was grafted.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from opgraft.errors import GraftError
from opgraft.grafting.side_effects import written_global
from opgraft.registry.adapter import LeaveAlone
from torch import nn

_FORWARD = "_opgraft_forward"
_WRAPPED = "__wrapped__"
_EMPTY = CellType()


@dataclass(frozen=True)
class Substitution:
    """One name of a file with another object in the forward of one instance.

    Attributes:
        name: the name.
        child: the name of the op among the children of the instance.
        substitute: receives the op and the object of the file, and returns the object for the
            forward. A function of a module, so that models can be pickled.
        permanent: the model was constructed with the substitution, and ``ungraft`` keeps it.
    """

    name: str
    child: str
    substitute: Callable[[nn.Module, Any], Any]
    permanent: bool = False


def plain_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, before any substitution, without decorators."""
    return inspect.unwrap(_decorated_forward(module))


def _decorated_forward(module: nn.Module) -> Any:
    return inspect.getattr_static(_original_class(module), "forward")


def reads_global(forward: FunctionType, name: str) -> bool:
    """Return True if the code of a forward reads ``name`` from its file, where the name exists."""
    instructions = dis.get_instructions(forward.__code__)
    read = (each.argval for each in instructions if each.opname == "LOAD_GLOBAL")
    # A built-in function has no entry in the namespace of the file.
    return name in forward.__globals__ and name in read


def check_forward(module: nn.Module) -> str:
    """Return the reason why the forward of an instance cannot get a namespace of its own, or ""."""
    if "forward" in vars(module):
        return "its forward was set on the instance"
    if not _can_be_made_anew(_decorated_forward(module)):
        return "its forward is decorated in a way that cannot be followed"
    written = written_global(plain_forward(module))
    return f"its forward writes to {written}" if written else ""


def expect_plain_forward(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` if the forward of an instance cannot get a namespace of its own."""
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)


def substitutions_of(module: nn.Module) -> tuple[Substitution, ...]:
    """Return the substitutions in the forward of a module."""
    return module.opgraft_substitutions if isinstance(module, _Substitution) else ()


def permanent_substitutions(module: nn.Module) -> tuple[Substitution, ...]:
    """Return the substitutions from the construction of the model."""
    return tuple(each for each in substitutions_of(module) if each.permanent)


def substitute(module: nn.Module, op: nn.Module, substitution: Substitution) -> None:
    """Make ``op`` a child of ``module``, and let the forward find the op."""
    # The op is new, so the mode of the module has never reached the op.
    op.train(module.training)
    present = substitutions_of(module)
    original = _original_class(module)
    module._modules[substitution.child] = op
    module.__class__ = _derived(original, (*present, substitution))
    _bind_forward(module)


def check_restorable(module: nn.Module) -> None:
    """Raise ``GraftError`` if other code has derived a class from the class of a substitution."""
    grafted = substitutions_of(module) != permanent_substitutions(module)
    if grafted and type(module) is not _derived_class(module):
        raise GraftError(
            f"{type(module).__name__} was derived by other code, such as fully_shard, from the "
            "class that grafting gave the instance: take that back first, or ungraft before it"
        )


def restore_forward(module: nn.Module, keep: tuple[Substitution, ...] = ()) -> None:
    """Take back every substitution except those to ``keep``, and with the last one the class."""
    if not isinstance(module, _Substitution) or module.opgraft_substitutions == keep:
        return
    for substitution in set(module.opgraft_substitutions) - set(keep):
        del module._modules[substitution.child]
    original = _original_class(module)
    module.__class__ = _derived(original, keep) if keep else original
    del module.__dict__[_FORWARD]
    if keep:
        _bind_forward(module)


class _Substitution:
    """Marks the derived classes.

    Each derived class has the common methods itself, so that they come before those of the model.
    """

    opgraft_substitutions: tuple[Substitution, ...]


def _derived_class(module: nn.Module) -> Any:
    """Return the class from a substitution, or ``None``.

    Other code may have derived a further class.
    """
    return next((cls for cls in type(module).__mro__ if "opgraft_substitutions" in vars(cls)), None)


def _original_class(module: nn.Module) -> Any:
    """Return the class of a module before any substitution."""
    derived = _derived_class(module)
    return type(module) if derived is None else derived.__mro__[1]


def _derived(cls: Any, substitutions: tuple[Substitution, ...]) -> Any:
    """Return a class with the looks of ``cls`` and a forward for each instance.

    All instances with the same substitutions share one class, as long as an instance lives.
    """
    for each in type.__subclasses__(cls):
        if vars(each).get("opgraft_substitutions") == substitutions:
            return each
    return _derive(cls, substitutions)


def _derive(cls: Any, substitutions: tuple[Substitution, ...]) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._opgraft_forward(self, *args, **kwargs)

    namespace = {
        "forward": forward,
        "opgraft_substitutions": substitutions,
        "__reduce_ex__": _reduce,
        "__setstate__": _set_state,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls, _Substitution), namespace)


def _reduce(self: Any, protocol: Any) -> Any:
    """Reduce an instance to the class of the model, as a reader finds classes by name.

    The forward is left out: the reader makes a forward of its own.
    """
    reduced = super(_derived_class(self), self).__reduce_ex__(protocol)
    state = {name: value for name, value in reduced[2].items() if name != _FORWARD}
    arguments = (_original_class(self), self.opgraft_substitutions)
    return (_recreate, arguments, state, *reduced[3:])


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(type(self), self).__setstate__(state)
    _bind_forward(self)


def _recreate(cls: Any, substitutions: tuple[Substitution, ...]) -> Any:
    derived = _derived(cls, substitutions)
    return derived.__new__(derived)


def _bind_forward(module: Any) -> None:
    """Give an instance the forward of the class, with another namespace."""
    forward = plain_forward(module)
    namespace = forward.__globals__
    # A copy of the whole namespace would keep every object of the file alive.
    names = {*_names(forward.__code__), "__builtins__"}
    own: dict[str, Any] = {key: value for key, value in namespace.items() if key in names}
    for row in module.opgraft_substitutions:
        op = module._modules[row.child]
        own[row.name] = row.substitute(op, namespace[row.name])
    module.__dict__[_FORWARD] = _made_anew(_decorated_forward(module), own)


def _can_be_made_anew(forward: Any) -> bool:
    """Return True if each decorator is a function around the decorated function."""
    while isinstance(forward, FunctionType):
        if _WRAPPED not in vars(forward):
            return True
        inner = vars(forward)[_WRAPPED]
        if sum(each is inner for each in _enclosed(forward)) != 1:
            return False
        forward = inner
    return False


def _made_anew(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    """Copy a function into a namespace; of a decorator, copy the decorated function there."""
    inner = vars(function).get(_WRAPPED)
    closure = function.__closure__
    if inner is not None:
        copied = CellType(_made_anew(inner, namespace))
        # The decorator keeps the namespace of its own file.
        namespace = function.__globals__
        cells = zip(closure or (), _enclosed(function), strict=True)
        closure = tuple(copied if content is inner else cell for cell, content in cells)

    made = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, closure
    )
    # The constructor of functions has no argument for these defaults.
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _enclosed(function: FunctionType) -> list[Any]:
    """Return the objects from functions around a function; ``None`` if not set yet."""
    cells = function.__closure__ or ()
    return [None if cell == _EMPTY else cell.cell_contents for cell in cells]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
