"""The prefixes of the layers of a model. Each prefix belongs to one layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opgraft.errors import ConstructionError

_PREFIXES: ContextVar[dict[str, str] | None] = ContextVar("opgraft_prefixes", default=None)
"""The layers of the model under construction: prefix → class."""


@contextmanager
def prefixes_of_one_model() -> Iterator[None]:
    """Within the block, let the layers under construction claim their prefixes.

    A block inside of another belongs to the outer one.
    """
    if _PREFIXES.get() is not None:
        yield
        return

    token = _PREFIXES.set({})
    try:
        yield
    finally:
        _PREFIXES.reset(token)


def claim_prefix(prefix: str, layer: object) -> None:
    """Note the prefix of a layer, the name of its weights in the checkpoint. Layers call this once.

    Outside of ``prefixes_of_one_model``, and for an empty prefix, nothing is noted.

    Raises:
        ConstructionError: the model has another layer with the prefix.
    """
    built = _PREFIXES.get()
    if built is None or not prefix:
        return

    name = type(layer).__qualname__
    if prefix in built:
        raise ConstructionError(
            f"two layers are built under the prefix {prefix!r}: {built[prefix]} and {name}. Both "
            "would load the same weights: give each the name that its weights have in the "
            "checkpoint"
        )
    built[prefix] = name
