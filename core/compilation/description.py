"""Descriptions of values: data that is the same in every process in which the same graph would be made of them."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from opgraft.compat.content import content_of
from opgraft.registry.op_classes import qualified
from torch import Tensor, nn

_DEPTH = 6
"""Levels of values within values that are looked at."""

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_OWN = ("opgraft", "torch")
"""Packages of whose objects, other than data classes, the class says enough: bindings, groups, generators."""


class Descriptions:
    """Describes the values of a model.

    Args:
        model: whose modules, parameters and buffers are described where they stand in it, and not where they are named.
        contents: describe other tensors with their content.

    Attributes:
        modules: names of the modules of the functions and classes that were described.
    """

    def __init__(self, model: nn.Module, *, contents: bool = True) -> None:
        held = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        self._held = {id(each): name for name, each in held}
        self._contents = contents
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.modules: set[str] = set()

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """Describe a value, whatever it is."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value if value == value else "nan"
        place = id(value), depth
        if place not in self._known:
            self._known[place] = value, self._described(value, depth)  # kept, as its id may be another one's else
        return self._known[place][1]

    def _described(self, value: Any, depth: int) -> Any:
        if id(value) in self._held:
            return self._held[id(value)]
        if isinstance(value, (torch.dtype, torch.device, bytes, complex)):
            return repr(value)
        if isinstance(value, Tensor):
            return [*layout(value), _content(value) if self._contents else ""]
        if isinstance(value, type):
            self.modules.add(value.__module__)
            return qualified(value)
        if isinstance(value, _FUNCTIONS):
            return self._function(value, depth)
        if depth == 0:
            return qualified(type(value))
        if isinstance(value, Mapping):
            return sorted(
                ([str(key), self.of(each, depth - 1)] for key, each in value.items()), key=lambda pair: pair[0]
            )
        if isinstance(value, (list, tuple)):
            return [self.of(each, depth - 1) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted((self.of(each, depth - 1) for each in value), key=repr)
        return [qualified(type(value)), *self._state(value, depth - 1)]

    def _function(self, value: Any, depth: int) -> list[Any]:
        """Describe a function: its code, and what it has besides its arguments."""
        inner = getattr(value, "__func__", value)
        self.modules.add(str(inner.__module__))
        code = getattr(inner, "__code__", None)
        cells = [each.cell_contents for each in getattr(inner, "__closure__", None) or () if _is_filled(each)]
        beside = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        beside += [cells, getattr(value, "__self__", None)]
        told = [self.of(each, depth - 1) for each in beside] if depth else []
        return [str(inner.__module__), value.__qualname__, "" if code is None else code_digest(code), *told]

    def _state(self, value: Any, depth: int) -> Iterator[Any]:
        """Yield the description of what an object is made of, as far as it tells pickle."""
        kind = type(value)
        self.modules.add(kind.__module__)
        if isinstance(value, enum.Enum):
            yield value.name
        elif isinstance(value, nn.Module):
            yield self.of(vars(value), depth)
        elif kind.__module__.partition(".")[0] in _OWN:
            if dataclasses.is_dataclass(value):
                yield [[each.name, self.of(getattr(value, each.name), depth)] for each in dataclasses.fields(value)]
            elif isinstance(value, torch.export.Dim):
                yield self.of(vars(value), depth)
        else:
            try:
                parts = value.__reduce_ex__(4)  # by 5, arrays give away their memory in place of their content
            except Exception:  # whatever a class raises that cannot be pickled
                return
            if isinstance(parts, str):
                yield parts
                return
            for part in parts[:5]:
                yield self.of(list(part) if isinstance(part, Iterator) else part, depth)


def layout(tensor: Tensor) -> list[Any]:
    """Describe a tensor without its content."""
    return [str(tensor.dtype), str(tensor.device), list(tensor.shape), list(tensor.stride())]


def _content(tensor: Tensor) -> str:
    """Digest the content of a tensor; empty where it has none that could be read."""
    try:
        return hashlib.sha256(content_of(tensor)).hexdigest()
    except (RuntimeError, TypeError, NotImplementedError):  # of one without memory, or of a layout of its own
        return ""


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def code_digest(code: CodeType) -> str:
    """Digest the code of a function."""
    return hashlib.sha256("".join(_instructions(code)).encode()).hexdigest()


def _instructions(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:  # sets have an order of their own in each process
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
