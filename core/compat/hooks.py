"""Hooks that torch calls for every module of the process."""

from __future__ import annotations

from torch.nn.modules import module as registries

try:
    _before = registries._global_forward_pre_hooks
    _after = registries._global_forward_hooks
    cannot_tell: str | None = None
except AttributeError as error:
    _before = _after = {}
    cannot_tell = f"this torch cannot tell whether every module has hooks ({error})"
"""The reason why ``hooks_on_every_module`` cannot tell. Then the answer is always True."""


def hooks_on_every_module() -> bool:
    """Return True if every module has a hook, as by ``register_module_forward_hook``."""
    return bool(_before or _after) or cannot_tell is not None
