"""The rows that active plugins add to the table by which ``graft`` recognises modules."""

from __future__ import annotations

from opgraft.registry.adapter import Adapter
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue

PLUGIN_ADAPTERS = StateValue[list[tuple[Provider, Adapter]]](list)
"""Each row with the distribution of its plugin."""
