"""``Example``: the arguments of one call, for capturing a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opgraft.compat.graphs import flattened
from torch import Tensor


class Example(NamedTuple):
    """An example of the arguments of a model, as for ``torch.export``.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        dynamic_shapes: the dynamic sizes; ``None`` for the first dimension of every tensor.
        sizes: the allowed values of the dynamic size; ``None`` for any.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    sizes: range | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Example:
        """Return an example without a tensor in two places."""
        leaves, structure = flattened((args, dict(kwargs)))
        seen: set[int] = set()
        for place, leaf in enumerate(leaves):
            # Export would make one input of a tensor in two places.
            if isinstance(leaf, Tensor) and id(leaf) in seen:
                leaves[place] = leaf.clone()
            seen.add(id(leaf))
        args, kwargs = structure.unflatten(leaves)
        return cls(args, kwargs, dynamic_shapes)
