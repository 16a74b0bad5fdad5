"""``vllm.version``."""

from opgraft import __version__ as _opgraft

__version__ = f"0.33.0+opgraft{_opgraft}"
"""The vLLM whose names these are. Plugins compare it with versions; what stands behind the ``+`` tells who answers."""
