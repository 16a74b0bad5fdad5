"""``vllm.version``, as a plugin is told that requires no version. The finder answers each plugin."""

from opgraft_vllm_bridge.versions import announced_to

__version__ = announced_to("")
