"""A plugin in order, beside which others have their faults."""

from __future__ import annotations

from typing import Any

import opgraft
import pytest
from conftest import Site
from faults.planting import GOOD, of_brix

_seen: dict[str, Any] = {}


@pytest.fixture
def alone(site: Site) -> dict[str, Any]:
    """Install brix; what it gives others where it is alone."""
    site.plugin("brix", GOOD)
    if not _seen:
        _seen.update(of_brix())
        opgraft.reset()
    return _seen
