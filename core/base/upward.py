"""Functions of higher floors that lower floors call. ``opgraft`` sets them at its import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

declared_settings: Callable[[], Mapping[str, Any]]
"""Return the settings that installed distributions declare, by dotted name."""
