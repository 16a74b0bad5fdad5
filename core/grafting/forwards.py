"""The forward of one instance, with other objects under some of the names that its file defines.

A forward finds functions in the namespace of its file. Exchanging one there would change every model of the process.
Instead the instance gets a class of its own, derived from the former one, whose ``forward`` is the same code in a
namespace in which those names lead to ops, which are children of the instance. The rest of that namespace is what the
file held when the model was grafted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from opgraft.errors import GraftError
from opgraft.grafting.side_effects import written_global
from torch import nn

_FORWARD = "_opgraft_forward"
_WRAPPED = "__wrapped__"
_EMPTY = CellType()


@dataclass(frozen=True)
class Substitution:
    """One name of a file that means something else in the forward of one instance.

    Attributes:
        name: the name.
        child: what the op is called among the children of the instance.
        substitute: makes of that op, and of what the file has under the name, what the forward finds. A function of a
            module, so that it can be pickled.
        permanent: the model is made with it, and ``ungraft`` leaves it.
    """

    name: str
    child: str
    substitute: Callable[[nn.Module, Any], Any]
    permanent: bool = False


def plain_forward(module: nn.Module) -> Any:
    """Return the forward that the class of a module defines, before any substitution, without its decorators."""
    return inspect.unwrap(_decorated_forward(module))


def _decorated_forward(module: nn.Module) -> Any:
    return inspect.getattr_static(_original_class(module), "forward")


def check_forward(module: nn.Module) -> str:
    """Say why the forward of an instance cannot get a namespace of its own, "" if it can."""
    if "forward" in vars(module):
        return "its forward was set on the instance"
    if not _can_be_made_anew(_decorated_forward(module)):
        return "its forward is decorated in a way that cannot be followed"
    written = written_global(plain_forward(module))
    return f"its forward writes to {written}" if written else ""


def substitutions_of(module: nn.Module) -> tuple[Substitution, ...]:
    """Return what the forward of a module finds otherwise than its file says."""
    return module.opgraft_substitutions if isinstance(module, _Substituted) else ()


def permanent_substitutions(module: nn.Module) -> tuple[Substitution, ...]:
    """Return those of them that the model is made with."""
    return tuple(each for each in substitutions_of(module) if each.permanent)


def substitute(module: nn.Module, op: nn.Module, substitution: Substitution) -> None:
    """Make ``op`` a child of ``module`` whose forward finds it, as ``substitution`` says."""
    op.train(module.training)
    present = substitutions_of(module)
    original = _original_class(module)
    module._modules[substitution.child] = op
    module.__class__ = _derived(original, (*present, substitution))
    _bind_forward(module)


def check_restorable(module: nn.Module) -> None:
    """Raise ``GraftError`` if other code has derived a class from the one that grafting gave the instance."""
    grafted = substitutions_of(module) != permanent_substitutions(module)
    if grafted and type(module) is not _derived_class(module):
        raise GraftError(
            f"{type(module).__name__} was derived by other code, such as fully_shard, from the class that grafting "
            "gave the instance: take that back first, or ungraft before it"
        )


def restore_forward(module: nn.Module, keep: tuple[Substitution, ...] = ()) -> None:
    """Take every substitution but those to ``keep`` back, and with the last one the class."""
    if not isinstance(module, _Substituted) or module.opgraft_substitutions == keep:
        return
    for substitution in set(module.opgraft_substitutions) - set(keep):
        del module._modules[substitution.child]
    original = _original_class(module)
    module.__class__ = _derived(original, keep) if keep else original
    del module.__dict__[_FORWARD]
    if keep:
        _bind_forward(module)


class _Substituted:
    """Marks the derived classes; what they have in common is set on each, before the methods of the model's class."""

    opgraft_substitutions: tuple[Substitution, ...]


def _derived_class(module: nn.Module) -> Any:
    """Find the class that a substitution gave a module, from which other code may have derived its own."""
    return next((cls for cls in type(module).__mro__ if "opgraft_substitutions" in vars(cls)), None)


def _original_class(module: nn.Module) -> Any:
    """Find the class that a module had before any substitution."""
    derived = _derived_class(module)
    return type(module) if derived is None else derived.__mro__[1]


def _derived(cls: Any, substitutions: tuple[Substitution, ...]) -> Any:
    """Return a class that is ``cls`` by all appearances, whose forward is the one that each instance carries.

    There is one for all instances, for as long as there are some.
    """
    present = (
        each
        for each in type.__subclasses__(cls)
        if vars(each).get("opgraft_substitutions") == substitutions
    )
    return next(present, None) or _derive(cls, substitutions)


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
    return type(cls)(cls.__name__, (cls, _Substituted), namespace)


def _reduce(self: Any, protocol: Any) -> Any:
    """Reduce copies and pickles to the class that can be found by its name, and to no function of ours."""
    reduced = super(_derived_class(self), self).__reduce_ex__(protocol)
    state = {name: value for name, value in reduced[2].items() if name != _FORWARD}
    return (_recreate, (_original_class(self), self.opgraft_substitutions), state, *reduced[3:])


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(type(self), self).__setstate__(state)
    _bind_forward(self)


def _recreate(cls: Any, substitutions: tuple[Substitution, ...]) -> Any:
    derived = _derived(cls, substitutions)
    return derived.__new__(derived)


def _bind_forward(module: Any) -> None:
    """Give an instance its forward: the code of its class, with a namespace of its own, in the same decorators."""
    forward = plain_forward(module)
    wanted, namespace = set(_names(forward.__code__)), forward.__globals__
    own: dict[str, Any] = {
        key: value for key, value in namespace.items() if key in wanted or key == "__builtins__"
    }
    for row in module.opgraft_substitutions:
        own[row.name] = row.substitute(module._modules[row.child], namespace[row.name])
    module.__dict__[_FORWARD] = _made_anew(_decorated_forward(module), own)


def _can_be_made_anew(forward: Any) -> bool:
    """Tell whether each decorator of a forward is a function around what it decorates."""
    while isinstance(forward, FunctionType):
        if _WRAPPED not in vars(forward):
            return True
        inner = vars(forward)[_WRAPPED]
        if sum(each is inner for each in _enclosed(forward)) != 1:
            return False
        forward = inner
    return False


def _made_anew(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    """Copy a function, or what it decorates, into a namespace."""
    inner, closure = vars(function).get(_WRAPPED), function.__closure__
    if inner is not None:
        copied, namespace = CellType(_made_anew(inner, namespace)), function.__globals__
        cells = zip(closure or (), _enclosed(function), strict=True)
        closure = tuple(copied if content is inner else cell for cell, content in cells)
    made = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _enclosed(function: FunctionType) -> list[Any]:
    """Return what a function has of the function around it; ``None`` for what is not set yet."""
    return [None if cell == _EMPTY else cell.cell_contents for cell in function.__closure__ or ()]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
