"""Backends: have a backend of ``torch.compile`` make a function of a lowered graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compat.ahead_of_time import trusting_processor
from opgraft.compat.graphs import FIXED_SIZES, known_backends, lookup, tracing_in
from opgraft.errors import CompilationError, ConfigError, RecompilationError, close_matches
from opgraft.registry.state import host_state
from torch import Tensor, fx

Runner = Callable[..., Sequence[Any]]
"""A function of the tensors of a graph's placeholders. It returns the flat results."""


def built(module: fx.GraphModule, backend: str) -> Runner:
    """Return the function that a backend makes of a graph, for any value of the dynamic sizes.

    Raises:
        ConfigError: there is no such backend.
        CompilationError: the backend fails.
    """
    if backend in FIXED_SIZES:
        backend_of(backend)
        strict = bool(host_state().settings().config.strict)
        return _OfSizes(backend, functools.partial(_built, module, backend), strict)
    return _built(module, backend)


_WARMS_UP: ContextVar[bool] = ContextVar("opgraft_warms_up", default=False)


@contextmanager
def warm_up() -> Iterator[None]:
    """Let calls within the block compile. After the block, strict mode forbids that."""
    token = _WARMS_UP.set(True)
    try:
        yield
    finally:
        _WARMS_UP.reset(token)


class _OfSizes:
    """The code of a backend for fixed sizes: a program per combination, made at the first call.

    Strict mode makes programs within ``warm_up`` alone.
    """

    def __init__(self, backend: str, build: Callable[[], Runner], strict: bool) -> None:
        self._backend = backend
        self._build = build
        self._strict = strict
        self._runners: dict[tuple[torch.Size, ...], Runner] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        sizes = tuple(each.shape for each in tensors)
        if sizes not in self._runners:
            if self._strict and not _WARMS_UP.get():
                raise self._would_recompile(sizes)
            self._runners[sizes] = self._build()
        return self._runners[sizes](*tensors)

    def _would_recompile(self, sizes: Sequence[torch.Size]) -> RecompilationError:
        called = [list(each) for each in sizes]
        known = ", ".join(str([list(each) for each in sizes]) for sizes in self._runners)
        return RecompilationError(
            f"strict mode: the backend {self._backend} would compile another program, as tensors "
            f"have the sizes {called}, and it has programs for {known}. Next: call it with those; "
            "compile it with an example of this size; or set OPGRAFT_STRICT=0, and it compiles one"
        )


def _built(module: fx.GraphModule, backend: str) -> Runner:
    compiler = backend_of(backend)
    example: list[Tensor] = [
        node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"
    ]
    tensors: list[Any] = [x for x in example if isinstance(x, Tensor)]
    mode = tensors[0].fake_mode if tensors else None
    try:
        with tracing_in(mode), torch.no_grad():
            compiled: Callable[[], Runner] = functools.partial(compiler, module, example)
            return trusting_processor(compiled) if backend == "inductor" else compiled()
    # A backend may raise anything.
    except Exception as error:
        raise CompilationError(
            f"the backend {backend} fails on the graph: {described(error)}. Next: set another "
            "compilation_config.backend, such as eager, which generates no code; inductor needs a "
            "C++ compiler, such as g++ or what CXX names"
        ) from error


def backend_of(name: str) -> Callable[..., Any]:
    """Return the backend of a name.

    Raises:
        ConfigError: there is no backend of that name here.
    """
    try:
        return lookup(name)
    # The class of torch's error is private, and entry points raise anything.
    except Exception as error:
        raise ConfigError(
            f"compilation_config.backend is {name!r}, which cannot be used here "
            f"({described(error)}): {close_matches(name, known_backends())}"
        ) from error
