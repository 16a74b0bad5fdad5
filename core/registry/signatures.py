"""Compare signatures: find a call that one callable accepts and another refuses.

The comparison binds calls (``inspect.Signature.bind``) instead of comparing kinds of parameters.
For each number of positional arguments, one call has as few keywords as possible, and one as many.
Each value must land under the same name, so renamed and reordered parameters are found too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any, TypeVar

_EXTRA_KEYWORD = "any_other_keyword"
_CALLS = "__opgraft_calls__"

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters whose values callers may give by position."""

_ANY = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Calls:
    """The calls of a method, if callers use less than the signature allows; see ``called_with``."""

    always: Sequence[str] = ()
    never: Sequence[str] = ()
    by_position: Sequence[str] = ()

    def narrowed(self, signature: Signature) -> Signature:
        """Return a signature for exactly these calls."""
        parameters = [
            self._narrowed(p) for name, p in signature.parameters.items() if name not in self.never
        ]
        return signature.replace(parameters=parameters)

    def _narrowed(self, parameter: Parameter) -> Parameter:
        if parameter.name in self.always:
            parameter = parameter.replace(default=Parameter.empty)
        # Then the name is free: a replacement may call the parameter by another one.
        if parameter.name in self.by_position:
            parameter = parameter.replace(kind=Parameter.POSITIONAL_ONLY)
        return parameter


EVERY_CALL = Calls()
"""Callers may make every call that the signature accepts."""


def called_with(
    *, always: Sequence[str] = (), never: Sequence[str] = (), by_position: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Mark a constructor or a native definition with the calls that callers make.

    A replacement must accept these calls. If it refuses another call of the signature, that is a
    finding. The calls of opgraft's own classes are recorded; recorded calls with a parameter in
    ``never`` do not count.

    Args:
        always: parameters with a default that every caller gives nevertheless.
        never: optional parameters that no caller gives, or that plugins for older versions of vLLM
            lack.
        by_position: the first parameters, if no caller gives them by name.
    """

    def decorate(function: Function) -> Function:
        setattr(function, _CALLS, Calls(always, never, by_position))
        return function

    return decorate


def calls_of(cls: type, name: str) -> Calls:
    """Return the calls of ``cls.name``: the mark of ``called_with``, else every call."""
    raw = inspect.getattr_static(cls, name)
    calls: Calls = getattr(getattr(raw, "__func__", raw), _CALLS, EVERY_CALL)
    return calls


def method_signature(cls: type, name: str) -> Signature:
    """Return the signature of ``cls.name`` without ``self``."""
    # Static, as a descriptor of a plugin's class could run code.
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, FunctionType):
        return _of_function(raw)
    if isinstance(raw, staticmethod):
        return _known(raw.__func__)
    if isinstance(raw, classmethod):
        return _known(raw.__get__(None, cls))
    if isinstance(raw, functools.partialmethod):
        return _without_self(raw.__get__(None, cls))
    # Python gives self only to an object that says so.
    return _without_self(raw) if hasattr(type(raw), "__get__") else _known(raw)


# An op's native definition is compared with each replacement.
@functools.lru_cache(maxsize=256)
def _of_function(function: FunctionType) -> Signature:
    return _without_self(function)


def _without_self(function: Any) -> Signature:
    """Return the signature of a function without the first parameter."""
    signature = _known(function)
    # A signature of any call has no parameter for self.
    if signature is _ANY:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _known(function: Any) -> Signature:
    """Return the signature of a callable; of compiled code without one, that of any call."""
    try:
        return inspect.signature(function)
    # Python finds no signature for many functions that were compiled from C or Cython.
    except (ValueError, TypeError):
        return _ANY


def rejected_call(target: Signature, replacement: Signature) -> str | None:
    """Describe the first call that ``target`` accepts and ``replacement`` refuses, or ``None``."""
    # Most replacements end here, without a call.
    if _takes_whatever(replacement):
        return None
    if _form_of_signature(replacement) == _form_of_signature(target):
        return None
    for args, kwargs in _extreme_calls(target):
        try:
            wanted = target.bind(*args, **kwargs)
        # The target refuses the call, too.
        except TypeError:
            continue
        try:
            got = replacement.bind(*args, **kwargs)
        except TypeError as error:
            return f"the call {_render(args, kwargs)} fails: {error}"
        moved = _moved_value(target, wanted.arguments, _landing(replacement, got.arguments))
        if moved:
            return f"in the call {_render(args, kwargs)} {moved}"
    return None


def bound_call(
    args: Sequence[str], keywords: Sequence[str], target: Signature, replacement: Signature
) -> str | None:
    """Return the reason why ``replacement`` refuses one call, or ``None``.

    A parameter by position may have another name, unless ``target`` has another parameter of that
    name: then two values have changed places.

    Args:
        args: the arguments by position; each value is the name of the parameter of ``target``.
        keywords: the names of the other arguments.
        target: the signature of the call.
        replacement: the signature to check.
    """
    given = {name: name for name in keywords}
    try:
        got = replacement.bind(*args, **given)
    except TypeError as error:
        return f"the call {_render(args, given)} fails: {error}"
    landing = _landing(replacement, got.arguments)
    for name in args:
        if landing[name] != name and landing[name] in target.parameters:
            moved = f"the value for {name!r} lands in {landing[name]!r}"
            return f"in the call {_render(args, given)} {moved}"
    return None


def _takes_whatever(signature: Signature) -> bool:
    kinds = [p.kind for p in signature.parameters.values()]
    return kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]


def _form_of_signature(signature: Signature) -> list[tuple[str, Any, bool]]:
    """Return name, kind and requirement of each parameter: these decide on the accepted calls."""
    return [(p.name, p.kind, p.default is Parameter.empty) for p in signature.parameters.values()]


def _extreme_calls(signature: Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the smallest and largest calls of a signature. Each value is a parameter's name."""
    of_kind: dict[Any, list[Parameter]] = {}
    for parameter in signature.parameters.values():
        of_kind.setdefault(parameter.kind, []).append(parameter)
    either = of_kind.get(Parameter.POSITIONAL_OR_KEYWORD, [])
    positional = [*of_kind.get(Parameter.POSITIONAL_ONLY, []), *either]
    keyword_only = of_kind.get(Parameter.KEYWORD_ONLY, [])
    for count in range(len(positional) + 1):
        args = _names(positional[:count])
        by_name = [each for each in positional[count:] if each in either] + keyword_only
        required = [each for each in by_name if each.default is Parameter.empty]
        yield args, _by_name(required)
        most = _by_name(by_name)
        yield args, most
        # A catch-all takes names that no parameter has.
        if Parameter.VAR_KEYWORD in of_kind:
            yield args, {**most, _EXTRA_KEYWORD: _EXTRA_KEYWORD}
    if Parameter.VAR_POSITIONAL in of_kind:
        yield [*_names(positional), "one_more"], _by_name(keyword_only)


def _names(parameters: Sequence[Parameter]) -> list[str]:
    return [each.name for each in parameters]


def _by_name(parameters: Sequence[Parameter]) -> dict[str, str]:
    return {each.name: each.name for each in parameters}


def _landing(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter of each value in a bound call.

    Values in ``*args`` and ``**kwargs`` keep their own names.
    """
    landing: dict[str, str] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            landing.update({item: item for item in value})
        elif kind is Parameter.VAR_KEYWORD:
            landing.update({item: key for key, item in value.items()})
        # The value of an argument is a name of the target's parameter, see the callers.
        else:
            landing[value] = name
    return landing


def _moved_value(
    target: Signature, wanted: Mapping[str, Any], landing: Mapping[str, str]
) -> str | None:
    # No caller can write the name of a positional-only parameter, so the name may differ.
    nameable = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    for name, parameter in target.parameters.items():
        if name not in wanted or parameter.kind not in nameable:
            continue
        if landing[name] != name:
            return f"the value for {name!r} lands in {landing[name]!r}"
    return None


def _render(args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    return "(" + ", ".join([*args, *(f"{name}=…" for name in kwargs)]) + ")"
