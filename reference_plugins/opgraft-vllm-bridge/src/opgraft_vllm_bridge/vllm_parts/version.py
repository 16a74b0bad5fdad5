"""The version for a plugin that requires none: ``vllm.version``. The finder answers the others."""

from opgraft_vllm_bridge.versions import announced_to

__version__ = announced_to("")
