"""The rows of active plugins in the tables of ``graft``."""

from __future__ import annotations

from opgraft.registry.adapter import Adapter, CallAdapter
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue

PLUGIN_ADAPTERS = StateValue[list[tuple[Provider, Adapter | CallAdapter]]](list)
"""Each row with the distribution of the plugin."""
