"""Workers that start fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def warm_workers(warm_python: str) -> Iterator[None]:
    """Processes of workers start with torch imported; ``warm.interpreter.process_of`` tells which one works."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", warm_python)
        yield
