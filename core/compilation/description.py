"""Descriptions of values: data that is the same in every process in which the same graph would be made of them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import operator
from collections.abc import Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from opgraft.compat.content import content_of
from opgraft.compilation.python_code import (
    code_digest,
    functions_of,
    globals_of,
    is_covered,
    is_own,
)
from opgraft.errors import CompilationError
from opgraft.registry.op_classes import qualified
from torch import Tensor, nn

_MOST = 1 << 16
"""Values that are looked at."""

_MOST_MODULES, _LONGEST_PATH = 1 << 20, 1 << 13
"""Modules of a model, and characters of the path of one, beyond which it is in itself."""

_DEEPEST = 60
"""Levels of values within values that are looked at."""

_PLAIN = (str, int, float, bool, type(None))
_FIRST = operator.itemgetter(0)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType)
_OWN = ("opgraft", "torch")
"""Packages of whose objects, other than data classes, the class says enough: bindings, groups, generators."""


class Descriptions:
    """Describes the values of a model.

    Args:
        held: what ``held_by`` says of the model: it is described where it stands in it, and not where it is named.
        contents: describe other tensors with their content.

    Attributes:
        modules: names of the modules of the functions and classes that were described.
        incomplete: classes of values that cannot be described, or are too many: what they hold may differ unseen.
    """

    def __init__(self, held: Mapping[int, str], *, contents: bool = True) -> None:
        self._held = held
        self._contents = contents
        self._known: dict[int, tuple[Any, Any]] = {}
        self._open: dict[int, int] = {}
        self._bases: dict[type, list[Any]] = {}
        self._is_own = functools.cache(is_own)
        self.modules: set[str] = set()
        self.incomplete: set[str] = set()

    def of(self, value: Any) -> Any:
        """Describe a value, whatever it is: by itself, by its name or by a digest."""
        if isinstance(value, _PLAIN):
            return value if value == value else "nan"
        place = id(value)
        if place in self._open:
            return f"itself, {self._open[place]}"
        if place not in self._known:
            self._open[place] = len(self._open)
            found = self._described(value)
            del self._open[place]
            if not isinstance(found, str):  # a digest, as what is in many places is written once
                found = hashlib.sha256(repr(found).encode()).hexdigest()
            self._known[place] = value, found  # kept, as its id may be another one's else
        return self._known[place][1]

    def _described(self, value: Any) -> Any:
        if id(value) in self._held:
            return self._held[id(value)]
        if isinstance(value, (torch.dtype, torch.device, bytes, complex)):
            return repr(value)
        if isinstance(value, Tensor):
            return [*layout(value), self._content(value) if self._contents else ""]
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            return value.__name__
        if len(self._known) > _MOST or len(self._open) > _DEEPEST:
            return self._by_class(value)
        if isinstance(value, (list, tuple)):
            return [*map(self.of, value)]
        # The first of which is what most are, and sooner found.
        if isinstance(value, (dict, Mapping)):
            return sorted([(str(key), self.of(each)) for key, each in value.items()], key=_FIRST)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        if isinstance(value, (set, frozenset)):
            return sorted((self.of(each) for each in value), key=repr)
        return [qualified(type(value)), *self._state(value)]

    def _by_class(self, value: Any) -> str:
        self.incomplete.add(qualified(type(value)))
        return qualified(type(value))

    def _class(self, value: type) -> list[Any]:
        """Describe a class: its name, and what of it is the user's, who may have changed it."""
        self.modules.update(each.__module__ for each in value.__mro__)
        return [qualified(value), *(each for base in value.__mro__ for each in self._own(base))]

    def _own(self, base: type) -> list[Any]:
        """Describe what is the user's of a class itself, which others derive from."""
        if base in self._bases:
            return self._bases[base]
        own: list[Any] = []
        mine, held = self._is_own(base.__module__), dict(vars(base))
        if is_covered(base.__module__):  # of which somebody may have put another method in place
            held = {name: held[name] for name in ("forward",) if name in held}
        for name, attribute in held.items():
            if not mine and getattr(attribute, "__module__", None) == base.__module__:
                continue  # as most are: nobody has put another one in place
            functions = () if isinstance(attribute, type) else tuple(functions_of(attribute))
            own += [
                [name, self.of(each)] for each in functions if self._is_own(str(each.__module__))
            ]
            if mine and not (
                functions or name.startswith(("__", "_abc_")) or isinstance(attribute, _DESCRIPTORS)
            ):
                own.append([name, self.of(attribute)])
        self._bases[base] = own
        return own

    def _function(self, value: Any) -> list[Any]:
        """Describe a function: its code, and what it has besides its arguments."""
        inner = getattr(value, "__func__", value)
        self.modules.add(str(inner.__module__))
        code = getattr(inner, "__code__", None)
        cells = [
            each.cell_contents
            for each in getattr(inner, "__closure__", None) or ()
            if _is_filled(each)
        ]
        beside = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        beside += [cells, getattr(value, "__self__", None)]
        if isinstance(inner, FunctionType) and self._is_own(str(inner.__module__)):
            beside.append(dict(globals_of(inner)))
        told = [self.of(each) for each in beside]
        return [
            str(inner.__module__),
            value.__qualname__,
            "" if code is None else code_digest(code),
            *told,
        ]

    def _state(self, value: Any) -> Iterator[Any]:
        """Yield the description of what an object is made of, as far as it tells pickle."""
        kind = type(value)
        self.modules.add(kind.__module__)
        if isinstance(value, enum.Enum):
            yield value.name
        elif isinstance(value, nn.Module):
            yield self.of(vars(value))
        elif kind.__module__.partition(".")[0] in _OWN:
            if dataclasses.is_dataclass(value):
                yield [
                    [each.name, self.of(getattr(value, each.name))]
                    for each in dataclasses.fields(value)
                ]
            elif isinstance(value, torch.export.Dim):
                yield self.of(vars(value))
        else:
            try:
                # By 5, arrays give away their memory in place of their content.
                parts = value.__reduce_ex__(4)
            except Exception:  # whatever a class raises that cannot be pickled
                self._by_class(value)
                return
            if isinstance(parts, str):
                yield parts
                return
            for part in parts[:5]:
                yield self.of([*part] if isinstance(part, Iterator) else part)

    def _content(self, tensor: Tensor) -> str:
        """Digest the content of a tensor; empty where it has none that could be read."""
        try:
            return hashlib.sha256(content_of(tensor)).hexdigest()
        # Of one without memory, or of a layout of its own.
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ):
            self._by_class(tensor)
            return ""


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Map paths to the modules of a model, each as often as it has a path, in a fourth of the time of
    ``named_modules``.

    Raises:
        CompilationError: there is no end of them, as one is in itself.
    """
    found = [("", model)]
    for path, module in found:  # which grows
        prefix = f"{path}." if path else ""
        found += [
            (prefix + name, each) for name, each in module._modules.items() if each is not None
        ]
        if len(found) > _MOST_MODULES or len(path) > _LONGEST_PATH:
            raise CompilationError(
                f"{type(model).__name__} has no end of modules, as one is a part of itself: {path[:80]}...: take it out"
            )
    return dict(found)


def held_by(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Map the ids of the modules of a model, by path, and of their parameters and buffers to where they stand in it."""
    held: dict[int, str] = {}
    for path, module in modules.items():
        held[id(module)] = path
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            held[id(tensor)] = f"{path}.{name}"
    return held


def layout(tensor: Tensor) -> list[Any]:
    """Describe a tensor without its content."""
    return [str(tensor.dtype), str(tensor.device), list(tensor.shape), list(tensor.stride())]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
