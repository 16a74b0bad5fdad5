"""Find the children of a layer that a replacement can call, by the names in the code."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from opgraft.registry.op_classes import definer, kernel_methods, own_classes
from torch import Tensor, nn

_BY_COMPUTED_NAMES = frozenset(
    {
        "_modules",
        "attrgetter",
        "children",
        "get_submodule",
        "getattr",
        "methodcaller",
        "modules",
        "named_children",
        "named_modules",
    }
)
"""Code that uses one of these may call any child."""

_TENSORS = frozenset({"weight", "bias"})
"""Attributes of a child that a layer may read without a call of the child."""

_PLAIN = (Tensor, torch.dtype, torch.device, float, int, str, type(None))
"""Values whose owner is only read, and not called."""

_ASKING = frozenset({"hasattr", "id", "isinstance", "repr", "str", "type"})
"""Functions that call no method of the plugin with their first argument."""

_MISSING = object()


class AnyChild(Exception):  # noqa: N818  # a verdict, not an error
    """The code may call any child."""


def idle_children(layer: Any) -> frozenset[str]:
    """Return the names of the children that no call of ``layer`` runs now, without gradients.

    ``layer.idle()`` holds for the code of the class with this ``idle``. If a plugin replaces the
    layer without an ``idle``, the names in the code of the replacement count: a child without a
    mention in the code is idle.
    """
    target = layer.binding.replacement.target
    told: frozenset[str] = layer.idle()
    if layer.op_class is target:
        return told
    if definer(layer.op_class, "idle", above=target) is not None:
        return told
    names = names_reached(layer)
    if names is None:
        return told
    unnamed = frozenset(layer._modules) - names
    if _runs_forward_of(target, layer):
        return unnamed | told
    return unnamed


def computed_with_another(layer: Any) -> frozenset[str]:
    """Return the names of the children that the layer computes in the call of another child."""
    if not reaches(layer, "joint_op"):
        return frozenset()
    return frozenset(layer.computed_at_once()[1:])


def reaches(layer: Any, attribute: str) -> bool:
    """Return False if a replacement of ``layer`` has no code with the name ``attribute``."""
    if layer.op_class is layer.binding.replacement.target:
        return True
    names = names_reached(layer)
    return names is None or attribute in names


def names_reached(layer: Any) -> frozenset[str] | None:
    """Return the names in the kernel of ``layer`` and in all functions below the kernel.

    ``None`` if the code may call any child, such as by ``getattr``.
    """
    try:
        names = _names_in(_code_of(layer), layer)
        return names | frozenset(_held(layer, names))
    except AnyChild:
        return None


def _held(layer: nn.Module, names: frozenset[str]) -> Iterator[str]:
    """Yield the names of children in the layer's lists, tuples and mappings with these names."""
    for name in names & vars(layer).keys():
        value = vars(layer)[name]
        # A function on the instance may hold the layer, and call any child.
        if isinstance(value, (FunctionType, functools.partial)):
            raise AnyChild
        if isinstance(value, Mapping):
            value = list(value.values())
        if not isinstance(value, (list, tuple)):
            continue
        for child, module in layer._modules.items():
            if any(module is each for each in value):
                yield child


def _runs_forward_of(target: type, layer: Any) -> bool:
    """Return True if the kernel of ``layer`` is, or can call, the ``forward`` of ``target``."""
    owner = definer(target, "forward")
    return owner is not None and vars(owner)["forward"] in _code_of(layer)


def _code_of(layer: Any) -> tuple[FunctionType, ...]:
    kernel = layer.binding.kernel.winner
    return _functions(layer.op_class, kernel.owner, kernel.method)


def _names_in(functions: Iterable[FunctionType], layer: nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for function in functions:
        for name, attribute in _uses(function.__code__):
            if not _is_plain(layer, name, attribute):
                names.add(name)
    if names & _BY_COMPUTED_NAMES:
        raise AnyChild
    return frozenset(names)


def _is_plain(layer: nn.Module, name: str, attribute: str | None) -> bool:
    """Return True if ``layer.name.attribute`` is a number, a tensor or the like."""
    if attribute is None:
        return False
    return isinstance(_held_by(_held_by(layer, name), attribute), _PLAIN)


def _held_by(owner: object, name: str) -> object:
    """Return an attribute without running code of the owner, such as a property."""
    tables: list[Mapping[str, object]] = []
    if isinstance(owner, nn.Module):
        tables = [owner._parameters, owner._buffers, owner._modules]
    for held in tables:
        if name in held:
            return held[name]
    return inspect.getattr_static(owner, name, _MISSING)


@functools.lru_cache(maxsize=256)
def _functions(cls: type, owner: type, method: str) -> tuple[FunctionType, ...]:
    """Collect the kernel with the methods and functions of the plugin below the kernel."""
    found = _plain_functions(vars(owner)[method])
    # The list grows meanwhile.
    for function in found:
        names = _names(function.__code__)
        for further in (*_methods(cls, names), *_beside(function, names, cls)):
            if further not in found:
                found.append(further)
    return tuple(found)


def _methods(cls: type, names: frozenset[str]) -> Iterator[FunctionType]:
    """Yield the methods of ``cls`` with these names.

    If ``super`` is among the names, the methods of base classes follow.
    """
    kernels = frozenset(kernel_methods())
    wanted = set(names)
    # A name of a kernel may reach the base of all ops, and from there any kernel of the chain.
    if ("super" in names and names & kernels) or names & (kernels - {"forward"}):
        wanted |= kernels
    for name in wanted:
        definitions = [vars(base)[name] for base in own_classes(cls) if name in vars(base)]
        if "super" not in names and name not in kernels:
            definitions = definitions[:1]
        for definition in definitions:
            yield from _plain_functions(definition)


def _beside(function: FunctionType, names: frozenset[str], cls: type) -> Iterator[FunctionType]:
    """Yield the functions of the plugin of ``cls`` that a function names or has in its closure."""
    spaces = [function.__globals__]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            spaces.append(vars(value))
    things = [space[name] for space in spaces for name in names if name in space]
    things += [cell.cell_contents for cell in function.__closure__ or ()]
    for thing in things:
        # Functions of opgraft and torch are not given the layer, save by its own code.
        if isinstance(thing, FunctionType) and _package(thing) == _package(cls):
            yield thing


def _package(thing: type | FunctionType) -> str:
    return (thing.__module__ or "").partition(".")[0]


def _plain_functions(definition: Any) -> list[FunctionType]:
    """Return the function of a class attribute, and the function below its decorators."""
    bare = definition
    if isinstance(definition, property):
        bare = definition.fget
    if isinstance(definition, (staticmethod, classmethod)):
        bare = definition.__func__
    if not callable(bare):
        return []
    functions = [bare]
    below = inspect.unwrap(bare)
    if below is not bare:
        functions.append(below)
    if not all(isinstance(each, FunctionType) for each in functions):
        raise AnyChild
    return functions


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals that code may call; see ``_uses``."""
    return frozenset(name for name, _ in _uses(code))


@functools.lru_cache(maxsize=256)
def _uses(code: CodeType) -> Sequence[tuple[str, str | None]]:
    """Return the uses of attributes and globals in a function and in the functions inside.

    A use is a name, with the attribute if the code reads one of the value and does no more. If the
    code only tests a value, or reads a weight from the value, that is no use.
    """
    uses: list[tuple[str, str | None]] = []
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opcode not in dis.hasname:
            continue
        following = instructions[index + 1 : index + 3]
        if not _is_attribute(instruction) or not following:
            uses.append((instruction.argval, None))
            continue
        if _is_tested(following) or _is_asked_about(instructions, index):
            continue
        after = following[0]
        read = after.argval if after.opname == "LOAD_ATTR" else None
        if read not in _TENSORS:
            uses.append((instruction.argval, read))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            uses += _uses(part)
    return tuple(uses)


def _is_attribute(instruction: dis.Instruction) -> bool:
    """Return True if an instruction loads an attribute, other than a method for a call."""
    # From Python 3.12 on, one instruction does both.
    return instruction.opname == "LOAD_ATTR" and "NULL|self" not in instruction.argrepr


def _is_tested(following: Sequence[dis.Instruction]) -> bool:
    """Return True if code only tests a loaded value.

    Args:
        following: the two instructions after the one that loads the value.
    """
    after = following[0]
    if after.opname == "LOAD_CONST" and after.argval is None:
        return len(following) > 1 and following[1].opname == "IS_OP"
    return after.opname == "TO_BOOL" or after.opname.startswith("POP_JUMP")


def _is_asked_about(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return True if an attribute is part of the first argument of ``isinstance`` or the like.

    Example: ``quant_method`` in ``isinstance(self.quant_method, type)``.

    Args:
        instructions: the whole code.
        index: of the instruction that loads the attribute.
    """
    first, last = index, index
    while first > 0 and _is_attribute(instructions[first]):
        first -= 1
    while last + 1 < len(instructions) and _is_attribute(instructions[last]):
        last += 1
    asking = instructions[first - 1]
    if first == 0 or asking.opname != "LOAD_GLOBAL" or asking.argval not in _ASKING:
        return False
    # A method of the value is called, and the result is the argument.
    return instructions[last].opname not in ("LOAD_METHOD", "LOAD_ATTR")
