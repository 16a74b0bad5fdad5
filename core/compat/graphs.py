"""Backends of ``torch.compile``, schemas of operators and nested containers, by private names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

FIXED_SIZES = frozenset(("openxla",))
"""Backends with code for the sizes of the first call. The code is wrong for other sizes."""


def lookup(name: str) -> Callable[..., Any]:
    """Return a backend of ``torch.compile``. Entry points ``torch_dynamo_backends`` count.

    Raises:
        Exception: there is no such backend, or its import fails.
    """
    # The import takes as long as torch itself.
    import torch._dynamo

    try:
        found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    except AttributeError:
        # Another torch. Dynamo looks the backend up, and traces the graph anew.
        def found(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            return torch.compile(module, backend=name, dynamic=True)

    return found


def known_backends() -> list[str]:
    """Return the names of the backends of ``torch.compile``."""
    return sorted({"eager", "aot_eager", *torch.compiler.list_backends()})


def tracing_in(fake_mode: Any) -> AbstractContextManager[Any]:
    """Return the context around a backend's call in Dynamo, with the sizes of ``fake_mode``.

    In another torch, backends find the mode in their inputs.
    """
    guards: Any = getattr(torch, "_guards", None)
    context = getattr(guards, "TracingContext", None)
    if context is None or fake_mode is None:
        return nullcontext()
    tracing: AbstractContextManager[Any] = guards.tracing(context(fake_mode))
    return tracing


def with_symbols_for_sizes() -> AbstractContextManager[Any]:
    """Return a context in which operators take symbols as sizes, as in a trace."""
    try:
        # Views of torch 2.8 take symbols with this alone; later versions need nothing.
        from torch._dispatch.python import enable_python_dispatcher
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = enable_python_dispatcher()
    return context


def returns_new_memory(node: fx.Node) -> bool:
    """Return True if the schema says that the results share no memory with the arguments."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return all(result.alias_info is None for result in schema.returns)


def arguments_of(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of an operator with the schema's alias information.

    ``None`` means that the operator neither writes to the argument nor returns a view of it.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for place, argument in enumerate(schema.arguments):
        by_place = place < len(node.args)
        given = node.args[place] if by_place else node.kwargs.get(argument.name)
        yield given, argument.alias_info


def flattened(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers, and the structure around the leaves."""
    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def structure_to_text(structure: Any) -> str:
    """Return a structure as text.

    Raises:
        Exception: a container cannot be written.
    """
    text: str = _pytree.treespec_dumps(structure)
    return text


def structure_of_text(text: str) -> Any:
    """Return the structure of a text from ``structure_to_text``.

    The classes of containers must have been imported.

    Raises:
        Exception: the text is no structure, or a class is unknown.
    """
    return _pytree.treespec_loads(text)


def graphs_of_inductor() -> str:
    """Return text that differs after each graph that Inductor begins to compile."""
    compiler: Any = sys.modules.get("torch._inductor.compile_fx")
    # To read the next number would take it.
    return repr(getattr(compiler, "_graph_counter", None))


_WRITTEN = {"aot_inductor.metadata"}
"""Settings that Inductor writes by itself."""


def changed_settings() -> dict[str, Any]:
    """Return the changed settings of Inductor with their values. Empty if it is not imported."""
    config: Any = sys.modules.get("torch._inductor.config")
    entries: dict[str, Any] = {} if config is None else vars(config)["_config"]
    changed = {}
    for name in sorted(entries.keys() - _WRITTEN):
        if config._is_default(name):
            continue
        value = getattr(config, name)
        # A setting that was changed for a while is set to the default afterwards.
        if value != entries[name].default:
            changed[name] = value
    return changed
