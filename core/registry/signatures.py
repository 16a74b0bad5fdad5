"""Compare signatures: does one callable accept every call that another accepts, or every call that is ever made?

Decided by binding real calls (``inspect.Signature.bind``) instead of by rules on parameter kinds: for each count of
positional arguments, once with as few and once with as many keywords as the target takes. The same value must land
under the same name, so a renamed or reordered parameter is found too.
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

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Calls:
    """The calls that a method gets, where its signature allows more than its callers make use of."""

    always: Sequence[str] = ()
    never: Sequence[str] = ()
    by_position: Sequence[str] = ()

    def narrowed(self, signature: Signature) -> Signature:
        """Return the signature that accepts exactly the calls that are made."""
        parameters = [
            self._narrowed(p) for name, p in signature.parameters.items() if name not in self.never
        ]
        return signature.replace(parameters=parameters)

    def _narrowed(self, parameter: Parameter) -> Parameter:
        if parameter.name in self.always:
            parameter = parameter.replace(default=Parameter.empty)
        if parameter.name in self.by_position:
            parameter = parameter.replace(kind=Parameter.POSITIONAL_ONLY)
        return parameter


EVERY_CALL = Calls()
"""Nothing is known of the callers: they may make every call that the signature accepts."""


def called_with(
    *, always: Sequence[str] = (), never: Sequence[str] = (), by_position: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Mark a constructor or a native definition with the calls that its callers make.

    A replacement has to accept those. What else the signature accepts and the replacement does not is a finding. The
    calls of opgraft's own classes are recorded; of those, calls with a parameter that is ``never`` given do not count.

    Args:
        always: parameters with a default that every caller gives all the same.
        never: optional parameters that no caller gives, or that plugins lack by the version of vLLM that they serve.
        by_position: parameters, the first ones, that no caller gives by name.
    """

    def decorate(function: Function) -> Function:
        setattr(function, _CALLS, Calls(always, never, by_position))
        return function

    return decorate


def calls_of(cls: type, name: str) -> Calls:
    """Return how callers call ``cls.name``: as ``called_with`` says, else in every way that the signature accepts."""
    raw = inspect.getattr_static(cls, name)
    calls: Calls = getattr(getattr(raw, "__func__", raw), _CALLS, EVERY_CALL)
    return calls


def method_signature(cls: type, name: str) -> Signature:
    """Return the signature of ``cls.name`` as an instance's caller sees it: without ``self``."""
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, staticmethod):
        return inspect.signature(raw.__func__)
    if isinstance(raw, classmethod):
        return inspect.signature(raw.__get__(None, cls))
    return _of_function(raw) if isinstance(raw, FunctionType) else _without_self(raw)


@functools.lru_cache(
    maxsize=256
)  # an op's native definition is compared with each of its replacements
def _of_function(function: FunctionType) -> Signature:
    return _without_self(function)


def _without_self(function: Any) -> Signature:
    """Return the signature of a function less the first parameter, which no caller writes."""
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def rejected_call(target: Signature, replacement: Signature) -> str | None:
    """Describe the first call that ``target`` accepts and ``replacement`` does not; ``None`` if there is none."""
    # Most do, and are spared the calls.
    if _takes_whatever(replacement) or _form_of_signature(replacement) == _form_of_signature(
        target
    ):
        return None
    for args, kwargs in _extreme_calls(target):
        try:
            wanted = target.bind(*args, **kwargs)
        except TypeError:  # no call of the target
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
    """Say why ``replacement`` does not take one call, or return ``None``.

    Another name for a parameter that is given by position is fine, unless ``target`` has another parameter of that
    name: then two values have changed places.

    Args:
        args: what is given by position, each value the name of the parameter of ``target`` that takes it.
        keywords: the names of what is given by name.
        target: whose call it is.
        replacement: which is to take the call.
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
    """Return what decides which calls a signature accepts, and where their values land."""
    return [(p.name, p.kind, p.default is Parameter.empty) for p in signature.parameters.values()]


def _extreme_calls(signature: Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield calls that span what ``signature`` accepts. Each value is the name of the parameter it is meant for."""
    parameters = list(signature.parameters.values())
    positional = [
        p
        for p in parameters
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    takes_more = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    takes_any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for count in range(len(positional) + 1):
        args = [p.name for p in positional[:count]]
        by_name = [
            p for p in positional[count:] if p.kind is Parameter.POSITIONAL_OR_KEYWORD
        ] + keyword_only
        yield args, {p.name: p.name for p in by_name if p.default is Parameter.empty}
        most = {p.name: p.name for p in by_name}
        yield args, most
        if takes_any_keyword:
            yield args, {**most, _EXTRA_KEYWORD: _EXTRA_KEYWORD}
    if takes_more:
        yield [*(p.name for p in positional), "one_more"], {p.name: p.name for p in keyword_only}


def _landing(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return where each value of a bound call landed; values in ``*args`` or ``**kwargs`` keep their own name."""
    landing: dict[str, str] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            landing.update({item: item for item in value})
        elif kind is Parameter.VAR_KEYWORD:
            landing.update({item: key for key, item in value.items()})
        else:
            landing[value] = name
    return landing


def _moved_value(
    target: Signature, wanted: Mapping[str, Any], landing: Mapping[str, str]
) -> str | None:
    for name, parameter in target.parameters.items():
        if name not in wanted or parameter.kind in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        ):
            continue
        # Nobody can write the name of a positional-only parameter, so that it may differ.
        if parameter.kind is not Parameter.POSITIONAL_ONLY and landing[name] != name:
            return f"the value for {name!r} lands in {landing[name]!r}"
    return None


def _render(args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    return "(" + ", ".join([*args, *(f"{name}=…" for name in kwargs)]) + ")"
