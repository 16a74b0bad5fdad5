"""What happens when the plugin is activated: its classes take the place of the catalogue's on the CPU platform."""

from __future__ import annotations

import opgraft

from opgraft_cpu_kernels import ops

platforms = ("cpu",)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Declare the replacements. Where the library is missing they say so, and the native definitions run."""
    for replacement in ops.REPLACEMENTS:
        opgraft.CustomOp.register_oot(replacement, name=replacement.__mro__[1])
