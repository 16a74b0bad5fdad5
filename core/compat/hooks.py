"""Hooks that torch calls for every module of the process."""

from __future__ import annotations

from torch.nn.modules import module as registries

try:
    _before, _after = registries._global_forward_pre_hooks, registries._global_forward_hooks
    cannot_tell: str | None = None
except AttributeError as error:
    _before = _after = {}
    cannot_tell = f"this torch cannot tell whether every module has hooks ({error})"
"""The reason why ``hooks_on_every_module`` cannot tell, in which case it is always true."""


def hooks_on_every_module() -> bool:
    """Return whether ``register_module_forward_hook`` or its sibling was called; torch has no public way to ask."""
    return bool(_before or _after) or cannot_tell is not None
