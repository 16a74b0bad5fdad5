"""Describe values as data. Processes that make the same graph of the values have equal data."""

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
"""The largest number of described values."""

_MOST_MODULES = 1 << 20
"""A model with more modules contains itself."""

_LONGEST_PATH = 1 << 13
"""A model with a longer path, in characters, contains itself."""

_DEEPEST = 60
"""The number of levels of values within values."""

_PLAIN = (str, int, float, bool, type(None))
_FIRST = operator.itemgetter(0)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType)
_OWN = ("opgraft", "torch")
"""Packages with objects that the class describes well enough: bindings, groups, generators.

Data classes of these packages are described by their fields.
"""


class Descriptions:
    """Describes the values of a model.

    Args:
        held: the modules and tensors of the model by ``held_by``. These are described by their
            places.
        contents: describe other tensors with their numbers.

    Attributes:
        modules: the names of modules with described functions and classes.
        incomplete: the classes of values without a full description: such values may differ unseen.
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
        """Describe any value: by itself, by a name or by a digest."""
        if isinstance(value, _PLAIN):
            # NaN is not equal to itself, and its text is.
            return value if value == value else "nan"
        place = id(value)
        if place in self._open:
            return f"itself, {self._open[place]}"
        if place not in self._known:
            self._open[place] = len(self._open)
            found = self._described(value)
            del self._open[place]
            # A value in many places is written out once.
            if not isinstance(found, str):
                found = hashlib.sha256(repr(found).encode()).hexdigest()
            # The value is kept, too: another value could take the id of a deleted one.
            self._known[place] = value, found
        return self._known[place][1]

    def _described(self, value: Any) -> Any:
        if id(value) in self._held:
            return self._held[id(value)]
        if isinstance(value, (torch.dtype, torch.device, bytes, complex)):
            return repr(value)
        if isinstance(value, Tensor):
            content = self._content(value) if self._contents else ""
            return [*layout(value), content]
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            return value.__name__
        if len(self._known) > _MOST or len(self._open) > _DEEPEST:
            return self._by_class(value)
        return self._by_parts(value)

    def _by_parts(self, value: Any) -> Any:
        """Describe a value by the values inside."""
        if isinstance(value, (list, tuple)):
            return [*map(self.of, value)]
        # Most mappings are dictionaries, and the test for dict is faster.
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
        """Describe a value by the class alone, and remember the gap."""
        name = qualified(type(value))
        self.incomplete.add(name)
        return name

    def _class(self, value: type) -> list[Any]:
        """Describe a class: the name, and the user's code in the class and its bases."""
        self.modules.update(each.__module__ for each in value.__mro__)
        parts: list[Any] = [qualified(value)]
        for base in value.__mro__:
            parts += self._own(base)
        return parts

    def _own(self, base: type) -> list[Any]:
        """Describe the user's code in a class, without the bases."""
        if base in self._bases:
            return self._bases[base]
        own: list[Any] = []
        is_mine = self._is_own(base.__module__)
        held = dict(vars(base))
        # Somebody may have put another forward into a class of torch or opgraft.
        if is_covered(base.__module__):
            held = {name: held[name] for name in ("forward",) if name in held}
        for name, attribute in held.items():
            # Most attributes are those of the class's own module.
            if not is_mine and getattr(attribute, "__module__", None) == base.__module__:
                continue
            functions = () if isinstance(attribute, type) else tuple(functions_of(attribute))
            for each in functions:
                if self._is_own(str(each.__module__)):
                    own.append([name, self.of(each)])
            is_plain = not functions and not isinstance(attribute, _DESCRIPTORS)
            if is_mine and is_plain and not name.startswith(("__", "_abc_")):
                own.append([name, self.of(attribute)])
        self._bases[base] = own
        return own

    def _function(self, value: Any) -> list[Any]:
        """Describe a function: module, name, code, defaults, closure and globals."""
        inner = getattr(value, "__func__", value)
        module = str(inner.__module__)
        self.modules.add(module)
        code = getattr(inner, "__code__", None)
        closure = getattr(inner, "__closure__", None) or ()
        cells = [each.cell_contents for each in closure if _is_filled(each)]
        beside = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        beside += [cells, getattr(value, "__self__", None)]
        if isinstance(inner, FunctionType) and self._is_own(module):
            beside.append(dict(globals_of(inner)))
        told = [self.of(each) for each in beside]
        digest = "" if code is None else code_digest(code)
        return [module, value.__qualname__, digest, *told]

    def _state(self, value: Any) -> Iterator[Any]:
        """Yield descriptions of the parts of an object, as far as pickle would save them."""
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
            yield from self._pickled(value)

    def _pickled(self, value: Any) -> Iterator[Any]:
        """Yield descriptions of the parts of an object by the protocol of pickle."""
        try:
            # With protocol 5, arrays would hand out their memory instead of their numbers.
            parts = value.__reduce_ex__(4)
        # A class against pickling may raise anything.
        except Exception:
            self._by_class(value)
            return
        if isinstance(parts, str):
            yield parts
            return
        for part in parts[:5]:
            yield self.of([*part] if isinstance(part, Iterator) else part)

    def _content(self, tensor: Tensor) -> str:
        """Return a digest of the numbers in a tensor; empty if they cannot be read."""
        try:
            return hashlib.sha256(content_of(tensor)).hexdigest()
        # The tensor has no memory, or a layout without a plain one.
        except (RuntimeError, TypeError, NotImplementedError):
            self._by_class(tensor)
            return ""


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Map paths to the modules of a model. A module in several places has several paths.

    This takes a fourth of the time of ``named_modules``.

    Raises:
        CompilationError: a module contains itself.
    """
    found = [("", model)]
    # The list grows meanwhile.
    for path, module in found:
        prefix = f"{path}." if path else ""
        found += [
            (prefix + name, each) for name, each in module._modules.items() if each is not None
        ]
        if len(found) > _MOST_MODULES or len(path) > _LONGEST_PATH:
            raise CompilationError(
                f"{type(model).__name__} has no end of modules, as one is a part of itself: "
                f"{path[:80]}...: take it out"
            )
    return dict(found)


def held_by(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Map the ids of modules, parameters and buffers of a model to their paths."""
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
