"""The prefixes under which the layers of a model are built, each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opgraft.errors import ConstructionError

_PREFIXES: ContextVar[dict[str, str] | None] = ContextVar("opgraft_prefixes", default=None)
"""While a model is constructed: prefix → the class that was built under it."""


@contextmanager
def prefixes_of_one_model() -> Iterator[None]:
    """Have the layers that are built within the block claim their prefixes; a block inside of another is part of it."""
    token = _PREFIXES.set({}) if _PREFIXES.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _PREFIXES.reset(token)


def claim_prefix(prefix: str, layer: object) -> None:
    """Note that ``layer`` is built under ``prefix``, the name of its weights in the checkpoint; layers call this once.

    A layer on its own, outside of such a block, and an empty prefix are not noted.

    Raises:
        ConstructionError: the model has a layer under that prefix already.
    """
    built = _PREFIXES.get()
    if built is None or not prefix:
        return
    name = type(layer).__qualname__
    if prefix in built:
        raise ConstructionError(
            f"two layers are built under the prefix {prefix!r}: {built[prefix]} and {name}. Both would load the same "
            "weights: give each the name that its weights have in the checkpoint"
        )
    built[prefix] = name
