"""Schemas of operators, and backends called as Dynamo calls them, for which torch has no public names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

FIXED_SIZES = frozenset(("openxla",))
"""Backends of torch whose code is for the sizes of its first call, and wrong for others."""


def lookup(name: str) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` by its name, the entry points ``torch_dynamo_backends`` included.

    Raises:
        Exception: there is none of that name, or it cannot be imported.
    """
    import torch._dynamo  # as long to import as torch itself

    try:
        found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    except AttributeError:  # another torch: let Dynamo look it up, and trace the graph anew

        def found(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            return torch.compile(module, backend=name, dynamic=True)

    return found


def known_backends() -> list[str]:
    """Name the backends of ``torch.compile``."""
    return sorted({"eager", "aot_eager", *torch.compiler.list_backends()})


def tracing_in(fake_mode: Any) -> AbstractContextManager[Any]:
    """Return the context in which Dynamo calls a backend, whose sizes are those of ``fake_mode``.

    Without the names, backends find the mode by their inputs.
    """
    guards: Any = getattr(torch, "_guards", None)
    context = getattr(guards, "TracingContext", None)
    return (
        guards.tracing(context(fake_mode))
        if context is not None and fake_mode is not None
        else nullcontext()
    )


def with_symbols_for_sizes() -> AbstractContextManager[Any]:
    """Return a context for operators with symbols as sizes, such as tracing gives them."""
    try:
        # Views of torch 2.8 take symbols with this alone; later versions need nothing.
        from torch._dispatch.python import enable_python_dispatcher
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = enable_python_dispatcher()
    return context


def returns_new_memory(node: fx.Node) -> bool:
    """Tell whether the results of a node share no memory with its arguments; of operators that tell."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def arguments_of(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operator, each with what is told of its memory: ``None`` where nobody else has it."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        yield given, argument.alias_info


def flattened(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers, and the structure that they stood in."""
    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def structure_to_text(structure: Any) -> str:
    """Write a structure down.

    Raises:
        Exception: it has containers that cannot be written.
    """
    text: str = _pytree.treespec_dumps(structure)
    return text


def structure_of_text(text: str) -> Any:
    """Undo ``structure_to_text``; the classes of containers must have been imported.

    Raises:
        Exception: the text is no structure, or of a class that is not known.
    """
    return _pytree.treespec_loads(text)


_WRITTEN = {"aot_inductor.metadata"}
"""Settings of Inductor to which it writes by itself."""


def changed_settings() -> dict[str, Any]:
    """Return the settings of Inductor that code has changed, to what: none, where it is not imported."""
    config: Any = sys.modules.get("torch._inductor.config")
    entries: dict[str, Any] = {} if config is None else vars(config)["_config"]
    # Whoever changes a setting for a while leaves it set to the default.
    names = entries.keys() - _WRITTEN
    changed = {name: getattr(config, name) for name in names if not config._is_default(name)}
    return {
        name: value for name, value in sorted(changed.items()) if value != entries[name].default
    }
