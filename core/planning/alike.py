"""Layers of a stack that are alike, of which one is computed for all: a large model has a hundred of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from opgraft.distributed.groups import Parallelism
from opgraft.planning.imagined import Transfer, noted_by
from torch import Tensor, nn


@contextmanager
def computed_once(model: nn.Module, parallelism: Parallelism) -> Iterator[None]:
    """Within the block compute the first of layers that are alike, and count its collectives for each of the others.

    Tensors have no memory, so that what the first returns is as good as what another would. Layers are alike whose
    modules have the same classes, and parameters of the same shapes.

    Args:
        model: whose stacks of layers are ``nn.ModuleList``.
        parallelism: whose collectives are counted.
    """
    known: dict[Any, tuple[Any, list[list[Transfer]]]] = {}
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = {layer: _structure(layer) for stack in stacks if len(stack) > 1 for layer in stack}
    for layer, structure in layers.items():
        layer.forward = partial(_forward, layer.forward, structure, known, noted_by(parallelism))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(
    forward: Callable[..., Any],
    structure: Any,
    known: dict[Any, tuple[Any, list[list[Transfer]]]],
    noted: list[list[Transfer]],
    *args: Any,
    **named: Any,
) -> Any:
    key = (
        structure,
        tuple(map(_shape, args)),
        tuple((name, _shape(value)) for name, value in named.items()),
    )
    if key not in known:
        before = [len(each) for each in noted]
        result = forward(*args, **named)
        known[key] = result, [each[start:] for each, start in zip(noted, before, strict=True)]
        return result
    result, made = known[key]
    for each, more in zip(noted, made, strict=True):
        each += more
    return result


def _structure(layer: nn.Module) -> Any:
    classes = tuple((name, type(module)) for name, module in layer.named_modules())
    return classes, tuple(
        (name, tensor.shape, tensor.dtype) for name, tensor in layer.named_parameters()
    )


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)
