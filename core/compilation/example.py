"""The example by which a model is captured, and which its calls are like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opgraft.compat.graphs import flattened
from torch import Tensor


class Example(NamedTuple):
    """An example of the arguments of a model, as ``torch.export`` takes them.

    Attributes:
        args: by position.
        kwargs: by name.
        dynamic_shapes: which sizes are dynamic; ``None`` for the first dimension of every tensor.
        sizes: that the dynamic size may be; any if not given.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    sizes: range | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Example:
        """Return an example of which each tensor is one of its own: one that is given twice would be one input."""
        leaves, structure = flattened((args, dict(kwargs)))
        seen: set[int] = set()
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in seen:
                leaves[place] = leaf.clone()
            seen.add(id(leaf))
        args, kwargs = structure.unflatten(leaves)
        return cls(args, kwargs, dynamic_shapes)
