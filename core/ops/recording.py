"""The recording of static graphs: ops must not ask the device for values meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_RECORDING: ContextVar[bool] = ContextVar("opgraft_recording", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """Have ops within the block compute without a look at values, as while a compiler traces."""
    token = _RECORDING.set(True)
    try:
        yield
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Return True within a block of ``recording``."""
    return _RECORDING.get()
