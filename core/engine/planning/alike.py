"""Compute one of many equal layers for all of them. A large model has a hundred equal layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from opgraft.distributed.groups import Parallelism
from opgraft.engine.planning.imagined import Transfer, noted_by
from torch import Tensor, nn

_Calls = dict[Any, tuple[Any, list[list[Transfer]]]]
"""Kind of a call → the result, and the transfers by communicator."""


@contextmanager
def computed_once(model: nn.Module, parallelism: Parallelism) -> Iterator[None]:
    """Compute one of each kind of layers within the block.

    The collectives of that layer count for each other layer of the kind. Layers are of one kind if
    their modules have the same classes, and parameters of the same shapes. As tensors have no
    memory, the layers return equal results.

    Args:
        model: each stack of layers is a ``nn.ModuleList``.
        parallelism: the groups that count collectives.
    """
    calls: _Calls = {}
    layers: dict[nn.Module, Any] = {}
    noted = noted_by(parallelism)
    for module in model.modules():
        # A single layer has no equal.
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        for layer in module:
            layers[layer] = _structure(layer)
    for layer, structure in layers.items():
        # An attribute of the object hides the method of the class until it is deleted.
        layer.forward = partial(_forward, layer.forward, structure, calls, noted)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(
    forward: Callable[..., Any],
    structure: Any,
    calls: _Calls,
    noted: list[list[Transfer]],
    *args: Any,
    **named: Any,
) -> Any:
    """Call a layer, or repeat the transfers of an equal call and return its result.

    Args:
        forward: the layer's own method.
        structure: the kind of the layer.
        calls: the calls so far.
        noted: the transfers that each communicator has noted.
        *args: arguments of the layer.
        **named: arguments of the layer by name.
    """
    # Equal layers may be called differently: the first one gets no residual.
    shapes = tuple(_shape(value) for value in args)
    shapes_by_name = tuple((name, _shape(value)) for name, value in named.items())
    key = (structure, shapes, shapes_by_name)
    if key not in calls:
        counts = [len(transfers) for transfers in noted]
        result = forward(*args, **named)
        added = []
        for transfers, count in zip(noted, counts, strict=True):
            added.append(transfers[count:])
        calls[key] = (result, added)
        return result
    result, added = calls[key]
    for transfers, more in zip(noted, added, strict=True):
        transfers += more
    return result


def _structure(layer: nn.Module) -> Any:
    """Return a value that is equal for layers of one kind."""
    classes = tuple((name, type(module)) for name, module in layer.named_modules())
    parameters = tuple(
        (name, tensor.shape, tensor.dtype) for name, tensor in layer.named_parameters()
    )
    return classes, parameters


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)
