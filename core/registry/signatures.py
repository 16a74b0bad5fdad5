"""Whether one callable accepts every call that another accepts.

Decided by binding real calls (``inspect.Signature.bind``) instead of by rules on parameter kinds: for each count of
positional arguments, once with as few and once with as many keywords as the target takes. The same value must land
under the same name, so a renamed or reordered parameter is found too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

_EXTRA_KEYWORD = "any_other_keyword"


def method_signature(cls: type, name: str) -> Signature:
    """The signature of ``cls.name`` as an instance's caller sees it: without ``self``."""
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, staticmethod):
        return inspect.signature(raw.__func__)
    if isinstance(raw, classmethod):
        return inspect.signature(raw.__get__(None, cls))
    signature = inspect.signature(raw)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def rejected_call(target: Signature, replacement: Signature) -> str | None:
    """The first call that ``target`` accepts and ``replacement`` does not, in words, or ``None`` if there is none."""
    for args, kwargs in _extreme_calls(target):
        try:
            wanted = target.bind(*args, **kwargs)
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


def _extreme_calls(signature: Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Calls that span what ``signature`` accepts. Each value is the name of the parameter it is meant for."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    takes_more = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    takes_any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for count in range(len(positional) + 1):
        args = [p.name for p in positional[:count]]
        by_name = [p for p in positional[count:] if p.kind is Parameter.POSITIONAL_OR_KEYWORD] + keyword_only
        yield args, {p.name: p.name for p in by_name if p.default is Parameter.empty}
        most = {p.name: p.name for p in by_name}
        yield args, most
        if takes_any_keyword:
            yield args, {**most, _EXTRA_KEYWORD: _EXTRA_KEYWORD}
    if takes_more:
        yield [*(p.name for p in positional), "one_more"], {p.name: p.name for p in keyword_only}


def _landing(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Where each value of a bound call landed; values in ``*args`` or ``**kwargs`` keep their own name."""
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


def _moved_value(target: Signature, wanted: Mapping[str, Any], landing: Mapping[str, str]) -> str | None:
    for name, parameter in target.parameters.items():
        if name not in wanted or parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        if parameter.kind is not Parameter.POSITIONAL_ONLY and landing[name] != name:
            return f"the value for {name!r} lands in {landing[name]!r}"
    return None


def _render(args: list[str], kwargs: Mapping[str, str]) -> str:
    return "(" + ", ".join([*args, *(f"{name}=…" for name in kwargs)]) + ")"
