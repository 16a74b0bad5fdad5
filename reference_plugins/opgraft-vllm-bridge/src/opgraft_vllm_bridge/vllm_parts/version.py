"""The version for a plugin that requires none: ``vllm.version``. The finder answers the others."""

from opgraft_vllm_bridge.versions import announced_to, numbers_of

__version__ = announced_to("")
__version_tuple__ = numbers_of(__version__)
