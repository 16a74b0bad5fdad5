"""``vllm.version`` for a plugin that requires no version. The finder answers all other plugins."""

from opgraft_vllm_bridge.versions import announced_to

__version__ = announced_to("")
