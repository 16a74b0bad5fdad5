"""The plugin's hooks. The host calls them if the platform was asked for."""

from __future__ import annotations

import opgraft

from opgraft_jax.ops import REPLACEMENTS


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register each op under the class of the catalogue that it replaces."""
    for replacement in REPLACEMENTS:
        (target,) = replacement.__bases__
        opgraft.CustomOp.register_oot(replacement, name=target)
