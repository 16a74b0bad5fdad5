"""The plugin's hooks, which the host calls where the platform was asked for."""

from __future__ import annotations

import opgraft

from opgraft_jax.ops import REPLACEMENTS


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Put the ops in place of the catalogue's."""
    for replacement in REPLACEMENTS:
        (target,) = replacement.__bases__
        opgraft.CustomOp.register_oot(replacement, name=target)
